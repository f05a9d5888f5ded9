"""Splits a batch into microbatches: tensors along their batch dims, everything else goes to each unchanged.

Detection models take the samples as items of lists: images of several sizes, a dict of boxes for each image.
A list with as many items as there are samples is split by items, unless its tensors have that size along dim
0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from outsize.capture.recording.fallbacks import LossFn
from outsize.errors import BadOption
from outsize.program.tree import leaves, map_leaves, with_copied_tensors
from outsize.train.batch.packed import PackedRows

Dims = tuple[int | PackedRows | None, ...]


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of `model(*args, **kwargs)` and of `loss_fn(output, *target)`.

    `dims` gives, for each of `tensors()`, the dim along which the samples lie, the numbers of rows that
    belong to each sample, or None for a tensor that goes whole to every microbatch. Without `dims`, samples
    lie along dim 0 of every tensor whose dim 0 has the size of the first tensor's. `listed` holds the
    positions among `values()` of the lists whose items are
    samples; None means that they are recognised by their lengths.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...] = ()
    dims: Dims | None = None
    listed: tuple[int, ...] | None = None

    def values(self) -> tuple[Any, ...]:
        """Returns the arguments one by one; those of the loss function come last."""
        return (*self.args, *self.kwargs.values(), *self.target)

    def in_lists(self) -> tuple[int, ...]:
        """Returns `listed`, or the positions of the lists that look like lists of samples."""
        if self.listed is not None:
            return self.listed
        return _lists_of_samples(self.values()) if self.dims is None else ()

    def tree(self) -> tuple[Any, ...]:
        """Returns all arguments in the order in which the tape counts its inputs."""
        return (self.args, self.kwargs, self.target)

    def tensors(self) -> list[Tensor]:
        """Returns the tensors of the batch, which are the tape's inputs."""
        return [leaf for leaf in leaves(self.tree()) if isinstance(leaf, Tensor)]

    def batch_dims(self) -> Dims:
        """Returns `dims`, or the batch dims that follow from the sizes of dim 0."""
        if self.dims is not None:
            return self.dims
        if self.in_lists():
            return self._dims_outside_lists()
        first_dims = [t.shape[0] if t.ndim else None for t in self.tensors()]
        size = next((h for h in first_dims if h is not None), None)
        return tuple(0 if h is not None and h == size else None for h in first_dims)

    @property
    def size(self) -> int:
        """Returns the number of samples.

        Raises BadOption when there is no sample, or a value that cannot be split.
        """
        for leaf in leaves(self.tree()):
            _insist_on_splittable(leaf)
        pairs = zip(self.tensors(), self.batch_dims(), strict=True)
        sizes = {_samples_in(t, d) for t, d in pairs if d is not None}
        sizes |= {len(self.values()[place]) for place in self.in_lists()}
        if not sizes or 0 in sizes:
            what = "no sample" if sizes else "no tensor"
            is_closure = not sizes and any(inspect.isroutine(leaf) for leaf in leaves(self.tree()))
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

    def take(self, rows: slice | Tensor) -> Batch:
        """Returns a batch of the samples `rows`."""
        dims = iter(self.batch_dims())

        def part(leaf: Any) -> Any:
            dim = next(dims) if isinstance(leaf, Tensor) else None
            if isinstance(dim, PackedRows):
                return leaf[dim.rows_of(rows).to(leaf.device)]
            return leaf if dim is None else leaf[(slice(None),) * dim + (rows,)]

        mapped = self.mapped(part)
        if mapped.dims is not None:
            taken = (d.taken(rows) if isinstance(d, PackedRows) else d for d in mapped.dims)
            mapped = replace(mapped, dims=tuple(taken))
        return mapped._with_items(rows) if mapped.listed else mapped

    def _with_items(self, rows: slice | Tensor) -> Batch:
        """Returns the batch with only the items `rows` of its lists of samples."""
        values = list(self.values())
        for place in self.in_lists():
            items = values[place]
            values[place] = items[rows] if isinstance(rows, slice) else [items[int(i)] for i in rows]
        first, rest = values[: len(self.args)], values[len(self.args) :]
        kwargs = dict(zip(self.kwargs, rest, strict=False))
        return replace(self, args=tuple(first), kwargs=kwargs, target=tuple(rest[len(kwargs) :]))

    def _dims_outside_lists(self) -> Dims:
        """Returns dim 0 for tensors of as many rows as the lists have items, None within the lists."""
        lists, dims = self.in_lists(), []
        count = len(self.values()[lists[0]])
        for place, argument in enumerate(self.values()):
            is_outside = place not in lists
            dims += [0 if is_outside and t.shape[:1] == (count,) else None for t in _tensors(argument)]
        return tuple(dims)

    def copied(self) -> Batch:
        """Returns the batch with copies of its tensors, for a model that may write into them."""
        args, kwargs, target = with_copied_tensors(self.tree())
        return replace(self, args=args, kwargs=kwargs, target=target)

    def resized(self, samples: int) -> Batch:
        """Returns the batch with `samples` samples: its first ones, repeated when there are too few."""
        size = self.size
        return self if size == samples else self.take(torch.arange(samples) % size)

    def signature(self) -> str:
        """Returns a text that is equal for batches that share a tape, guards aside.

        It holds shapes, strides, dtypes, devices and the plain Python values.
        """

        def text(leaf: Any) -> str:
            if isinstance(leaf, Tensor):
                return f"{tuple(leaf.shape)}{leaf.stride()}{leaf.dtype}{leaf.device}{leaf.requires_grad}"
            return repr(leaf)

        return repr(map_leaves(text, self.tree()))

    def mapped(self, part: Callable[[Any], Any]) -> Batch:
        """Returns the batch with `part(leaf)` in place of every leaf."""
        args, kwargs, target = (map_leaves(part, branch) for branch in self.tree())
        lists = self.in_lists()
        dims = None if lists else self.batch_dims()
        return replace(self, args=args, kwargs=kwargs, target=target, dims=dims, listed=lists)


def _samples_in(tensor: Tensor, dim: int | PackedRows) -> int:
    return len(dim.counts) if isinstance(dim, PackedRows) else tensor.shape[dim]


def _lists_of_samples(values: Sequence[Any]) -> tuple[int, ...]:
    """Returns the positions of the lists that have as many items as there are samples.

    The number of samples is that of the first tensor argument, or of the first list of dicts of tensors. A
    list whose tensors all have that size along dim 0 is taken for a list of whole batches instead.
    """
    first_dims = [v.shape[0] for v in values if isinstance(v, Tensor) and v.ndim]
    dicts = [len(v) for v in values if type(v) is list and v and isinstance(v[0], dict) and _tensors(v)]
    count = next(iter(first_dims or dicts), 0)
    candidates = [p for p, v in enumerate(values) if type(v) is list and len(v) == count > 0]
    unequal = [p for p in candidates if any(t.shape[:1] != (count,) for t in _tensors(values[p]))]
    if first_dims:
        candidates = [p for p in candidates if p in unequal or not _tensors(values[p])]
    return tuple(candidates) if unequal else ()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def _insist_on_splittable(leaf: Any) -> None:
    """Raises BadOption for a leaf that cannot be split.

    Arrays and objects would go whole to every microbatch and be recorded as constants.
    """
    if isinstance(leaf, np.ndarray) and leaf.ndim:
        raise BadOption(
            "the batch holds a NumPy array, which is not split into microbatches",
            numbers=f"shape {leaf.shape}",
            next_step="pass torch.as_tensor(array)",
        )
    if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
        raise BadOption(
            f"the batch holds a tensor of layout {leaf.layout}", next_step="pass it dense: tensor.to_dense()"
        )
    attributes = getattr(leaf, "__dict__", {}) if not isinstance(leaf, Tensor) else {}
    tensor_name = next((name for name, value in attributes.items() if isinstance(value, Tensor)), None)
    if tensor_name is not None:
        raise BadOption(
            f"the batch holds a {type(leaf).__name__}, whose tensors (.{tensor_name}) cannot be seen",
            next_step="pass its tensors as arguments, or make it a dataclass or a dict",
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
