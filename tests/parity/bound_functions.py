"""Autograd functions whose `apply` was bound before; no composition of ops has their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, final

import torch
from guard_models import WIDTH
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointFunction, checkpoint

# torch declares `forward` and `backward` with other arguments than the ones that any function has.
Function: Any = torch.autograd.Function


@final
class Odd(Function):
    """A square with the gradient of a cube."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] * grad


@final
class Once(Function):
    """The same, whose backward runs without a graph."""

    forward = Odd.forward

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 5 * ctx.saved_tensors[0] * grad


@final
class Several(Function):
    """Three outputs, one of which has no gradient, and an input that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        sign = torch.sign(x)
        ctx.mark_non_differentiable(sign)
        return x * factor, sign, x + 1

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, _: Tensor | None, third: Tensor | None) -> Any:
        assert third is None
        return None if first is None else 7 * first, None


@final
class Apart(Function):
    """Forward and context apart, with a default value; rules for vmap are made by torch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float = 0.5) -> Tensor:
        return x * x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * ctx.saved_tensors[0] * grad, None


@final
class OwnRule(Function):
    """The same with a rule for vmap that is written out."""

    forward, setup_context, backward = Apart.forward, Apart.setup_context, Apart.backward

    @staticmethod
    def vmap(_: Any, in_dims: Any, x: Tensor, scale: float) -> tuple[Tensor, int]:
        return own_rule(x, scale), in_dims[0]


@final
class OwnApply(Function):
    """A class with an `apply` of its own."""

    forward, backward = Odd.forward, Odd.backward

    @classmethod
    def apply(cls, x: Tensor) -> Tensor:
        return super().apply(x + 1)


@final
class Around(Function):
    """A function that calls another one in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return odd(x) + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return odd(ctx.saved_tensors[0]) * grad


@final
class OddLoss(Function):
    """Squares with the gradient of cubes."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(output, target)
        return (output - target).square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        output, target = ctx.saved_tensors
        return grad * (output - target).sign(), None


odd, once, several, around, own_apply = Odd.apply, Once.apply, Several.apply, Around.apply, OwnApply.apply
apart, own_rule, region = Apart.apply, OwnRule.apply, CheckpointFunction.apply
scaled: Final = functools.partial(apart, scale=2.0)


@final
class Holder(nn.Module):
    """A module without weights that holds a bound `apply`."""

    def __init__(self) -> None:
        super().__init__()
        self.function = Odd.apply

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@final
class WeightedHolder(nn.Module):
    """A leaf that holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(WIDTH)), Odd.apply

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def closure() -> Callable[[Any, Tensor], Tensor]:
    function = Odd.apply
    return lambda _, x: function(x)


def default(_: Any, x: Tensor, function: Any = Odd.apply) -> Tensor:
    return function(x)


def of_several(_: Any, x: Tensor) -> Tensor:
    first, sign, _third = several(x, 2.0)
    return first + sign


def square(x: Tensor) -> Tensor:
    return apart(x).sum()


Use = Callable[[Any, Tensor], Tensor]

FORMS: dict[str, Use] = {
    "written out": lambda _, x: Odd.apply(x),
    "alias": lambda _, x: odd(x),
    "attribute": lambda m, x: m.function(x),
    "module": lambda m, x: m.holder(x),
    "leaf": lambda m, x: m.leaf(x),
    "partial": lambda _, x: scaled(x),
    "closure": closure(),
    "default": default,
    "once": lambda _, x: once(x),
    "several outputs": of_several,
    "context apart": lambda _, x: apart(x),
    "own apply": lambda _, x: own_apply(x),
    "around": lambda _, x: around(x),
    "vmap, made rule": lambda _, x: torch.func.vmap(apart)(x),
    "vmap, own rule": lambda _, x: torch.func.vmap(lambda row: own_rule(row, 0.5))(x),
    "vmap, written out": lambda _, x: torch.func.vmap(lambda row: Apart.apply(row))(x),
    "gradient": lambda _, x: torch.func.grad(square)(x),
    "gradients by vmap": lambda _, x: torch.func.vmap(torch.func.grad(square))(x),
    "checkpoint": lambda m, x: checkpoint(lambda t: odd(m.region(t)), x, use_reentrant=False),
    "reentrant": lambda m, x: checkpoint(lambda t: odd(m.region(t)), x, use_reentrant=True),
    "checkpoint of it": lambda _, x: checkpoint(odd, x, use_reentrant=False),
    "reentrant of it": lambda _, x: checkpoint(odd, x, use_reentrant=True),
    "reentrant, bound": lambda m, x: region(lambda t: odd(m.region(t)), True, x),
}


@final
class Using(nn.Module):
    """Layers around one use of a function."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.region = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.holder, self.leaf = Holder(), WeightedHolder()
        self.function, self.use = Odd.apply, use

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self, self.inner(torch.tanh(self.first(x)))))
