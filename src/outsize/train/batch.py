"""Split a batch into microbatches: tensors along dim 0, everything else goes to each as it is.

The batch size is dim 0 of the first tensor; a tensor whose dim 0 is another number is broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from outsize.errors import BadOption, BatchNotDivisible
from outsize.program.tree import leaves, map_leaves


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """What `model(*args, **kwargs)` and `loss_fn(output, *target)` are called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...] = ()

    def tree(self) -> tuple[Any, ...]:
        """All of it in the order in which the tape counts inputs."""
        return (self.args, self.kwargs, self.target)

    def tensors(self) -> list[Tensor]:
        """The tape's inputs."""
        return [leaf for leaf in leaves(self.tree()) if isinstance(leaf, Tensor)]

    @property
    def size(self) -> int:
        """Dim 0 of the first tensor. Raises BadOption when there is none, or what cannot be split."""
        for leaf in leaves(self.tree()):
            _insist_on_splittable(leaf)
        sizes = [t.shape[0] for t in self.tensors() if t.ndim]
        if not sizes or not sizes[0]:
            what = "no sample" if sizes else "no tensor"
            raise BadOption(f"the batch holds {what}", next_step="pass the example batch as tensors")
        return sizes[0]

    def divisor(self, at_most: int) -> int:
        """The largest number of equal parts up to `at_most`."""
        return max(d for d in range(1, at_most + 1) if self.size % d == 0)

    def split(self, microbatches: int) -> list[Batch]:
        """Equal parts in order; raises BatchNotDivisible."""
        size = self.size
        if microbatches < 1 or size % microbatches:
            raise BatchNotDivisible(
                f"a batch of {size} does not divide into {microbatches} microbatches",
                numbers=f"rest {size % microbatches}" if microbatches > 0 else "",
                next_step=f"--microbatches {_nearest(size, microbatches)}, or another batch size",
            )
        step = size // microbatches
        return [self._part(size, slice(m * step, (m + 1) * step)) for m in range(microbatches)]

    def _part(self, size: int, rows: slice) -> Batch:
        def take(leaf: Any) -> Any:
            return leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size else leaf

        return Batch(*(map_leaves(take, part) for part in self.tree()))

    def signature(self) -> str:
        """Same text -> same tape, but for guards: shapes, dtypes and the plain Python values."""

        def text(leaf: Any) -> str:
            if isinstance(leaf, Tensor):
                return f"{tuple(leaf.shape)}{leaf.stride()}{leaf.dtype}{leaf.device}{leaf.requires_grad}"
            return repr(leaf)

        return repr(map_leaves(text, self.tree()))


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


def _nearest(size: int, microbatches: int) -> int:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return min(divisors, key=lambda d: abs(d - microbatches))


def as_target(target: Any) -> tuple[Any, ...]:
    """`target=` of `step`: nothing, one value, or a tuple of values for the loss function."""
    if target is None:
        return ()
    return target if isinstance(target, tuple) else (target,)
