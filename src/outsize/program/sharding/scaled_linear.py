"""Recognises linear layers that cast their operands to few bits with scales, and stands in for them in plans.

    torchao's Float8Linear     a scale for each tensor, from its largest element in this call
    ScaledLinear               nothing is cast: it says of which precision it is, and is counted as such
    stacks of weights          of experts, each of which multiplies the rows of its tokens: their module says
                               of which precision its products are

A plan is made before anybody has swapped a layer, and needs no package that does. So a layer that would be
swapped becomes a `ScaledLinear` on meta, whose costs are those that its record names
(capture/costs/scaled_products.py); it never trains. What divides layers treats both alike.
"""

from __future__ import annotations

import math
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from outsize.errors import BadOption
from outsize.policies.precisions import ScaledProducts, precision_policy

SCALED: Final = "scaled_rows_of_input"
"""Names the collective of a layer of which ranks have rows of the input, and all of the weight."""
_STACKED: Final = 3
_STACKS: Final = "_precision_of_stacks"
"""Names the attribute of a module whose stacks of weights are multiplied in a precision with scales."""
_TORCHAO: Final = ("torchao.float8.float8_linear", "Float8Linear")
_TENSORS_OF_TORCHAO: Final = "torchao.prototype.moe_training"


@final
class ScaledLinear(nn.Linear):
    """Stands in a plan for a linear layer of a precision whose products have scales."""

    def __init__(self, whole: nn.Linear, precision: str, products: ScaledProducts) -> None:
        with torch.device("meta"):
            super().__init__(whole.in_features, whole.out_features, bias=False)
        self.weight, self.bias = whole.weight, whole.bias
        self.precision, self.saved_item_bytes = precision, products.saved_bytes
        self.train(whole.training)

    @property
    def products(self) -> ScaledProducts:
        """Returns how it multiplies."""
        products = precision_policy(self.precision).scaled
        assert products is not None, "only layers of such a precision are swapped"
        return products

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies as any linear layer; what it saves has the size of what a swapped layer saves."""
        if self.saved_item_bytes is None:
            return functional.linear(input, self.weight, self.bias)
        return _SavesCodes.apply(input, self.weight, self.bias, self.saved_item_bytes)


@final
class _SavesCodes(torch.autograd.Function):
    """Is a product that saves codes in place of its input; only sizes of its gradients are right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, item_bytes: float) -> Tensor:
        codes = x.new_empty(math.ceil(x.numel() * item_bytes), dtype=torch.uint8)
        ctx.save_for_backward(codes, weight)
        ctx.has_bias = bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        of_weight = rows.t() @ rows.new_empty(rows.shape[0], weight.shape[1])
        return grads[0] @ weight, of_weight, rows.sum(0) if ctx.has_bias else None, None


def weight_stacks(module: nn.Module, products: ScaledProducts) -> list[nn.Parameter]:
    """Returns the weights of a module that are a stack of matrices whose products can have scales."""
    own = (weight for weight in module._parameters.values() if weight is not None)
    return [weight for weight in own if weight.ndim == _STACKED and products.fits(tuple(weight.shape[1:]))]


def mark_stacks(module: nn.Module, precision: str) -> None:
    """Notes that stacks of weights of a module, which is a copy for plans, are multiplied in a precision."""
    setattr(module, _STACKS, precision)


def products_of_stacks(module: nn.Module) -> ScaledProducts | None:
    """Returns how a module multiplies its stacks of weights; None where it does in their own type."""
    precision = vars(module).get(_STACKS)
    return None if precision is None else precision_policy(precision).stacks


def is_cast_by_torchao(weight: Tensor) -> bool:
    """Tells whether torchao has made of a weight a tensor that casts the operands of its products."""
    return type(weight).__module__.startswith(_TENSORS_OF_TORCHAO)


def is_scaled_linear(module: nn.Module) -> bool:
    """Tells whether a module is a linear layer whose operands have scales."""
    return isinstance(module, ScaledLinear) or is_of_torchao(module)


def is_of_torchao(module: nn.Module) -> bool:
    """Tells whether torchao has swapped a layer for one in float8."""
    return (type(module).__module__, type(module).__name__) == _TORCHAO


def has_scales_of_tensors(module: nn.Module) -> bool:
    """Tells whether an operand has one scale, for its largest element."""
    if isinstance(module, ScaledLinear):
        return module.products.over_ranks
    return is_of_torchao(module)


def can_be_divided(module: nn.Module) -> bool:
    """Tells whether ranks can compute parts of a scaled layer with the numbers of one device.

    Of torchao's those with scales of tensors: ranks need the largest element of all parts, and no more.
    """
    return isinstance(module, ScaledLinear) or (is_of_torchao(module) and not odd_scales(module))


def odd_scales(module: Any) -> str:
    """Returns in words which casts of a torchao layer have no scale of the tensor of a call; "" for none."""
    names = ("input", "weight", "grad_output")
    configs = {
        name: getattr(module.config, f"cast_config_{name}{use}")
        for name, uses in zip(names, ("_for_grad_weight", "_for_grad_input", "_for_grad_weight"), strict=True)
        for use in ("", uses)
    }
    odd = (
        f"{name} {config.scaling_type.value} {config.scaling_granularity.value}"
        for name, config in configs.items()
        if (config.scaling_type.value, config.scaling_granularity.value) != ("dynamic", "tensorwise")
    )
    return ", ".join(dict.fromkeys(odd))


def insist_on_scales_of_tensors(model: nn.Module) -> None:
    """Raises BadOption for a model with layers of torchao that ranks cannot divide."""
    for name, module in model.named_modules():
        if is_of_torchao(module) and (odd := odd_scales(module)):
            raise BadOption(
                f"tp divides layers of torchao with one scale for a tensor, and {name} has others",
                numbers=odd,
                next_step="convert_to_float8_training(model), or a plan without tp",
            )
