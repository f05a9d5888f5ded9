"""Splits a batch into microbatches: tensors along their batch dims, lists by items, and objects as they split
themselves; everything else goes to each microbatch unchanged.

    model(x [4, 12], texts=[4 texts], graphs=Batch of 4)  loss_fn(output, y [4])    two microbatches
    model(x [2, 12], texts=[2 texts], graphs=Batch of 2)  loss_fn(output, y [2])    the first one

A batch is a tree (program/tree.py): its tensors may be anywhere in containers and objects. Detection models
take the samples as items of lists: images of several sizes, a dict of boxes for each image.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from outsize.capture.recording.fallbacks import LossFn
from outsize.errors import BadOption
from outsize.program.objects import Scope, walk
from outsize.program.tree import (
    Steps,
    accessor,
    key_of,
    map_parts,
    map_tensors,
    parts,
    tensors_in,
    with_copied_tensors,
)
from outsize.train.batch.packed import PackedRows
from outsize.train.batch.samples import (
    MICROBATCHES,
    Rows,
    divides_itself,
    lists_in,
    samples_in,
    samples_of,
)

Dims = tuple[int | PackedRows | None, ...]
_HIDDEN = Scope(functions=True)
_STRIDED: Final = torch.strided


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of `model(*args, **kwargs)` and of `loss_fn(output, *target)`.

    `dims` gives, for each of `tensors()`, the dim along which the samples lie, the numbers of rows that
    belong to each sample, or None for a tensor that goes whole to every microbatch. Without `dims`, samples
    lie along dim 0 of every tensor whose dim 0 has the size of the first tensor's. `listed` holds the steps
    from `tree()` to the parts that are taken apart by their samples as a whole: lists, and objects that
    divide themselves; their tensors have no dims. None means that they are recognised by what they hold.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...] = ()
    dims: Dims | None = None
    listed: tuple[Steps, ...] | None = None

    def tree(self) -> tuple[Any, ...]:
        """Returns all arguments in the order in which the tape counts its inputs."""
        return (self.args, self.kwargs, self.target)

    def plain(self) -> list[Tensor] | None:
        """Returns the arguments in the order of `tree` where each of them is a plain tensor; else None.

        A step asks a dozen times what is in a batch, and of most batches a walk would say nothing more.
        """
        values = [*self.args, *self.kwargs.values(), *self.target]
        is_plain = all(type(v) is Tensor and v.layout is _STRIDED and not v.is_nested for v in values)
        return values if is_plain else None

    def tensors(self) -> list[Tensor]:
        """Returns the tensors of the batch, which are the tape's inputs."""
        plain = self.plain()
        return tensors_in(self.tree()) if plain is None else plain

    def owner(self, steps: Steps) -> str | int:
        """Returns the argument that a part is in: its position or name, or "target"."""
        branch = steps[0][1]
        return "target" if branch == 2 else steps[1][1]

    def owners(self) -> list[str | int]:
        """Returns, for each of the batch's tensors, the argument that it came in."""
        return [self.owner(steps) for steps, part in parts(self.tree()) if isinstance(part, Tensor)]

    def in_lists(self) -> tuple[Steps, ...]:
        """Returns `listed`, or the steps to what divides itself and to what looks like lists of samples."""
        if self.listed is not None:
            return self.listed
        is_known = self.dims is not None or self.plain() is not None
        return () if is_known else _recognised(self.tree())

    def listed_parts(self) -> list[tuple[Steps, Any]]:
        """Returns the parts that `in_lists` leads to, with the steps to each."""
        wholes = self.in_lists()
        return [(steps, part) for steps, part in self._parts(wholes) if steps in wholes] if wholes else []

    def is_inside(self) -> list[bool]:
        """Returns, for each of the batch's tensors, whether it is in one of the listed parts."""
        wholes = self.in_lists()
        plain = None if wholes else self.plain()
        if plain is not None:
            return [False] * len(plain)
        found: list[bool] = []
        # A tensor in a list of samples has no dim of the batch: its first dim may be a length.
        for steps, part in self._parts(wholes):
            is_listed = steps in wholes
            found += [is_listed] * (len(tensors_in(part)) if is_listed else isinstance(part, Tensor))
        return found

    def _parts(self, wholes: tuple[Steps, ...]) -> list[tuple[Steps, Any]]:
        return parts(self.tree(), lambda steps, _: steps in wholes)

    def batch_dims(self) -> Dims:
        """Returns `dims`, or the batch dims that follow from the sizes of dim 0."""
        if self.dims is not None:
            return self.dims
        pairs = list(zip(self.tensors(), self.is_inside(), strict=True))
        size = next((samples_in(part) for _, part in self.listed_parts()), None)
        if size is None:
            size = next((t.shape[0] for t, inside in pairs if t.ndim and not inside), None)
        return tuple(0 if t.ndim and not inside and t.shape[0] == size else None for t, inside in pairs)

    @property
    def size(self) -> int:
        """Returns the number of samples. Raises BadOption when there is none, or parts disagree."""
        pairs = zip(self.tensors(), self.batch_dims(), strict=True)
        sizes = {_samples_in(t, d) for t, d in pairs if d is not None}
        sizes |= {samples_in(part) for _, part in self.listed_parts()}
        if not sizes or 0 in sizes:
            what = "no sample" if sizes else "no tensor"
            is_closure = not sizes and any(inspect.isroutine(part) for _, part in parts(self.tree()))
            raise BadOption(
                f"the batch holds {what}{', but a function' if is_closure else ''}",
                next_step="engine.step(x, target=y), which passes a closure to an optimizer that wants one"
                if is_closure
                else "pass the example batch as tensors",
            )
        if len(sizes) > 1:
            raise BadOption(
                "the tensors of the batch disagree about the number of samples",
                numbers=f"{sorted(sizes)} along the batch dims {self.batch_dims()}",
                next_step="batch_dims={'name': dim} says where samples lie, None that there are none",
            )
        return sizes.pop()

    def split(self, microbatches: int) -> list[Batch]:
        """Returns the microbatches in order; their sizes differ by one at most, the larger ones come first.

        There are fewer than `microbatches` when the batch has fewer samples.
        """
        size = self.size
        count = max(1, min(microbatches, size))
        edges = [size // count * m + min(m, size % count) for m in range(count + 1)]
        return [self.take(slice(a, b)) for a, b in pairwise(edges)]

    def take(self, rows: Rows) -> Batch:
        """Returns a batch of the samples `rows`. Raises BadOption for a part that cannot be split."""
        wholes, size = self.in_lists(), self.size
        plain = None if wholes else self.plain()
        if plain is not None:
            return self._taken(plain, rows)
        dims, taken = iter(self.batch_dims()), list[int | PackedRows | None]()

        def part(steps: Steps, value: Any) -> Any:
            if steps in wholes:
                for _ in tensors_in(value):
                    next(dims)  # `dims` has one for each tensor of the batch, also for those in lists
                samples = samples_of(value, rows)
                taken.extend([None] * len(tensors_in(samples)))
                return samples
            if not isinstance(value, Tensor):
                _insist_on_splittable(steps, value, size)
                return value
            _insist_on_splittable(steps, value, size)
            dim = next(dims)
            taken.append(dim.taken(rows) if isinstance(dim, PackedRows) else dim)
            return _rows_of(value, dim, rows)

        args, kwargs, target = map_parts(part, self.tree(), lambda steps, _: steps in wholes)
        return Batch(args, kwargs, target, tuple(taken), wholes)

    def _taken(self, plain: list[Tensor], rows: Rows) -> Batch:
        """Returns what `take` does, of a batch whose arguments are these tensors."""
        dims = self.batch_dims()
        values = iter([_rows_of(value, dim, rows) for value, dim in zip(plain, dims, strict=True)])
        args, kwargs = tuple(next(values) for _ in self.args), {name: next(values) for name in self.kwargs}
        taken = tuple(dim.taken(rows) if isinstance(dim, PackedRows) else dim for dim in dims)
        return Batch(args, kwargs, tuple(values), taken, ())

    def copied(self) -> Batch:
        """Returns the batch with copies of its tensors, for a model that may write into them."""
        args, kwargs, target = with_copied_tensors(self.tree())
        return replace(self, args=args, kwargs=kwargs, target=target)

    def resized(self, samples: int) -> Batch:
        """Returns the batch with `samples` samples: its first ones, repeated when there are too few."""
        size = self.size
        return self if size == samples else self.take(torch.arange(samples) % size)

    def with_other_values(self) -> Batch | None:
        """Returns a batch of the same shapes: samples in another order, and tensors that hold none halved.

        All tensors are halved where another order changes nothing. Those of integers keep their values, which
        may be positions in something; None when a batch has no others.
        """
        # Another order keeps values that are valid, such as tokens of the vocabulary; new ones may not be.
        turned = self.take(torch.arange(self.size).roll(1))
        before, now = self.tensors(), turned.tensors()
        is_turned = not _are_equal(before, now)
        if len(before) != len(now):  # Samples that are objects may hold other numbers of tensors.
            return turned
        is_whole = [dim is None for dim in turned.batch_dims()]
        pairs = zip(before, now, is_whole, turned.is_inside(), strict=True)
        made = [
            _laid_out(_halved(new) if not is_turned or (whole and not inside) else new, old)
            for old, new, whole, inside in pairs
        ]
        left = iter(made)
        args, kwargs, target = map_tensors(lambda _: next(left), turned.tree())
        return None if _are_equal(before, made) else replace(turned, args=args, kwargs=kwargs, target=target)

    def signature(self) -> Hashable:
        """Returns what is equal for batches that share a tape, guards aside.

        It holds shapes, strides, dtypes, devices and the plain Python values, and objects that cannot be
        looked into.
        """
        plain = self.plain()
        if plain is not None:
            return len(self.args), *self.kwargs, len(self.target), *map(_kind_of, plain)
        return key_of(self.tree(), _kind_of)

    def mapped(self, part: Callable[[Any], Any]) -> Batch:
        """Returns the batch with `part(leaf)` in place of every leaf."""
        args, kwargs, target = map_parts(lambda _, leaf: part(leaf), self.tree())
        return replace(
            self, args=args, kwargs=kwargs, target=target, dims=self.batch_dims(), listed=self.in_lists()
        )


def _kind_of(tensor: Tensor) -> Hashable:
    """Returns what a recorded program depends on of a tensor."""
    how = tensor.layout, tensor.dtype, tensor.device, tensor.requires_grad
    if tensor.is_nested:
        return how, tuple((row.shape, row.stride()) for row in tensor.unbind())
    return how, tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else None


def _rows_of(tensor: Tensor, dim: int | PackedRows | None, rows: Rows) -> Tensor:
    """Returns the samples `rows` of a tensor. A slice gives a view: a microbatch of the user's tensors takes
    no memory.
    """
    if isinstance(dim, PackedRows):
        return tensor[dim.rows_of(rows).to(tensor.device)]
    return tensor if dim is None else tensor[(slice(None),) * dim + (rows,)]


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Returns whether tensors are equal, as far as they can be compared: nested ones cannot."""
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(not a.is_nested and torch.equal(a, b) for a, b in pairs)


def _halved(tensor: Tensor) -> Tensor:
    """Returns half of a tensor of a floating-point dtype that has arithmetic, and others as they are."""
    is_halved = tensor.is_complex() or (tensor.is_floating_point() and torch.finfo(tensor.dtype).bits > 8)
    return (tensor.detach() * 0.5).requires_grad_(tensor.requires_grad) if is_halved else tensor


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor with the strides of another one, which the same recorded program takes.

    Dims along which memory repeats (`expand`) repeat in it, too.
    """
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.shape != like.shape:
        return tensor
    if tensor.stride() == like.stride():
        return tensor
    # `empty_strided` with a stride of 0 would write each element several times, into one place.
    once = tensor.detach()
    for dim in (d for d, stride in enumerate(like.stride()) if not stride and like.shape[d]):
        once = once.narrow(dim, 0, 1)
    made = torch.empty_strided(once.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        once
    )
    return made.expand(like.shape).requires_grad_(tensor.requires_grad)


def _samples_in(tensor: Tensor, dim: int | PackedRows) -> int:
    return len(dim.counts) if isinstance(dim, PackedRows) else tensor.shape[dim]


def _recognised(tree: Any) -> tuple[Steps, ...]:
    """Returns the steps to the parts that divide themselves, and to the lists that have as many items as
    there are samples.

    The number of samples is that of the first such part, or of the first tensor outside of lists, or of the
    first list of dicts or objects with tensors. A list whose tensors all have that size along dim 0 is taken
    for a list of whole batches instead, and one without tensors is only taken apart beside others.
    """
    found = parts(tree, lambda _, value: divides_itself(value))
    divided = tuple(steps for steps, part in found if divides_itself(part))
    lists = [(steps, value, tensors_in(value)) for steps, value in lists_in(tree, divided)]
    if not lists:
        return divided
    wholes = (*divided, *(steps for steps, *_ in lists))
    # Tensors outside of lists are the surest sign of how many samples there are.
    free = (part for steps, part in parts(tree, lambda steps, _: steps in wholes) if steps not in wholes)
    counts = [samples_in(part) for steps, part in found if steps in divided]
    counts += [part.shape[0] for part in free if isinstance(part, Tensor) and part.ndim]
    of_records = [len(v) for _, v, tensors in lists if tensors and not isinstance(v[0], Tensor)]
    count = next(iter(counts or of_records), 0)
    candidates = [(s, ts) for s, v, ts in lists if len(v) == count and (type(v) is list or not ts)]
    unequal = [s for s, tensors in candidates if any(t.shape[:1] != (count,) for t in tensors)]
    if counts:
        candidates = [(s, tensors) for s, tensors in candidates if s in unequal or not tensors]
    return (*divided, *(s for s, _ in candidates)) if unequal else divided


def _insist_on_splittable(steps: Steps, part: Any, size: int) -> None:
    """Raises BadOption for a part that would go whole to every microbatch though it holds samples."""
    name = accessor(steps[1:])
    if isinstance(part, np.ndarray) and part.ndim:
        raise BadOption(
            f"the batch holds a NumPy array (at {name}), which is not split into microbatches",
            numbers=f"shape {part.shape}",
            next_step="pass torch.as_tensor(array)",
        )
    if isinstance(part, Tensor):
        if part.layout is not torch.strided:
            raise BadOption(
                f"the batch holds a tensor of layout {part.layout} (at {name}), which is not split",
                numbers=f"shape {tuple(part.shape)}",
                next_step=f"tensor.to_dense(), or {MICROBATCHES}",
            )
        return
    hidden = ((path, t) for path, t in walk([[part]], _HIDDEN) if isinstance(t, Tensor) and t.ndim)
    found = next(((path, t) for path, t in hidden if t.shape[0] == size), None)
    # A tensor of another size than the batch is taken for one that holds no samples, such as a table.
    if found is not None:
        raise BadOption(
            f"the batch holds a {type(part).__name__} (at {name}) with a tensor in it, which is not split",
            numbers=f"shape {tuple(found[1].shape)}, {size} samples",
            next_step=MICROBATCHES,
        )


def microbatch(*args: Any, target: Any = None, **kwargs: Any) -> Batch:
    """Returns one microbatch for `engine.step([...])`: the arguments of the model and of the loss
    function.
    """
    return Batch(args, kwargs, as_target(target))


def microbatches_in(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> list[Batch] | None:
    """Returns the list of microbatches that is the only argument, or None when there is no such list.

    Raises BadOption when there are other arguments too.
    """
    if not args or not isinstance(args[0], list | tuple) or not any(isinstance(x, Batch) for x in args[0]):
        return None
    others = [x for x in args[0] if not isinstance(x, Batch)]
    argument_count = len(args) - 1 + len(kwargs) + (target is not None)
    if others or argument_count:
        raise BadOption(
            "a list of microbatches is the only argument, and holds nothing else",
            numbers=f"{len(others)} other items in it, {argument_count} arguments beside it",
            next_step="engine.step([outsize.microbatch(x, target=y), ...])",
        )
    return list(args[0])


def as_target(target: Any) -> tuple[Any, ...]:
    """Returns the loss function's target arguments as a tuple; `target` is None, one value, or a tuple."""
    if target is None:
        return ()
    return target if isinstance(target, tuple) else (target,)


def evaluating_loss(loss_fn: LossFn | None, part: Batch) -> LossFn | None:
    """Returns the loss function, or None when it needs a target and the evaluation has none."""
    if loss_fn is None or part.target:
        return loss_fn
    try:
        inspect.signature(loss_fn).bind(None)
    except TypeError:
        return None
    except ValueError:  # a builtin has no signature to read
        return loss_fn
    return loss_fn
