"""Split a batch into microbatches: tensors along their batch dims, everything else goes to each as it is.

Detectors take samples as items of lists: images of several sizes, a dict of boxes for each. A list of as many
items as there are samples is split by items, unless its tensors have that many along dim 0.
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

from outsize.capture.ladder import LossFn
from outsize.errors import BadOption
from outsize.program.tree import leaves, map_leaves

Dims = tuple[int | None, ...]


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """What `model(*args, **kwargs)` and `loss_fn(output, *target)` are called with.

    `dims` says for each of `tensors()` along which dim samples lie (None: the same for all of them);
    without it they lie along dim 0 of every tensor that has as many there as the first one. `listed` are
    the positions among `values()` of lists whose items are samples (None: as it looks).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...] = ()
    dims: Dims | None = None
    listed: tuple[int, ...] | None = None

    def values(self) -> tuple[Any, ...]:
        """The arguments one by one, those of the loss function last."""
        return (*self.args, *self.kwargs.values(), *self.target)

    def in_lists(self) -> tuple[int, ...]:
        """`listed`, or those that look so."""
        if self.listed is not None:
            return self.listed
        return _lists_of_samples(self.values()) if self.dims is None else ()

    def tree(self) -> tuple[Any, ...]:
        """All of it in the order in which the tape counts inputs."""
        return (self.args, self.kwargs, self.target)

    def tensors(self) -> list[Tensor]:
        """The tape's inputs."""
        return [leaf for leaf in leaves(self.tree()) if isinstance(leaf, Tensor)]

    def batch_dims(self) -> Dims:
        """`dims`, or those by dim 0."""
        if self.dims is not None:
            return self.dims
        if self.in_lists():
            return self._dims_beside_lists()
        heads = [t.shape[0] if t.ndim else None for t in self.tensors()]
        size = next((h for h in heads if h is not None), None)
        return tuple(0 if h is not None and h == size else None for h in heads)

    @property
    def size(self) -> int:
        """Number of samples. Raises BadOption when there is none, or what cannot be split."""
        for leaf in leaves(self.tree()):
            _insist_on_splittable(leaf)
        pairs = zip(self.tensors(), self.batch_dims(), strict=True)
        sizes = {t.shape[d] for t, d in pairs if d is not None}
        sizes |= {len(self.values()[place]) for place in self.in_lists()}
        if not sizes or 0 in sizes:
            what = "no sample" if sizes else "no tensor"
            raise BadOption(f"the batch holds {what}", next_step="pass the example batch as tensors")
        if len(sizes) > 1:
            raise BadOption(
                "the tensors of the batch disagree about the number of samples",
                numbers=f"{sorted(sizes)} along the batch dims {self.batch_dims()}",
                next_step="batch_dims={'name': dim} says where samples lie, None that there are none",
            )
        return sizes.pop()

    def split(self, microbatches: int) -> list[Batch]:
        """So many parts in order, whose sizes differ by one at most, the larger ones first.

        Fewer when there are not as many samples.
        """
        size = self.size
        count = max(1, min(microbatches, size))
        edges = [size // count * m + min(m, size % count) for m in range(count + 1)]
        return [self.take(slice(a, b)) for a, b in pairwise(edges)]

    def take(self, rows: slice | Tensor) -> Batch:
        """These samples of it."""
        dims = iter(self.batch_dims())

        def part(leaf: Any) -> Any:
            dim = next(dims) if isinstance(leaf, Tensor) else None
            return leaf if dim is None else leaf[(slice(None),) * dim + (rows,)]

        found = self.mapped(part)
        return found._with_items(rows) if found.listed else found

    def _with_items(self, rows: slice | Tensor) -> Batch:
        """These items of the lists of samples."""
        values = list(self.values())
        for place in self.in_lists():
            items = values[place]
            values[place] = items[rows] if isinstance(rows, slice) else [items[int(i)] for i in rows]
        first, rest = values[: len(self.args)], values[len(self.args) :]
        kwargs = dict(zip(self.kwargs, rest, strict=False))
        return replace(self, args=tuple(first), kwargs=kwargs, target=tuple(rest[len(kwargs) :]))

    def _dims_beside_lists(self) -> Dims:
        """Dim 0 where it has as many as the lists; within these there are none."""
        lists, found = self.in_lists(), []
        count = len(self.values()[lists[0]])
        for place, value in enumerate(self.values()):
            mine = place not in lists
            found += [0 if mine and t.shape[:1] == (count,) else None for t in _tensors(value)]
        return tuple(found)

    def resized(self, samples: int) -> Batch:
        """The batch with so many samples: its first ones, repeated when there are too few."""
        size = self.size
        return self if size == samples else self.take(torch.arange(samples) % size)

    def signature(self) -> str:
        """Same text -> same tape, but for guards: shapes, dtypes and the plain Python values."""

        def text(leaf: Any) -> str:
            if isinstance(leaf, Tensor):
                return f"{tuple(leaf.shape)}{leaf.stride()}{leaf.dtype}{leaf.device}{leaf.requires_grad}"
            return repr(leaf)

        return repr(map_leaves(text, self.tree()))

    def mapped(self, part: Callable[[Any], Any]) -> Batch:
        """The batch with `part(leaf)` for every leaf."""
        args, kwargs, target = (map_leaves(part, branch) for branch in self.tree())
        lists = self.in_lists()
        dims = None if lists else self.batch_dims()
        return replace(self, args=args, kwargs=kwargs, target=target, dims=dims, listed=lists)


def _lists_of_samples(values: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the lists with as many items as there are samples by the first argument that is a tensor,
    and not as many along dim 0 within; without such a tensor, by the first list of dicts of tensors.
    """
    heads = [v.shape[0] for v in values if isinstance(v, Tensor) and v.ndim]
    dicts = [len(v) for v in values if type(v) is list and v and isinstance(v[0], dict) and _tensors(v)]
    count = next(iter(heads or dicts), 0)
    fitting = [p for p, v in enumerate(values) if type(v) is list and len(v) == count > 0]
    apart = [p for p in fitting if any(t.shape[:1] != (count,) for t in _tensors(values[p]))]
    if heads:
        fitting = [p for p in fitting if p in apart or not _tensors(values[p])]
    return tuple(fitting) if apart else ()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def _insist_on_splittable(leaf: Any) -> None:
    """Arrays and objects would go whole to every microbatch, and be taken for constants."""
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
    held = getattr(leaf, "__dict__", {}) if not isinstance(leaf, Tensor) else {}
    hidden = next((name for name, value in held.items() if isinstance(value, Tensor)), None)
    if hidden is not None:
        raise BadOption(
            f"the batch holds a {type(leaf).__name__}, whose tensors (.{hidden}) cannot be seen",
            next_step="pass its tensors as arguments, or make it a dataclass or a dict",
        )


def microbatch(*args: Any, target: Any = None, **kwargs: Any) -> Batch:
    """One microbatch for `engine.step([...])`: what the model and the loss function are called with."""
    return Batch(args, kwargs, as_target(target))


def microbatches_in(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> list[Batch] | None:
    """The list of microbatches that is the only argument, or None. Raises BadOption for more beside it."""
    if not args or not isinstance(args[0], list | tuple) or not any(isinstance(x, Batch) for x in args[0]):
        return None
    others = [x for x in args[0] if not isinstance(x, Batch)]
    beside = len(args) - 1 + len(kwargs) + (target is not None)
    if others or beside:
        raise BadOption(
            "a list of microbatches is the only argument, and holds nothing else",
            numbers=f"{len(others)} other items in it, {beside} arguments beside it",
            next_step="engine.step([outsize.microbatch(x, target=y), ...])",
        )
    return list(args[0])


def as_target(target: Any) -> tuple[Any, ...]:
    """`target=` of `step`: nothing, one value, or a tuple of values for the loss function."""
    if target is None:
        return ()
    return target if isinstance(target, tuple) else (target,)


def evaluating_loss(loss_fn: LossFn | None, part: Batch) -> LossFn | None:
    """The loss function, or None for an evaluation without the target that it wants."""
    if loss_fn is None or part.target:
        return loss_fn
    try:
        inspect.signature(loss_fn).bind(None)
    except TypeError:
        return None
    except ValueError:  # a builtin, which tells nothing
        return loss_fn
    return loss_fn
