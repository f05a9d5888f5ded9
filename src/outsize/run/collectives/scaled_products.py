"""Computes torchao's float8 linear layers where ranks have parts of their operands, with the numbers of one
device.

    parts of x, weight, gradient -> largest elements of all parts (all-reduce, MAX) -> scales, casts, products

An operand has one scale, from the largest element of all of it. A rank that has a part asks the others; what
it casts then is bit by bit its part of what one device casts. Input and weight ask in one message. The casts
and the products are torchao's own, with the settings of the layer. Like the layer itself this saves what it
is given and casts again in its backward, so that memory is that of a plan.

    tp, by columns   parts of the weight, and of the gradient of the result
    tp, by rows      parts of the input and the weight
    cp               rows of the input, and of the gradient of the result

Oracle: tests/integrations/test_torchao.py, the plain loop over the same layers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outsize.policies.precisions import Operand

Largest = Callable[[Tensor], Tensor]
"""Returns the elementwise maximum over ranks of a few numbers."""


@final
@dataclass(frozen=True)
class ScaledLayer:
    """Is a layer of torchao with what its ranks ask each other: of each operand that is divided, for each
    group of ranks that have its parts.
    """

    module: Any
    asked: Mapping[Operand, tuple[Largest, ...]]

    def largest(self, **operands: Tensor) -> list[Tensor]:
        """Returns the largest absolute elements of whole operands, given by name; ranks of one group are
        asked once.
        """
        found = {name: _largest_element(operand) for name, operand in operands.items()}
        groups = dict.fromkeys(group for name in operands for group in self.asked.get(_operand(name), ()))
        for group in groups:
            names = [name for name in operands if group in self.asked.get(_operand(name), ())]
            answers = group(torch.stack([found[name] for name in names]))
            found.update(zip(names, answers, strict=True))
        return [found[name] for name in operands]

    def cast(self, operand: Operand, values: Tensor, largest: Tensor) -> Any:
        """Returns an operand as torchao casts it, by the largest element of all of it."""
        tensors = importlib.import_module("torchao.float8.float8_training_tensor")
        utilities = importlib.import_module("torchao.float8.float8_utils")
        config = self.module.config
        kinds: dict[Operand, tuple[Any, Any]] = {
            "input": (config.cast_config_input, tensors.GemmInputRole.INPUT),
            "weight": (config.cast_config_weight, tensors.GemmInputRole.WEIGHT),
            "gradient": (config.cast_config_grad_output, tensors.GemmInputRole.GRAD_OUTPUT),
        }
        how, role = kinds[operand]
        rounds = config.round_scales_to_power_of_2
        scale = utilities.amax_to_scale(largest, how.target_dtype, round_scales_to_power_of_2=rounds)
        return tensors.hp_tensor_and_scale_to_float8(
            values, scale, how.target_dtype, self.module.linear_mm_config, role
        )


def scaled_product(layer: ScaledLayer, x: Tensor, weight: Tensor) -> Tensor:
    """Returns `x @ weight.T` of this rank's parts, without a bias."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))  # As the layer itself does.
    return _ScaledProduct.apply(x, weight, layer)


@final
class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: ScaledLayer) -> Tensor:
        largest = layer.largest(input=x, weight=weight)
        ctx.save_for_backward(x, weight, *largest)
        ctx.layer = layer
        rows = layer.cast("input", _rows(x), largest[0])
        out = torch.mm(rows, layer.cast("weight", weight.t(), largest[1]))
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, largest_x, largest_weight = ctx.saved_tensors
        layer, (of_x, of_weight, _) = ctx.layer, ctx.needs_input_grad
        (largest,) = layer.largest(gradient=grads[0])
        grad = layer.cast("gradient", _rows(grads[0]), largest)
        made: list[Tensor | None] = [None, None]
        if of_x:
            turned = layer.cast("weight", weight.t(), largest_weight).t()
            made[0] = torch.mm(grad, turned).view(x.shape)
        if of_weight:
            made[1] = torch.mm(grad.t(), layer.cast("input", _rows(x), largest_x))
        return *made, None


def _largest_element(operand: Tensor) -> Tensor:
    """Returns the largest absolute element in float32, which holds every value of shorter types."""
    return (
        operand.detach().abs().max().float()
        if operand.numel()
        else operand.new_zeros((), dtype=torch.float32)
    )


def _operand(name: str) -> Operand:
    return "input" if name == "input" else "weight" if name == "weight" else "gradient"


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
