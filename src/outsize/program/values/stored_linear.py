"""Stands in, in a plan, for linear layers whose frozen weights a library stores in few bits.

A plan is made before anybody has quantized a layer, and needs no package that does. So a layer that would be
swapped becomes a `StoredLinear` on meta: it has a weight of codes with its scales beside it, as many bytes as
the record of its format says, and computes on fakes alone. In the forward and in the backward it makes the
values of the whole weight and frees them again, as libraries do; the seconds of that are counted from the
record (capture/costs/stored_products.py). It never trains, and never has numbers.
"""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from outsize.policies.storage_formats import StorageFormat

_SCALES: Final = "scales"
"""Names the attribute of a weight of codes that has the bytes of its scales."""


@final
class StoredLinear(nn.Linear):
    """Stands in a plan for a linear layer with a weight of `made` x `taken` in few bits."""

    def __init__(self, whole: nn.Module, made: int, taken: int, stored: StorageFormat) -> None:
        with torch.device("meta"):
            super().__init__(taken, made, bias=False)
            shape = (stored.code_bytes(made * taken), 1) if stored.packed else (made, taken)
            if not stored.packed and stored.code_bytes(taken) != taken:
                shape = (made, stored.code_bytes(taken))
            dtype: torch.dtype = getattr(torch, stored.codes)
            codes = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            scales = torch.empty(stored.beside_bytes(made * taken, made), dtype=torch.uint8)
        setattr(codes, _SCALES, scales)
        self.weight, self.stored = codes, stored
        bias: Any = getattr(whole, "bias", None)
        self.bias = bias
        self.train(whole.training)

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies by values that are there for this call alone."""
        sides = self.out_features, self.in_features
        return _StoredProduct.apply(input, self.weight, self.bias, sides, self.stored)


@final
class _StoredProduct(torch.autograd.Function):
    """Is a product with the values of codes, which its forward and its backward make; on fakes alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, bias: Tensor | None, sides: tuple[int, int], stored: StorageFormat
    ) -> Tensor:
        values = _values(x, sides, stored)
        kept = stored.keeps_values and ctx.needs_input_grad[0]
        ctx.save_for_backward(codes, x if stored.keeps_input else None, values if kept else None)
        ctx.sides, ctx.stored, ctx.has_bias = sides, stored, bias is not None
        return functional.linear(x, values, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_bias = grads[0].flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        *_, kept = ctx.saved_tensors
        values = _values(grads[0], ctx.sides, ctx.stored) if kept is None else kept
        return grads[0] @ values, None, of_bias, None, None


def _values(like: Tensor, sides: tuple[int, int], stored: StorageFormat) -> Tensor:
    """Returns a weight's values, in the memory that their kernels need besides."""
    more = like.new_empty(round(sides[0] * sides[1] * (stored.held - 1)))
    values = like.new_empty(sides)
    del more
    return values
