"""Split a batch into microbatches: tensors along their batch dims, everything else goes to each as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    without it they lie along dim 0 of every tensor that has as many there as the first one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...] = ()
    dims: Dims | None = None

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

        return self.mapped(part)

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
        return replace(self, args=args, kwargs=kwargs, target=target, dims=self.batch_dims())


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
