"""Stands in, in a plan, for linear layers whose frozen weights a library stores in few bits.

A plan is made before anybody has quantized a layer, and needs no package that does. So a layer that would be
swapped becomes a `StoredLinear` on meta: it has a weight of codes with its scales beside it, as many bytes as
the record of its format says, and computes on fakes alone. In the forward and in the backward it makes the
values of the whole weight and frees them again, as libraries do; the seconds of that are counted from the
record (capture/costs/stored_products.py). It never trains, and never has numbers.

A stack of weights of experts is no layer: its library makes all of its values when a module reads it
(`StoredStack`, a parametrization), once in a forward, and autograd keeps them for the backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import prod
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from outsize.policies.storage_formats import StorageFormat

_SCALES: Final = "scales"
"""Names the attribute of a weight of codes that has the bytes of its scales."""


@final
class StoredLinear(nn.Linear):
    """Stands in a plan for a linear layer with a weight of `made` x `taken` in few bits."""

    def __init__(self, whole: nn.Module, made: int, taken: int, stored: StorageFormat) -> None:
        with torch.device("meta"):
            super().__init__(taken, made, bias=False)
        self.weight, self.stored = _codes((made, taken), stored), stored
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


def _codes(sides: tuple[int, ...], stored: StorageFormat) -> nn.Parameter:
    """Returns codes on meta for a weight of these sides, with the bytes that its scales take beside them."""
    elements, taken = prod(sides), sides[-1]
    shape = (stored.code_bytes(elements), 1) if stored.packed else (*sides[:-1], stored.code_bytes(taken))
    with torch.device("meta"):
        dtype: torch.dtype = getattr(torch, stored.codes)
        codes = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        scales = torch.empty(stored.beside_bytes(elements, elements // taken), dtype=torch.uint8)
    setattr(codes, _SCALES, scales)
    return codes


@final
class StoredStack(nn.Module):
    """Stands in a plan for the parametrization that makes the values of a stack of frozen weights."""

    like: Tensor

    def __init__(self, whole: Tensor, stored: StorageFormat) -> None:
        super().__init__()
        self.shape, self.stored = torch.Size(whole.shape), stored
        # Of the type of the values, which a plan's precision changes as it does that of other tensors.
        self.register_buffer("like", torch.empty(0, dtype=whole.dtype, device="meta"), persistent=False)

    @torch.no_grad()
    def forward(self, codes: Tensor) -> Tensor:
        """Returns the values of the whole stack."""
        return codes.new_empty(self.shape, dtype=self.like.dtype)


def store_stack(module: nn.Module, key: str, stored: StorageFormat) -> None:
    """Puts codes in the place of a module's stack of weights, whose values a forward of it makes once."""
    whole = module.get_parameter(key)
    module.register_parameter(key, _codes(tuple(whole.shape), stored))
    parametrize.register_parametrization(module, key, StoredStack(whole, stored), unsafe=True)
    module.register_forward_pre_hook(_begin_cache)
    module.register_forward_hook(_end_cache, always_call=True)


def stored_stacks(module: nn.Module) -> list[StoredStack]:
    """Returns the stacks in few bits of a module and of those in it."""
    return [each for each in module.modules() if isinstance(each, StoredStack)]


_CACHES: Final[list[AbstractContextManager[None]]] = []
"""Holds what keeps the values of the forwards that run now."""


def _begin_cache(module: nn.Module, inputs: Any) -> None:
    _CACHES.append(parametrize.cached())
    _CACHES[-1].__enter__()


def _end_cache(module: nn.Module, inputs: Any, output: Any) -> None:
    _CACHES.pop().__exit__(None, None, None)
