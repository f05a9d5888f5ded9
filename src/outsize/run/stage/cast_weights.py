"""Problem: autocast casts a stage's weights again for each microbatch, and each one in flight has its copies.

    plain loop     with autocast: F0    B0    with autocast: F1    B1    every region casts, and forgets
    stage          F0 F1 F2 B0 F3 B1 B2 B3                               one copy of each weight for the step

A copy stands for the parameter in the calls that autocast would cast it for (Instruction.casts), so autocast
has nothing to do there. Its values are those of autocast's copy. Its node in the graph, which turns gradients
back into the parameter's dtype, is in the graphs of all microbatches; it saves nothing, and each backward
runs it once, on the sum of that microbatch's gradients. Autograd runs the youngest of the nodes that are
ready, and this one is older than a later microbatch's: it would run last, while the gradients of all weights
wait. So it is declared the youngest of all, and runs as soon as the last of its gradients has come, which is
where autocast's own node runs: gradients are added in the same order, and bits are equal.

A tied parameter of another stage comes as a tensor of the graph, one for each microbatch. Autocast casts such
a tensor at each use; here the uses share the values, and have their own nodes.

A copy is dropped when its weight leaves the device, when the weight has changed, and at the end of the step.
Autocast with its cache disabled casts at every use, and is left alone.

Oracle: tests/parity/test_cast_weights.py.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

# The graph of a parameter's own gradient has the one number above it.
_YOUNGEST: Final = 2**63 - 1


@final
class _Copy(NamedTuple):
    """Holds the copy of a weight; the weight is referenced, so that its id remains its own."""

    weight: Tensor
    version: int
    values: Tensor


@final
class CastWeights:
    """Holds the copies in lower precision of one stage's weights."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype], _Copy] = {}
        self._places: set[int] = set()

    def __call__(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the weight in `dtype`, with its gradient; or the weight, where autocast shall cast it."""
        is_own = weight.is_leaf
        key = id(weight) if is_own else weight.data_ptr(), dtype
        copy = self._copies.get(key)
        if copy is None or copy.version != weight._version:
            if not _is_cached(weight):
                return weight
            copy = self._copies[key] = _copied(weight, dtype)
            self._places.add(copy.values.untyped_storage().data_ptr())
        return copy.values if is_own else _shared(weight, copy)

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether the tensor is in the memory of a copy."""
        return tensor.untyped_storage().data_ptr() in self._places

    def clear(self) -> None:
        """Drops all copies."""
        self._copies.clear()
        self._places.clear()


def _is_cached(weight: Tensor) -> bool:
    is_known = weight.dtype is torch.float32 and weight.numel() > 0 and not weight.is_inference()
    return is_known and torch.is_autocast_cache_enabled()


def _copied(weight: Tensor, dtype: torch.dtype) -> _Copy:
    source = weight if weight.is_leaf else weight.detach()
    # A forward may have switched gradients off for the first use alone.
    with torch.inference_mode(False), torch.enable_grad():
        values = source.to(dtype)
    node: Any = values.grad_fn
    if node is not None:
        node._set_sequence_nr(_YOUNGEST)
    return _Copy(source, weight._version, values)


def _shared(weight: Tensor, copy: _Copy) -> Any:
    return _Shared.apply(weight, copy)


@final
class _Shared(torch.autograd.Function):
    """Returns the values of a copy as if they were cast now."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: _Copy) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.dtype = weight.dtype
        return copy.values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.to(ctx.dtype), None
