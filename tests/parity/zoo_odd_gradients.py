"""Odd models that differentiate by hand: solvers, functional calls, vmap, inner gradients, own Functions.

Features are [n, 12] unless said otherwise; nothing in here knows outsize.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

CLASSES, FEATURES, WIDTH = 5, 12, 16


def dense(inside: int = FEATURES, outside: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, WIDTH), nn.GELU(), nn.Linear(WIDTH, outside))


@final
class ODEBlock(nn.Module):
    """A neural ODE's right-hand side, one module called at each of the Runge-Kutta evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(FEATURES + 1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, FEATURES))
        self.last = nn.Linear(FEATURES, CLASSES)

    def rate(self, time: float, x: Tensor) -> Tensor:
        return self.field(torch.cat([x, torch.full_like(x[:, :1], time)], -1))

    def forward(self, x: Tensor, steps: int = 3) -> Tensor:
        h = 1 / steps
        for i in range(steps):
            t = i * h
            k1 = self.rate(t, x)
            k2 = self.rate(t + h / 2, x + h / 2 * k1)
            k3 = self.rate(t + h / 2, x + h / 2 * k2)
            k4 = self.rate(t + h, x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.last(x)


@final
class Equilibrium(nn.Module):
    """A fixed point found without gradients, then one differentiable step (arXiv:1909.01377)."""

    def __init__(self) -> None:
        super().__init__()
        self.inject, self.cell = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.cell(z) + x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inject(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = self.step(z, x)
        return self.last(self.step(z, x))


@final
class Hypernetwork(nn.Module):
    """One network computes the weights of another, which functional_call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(FEATURES, CLASSES)
        self.context = nn.Parameter(torch.randn(4))
        self.maker = nn.Linear(4, FEATURES * CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(self.context).view(CLASSES, FEATURES)
        return functional_call(self.main, {"weight": self.main.weight + 0.1 * weight}, (x,))


@final
class VmapEnsemble(nn.Module):
    """Members with stacked weights, run by vmap; their spread is the second output."""

    def __init__(self) -> None:
        super().__init__()
        members = [dense() for _ in range(3)]
        stacked, _ = stack_module_state(members)
        self.names = list(stacked)
        self.stacked = nn.ParameterList(stacked.values())
        self.scale = nn.Linear(FEATURES, FEATURES)
        self.__dict__["base"] = dense()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def member(weights: Any, x: Tensor) -> Tensor:
            return functional_call(self.__dict__["base"], weights, (x,))

        votes = vmap(member, (0, None))(dict(zip(self.names, self.stacked, strict=True)), self.scale(x))
        return votes.mean(0), votes.var(0).mean()


@final
class InnerGradient(nn.Module):
    """One gradient step on each sample's reconstruction, by torch.func.grad and vmap; then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.fast, self.last = (
            nn.Linear(FEATURES, WIDTH),
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 4),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)

        def loss(weight: Tensor, sample: Tensor) -> Tensor:
            return (sample @ weight - sample).square().mean()

        step = vmap(grad(loss), (None, 0))(self.fast, h)
        return self.last(torch.einsum("bi,bij->bj", h, self.fast - 0.1 * step))


@final
class EnergyModel(nn.Module):
    """Forces are the gradient of a learned energy, taken inside forward and trained through."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_(True)
        energy = self.energy(positions).sum((1, 2))
        (forces,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -forces


class _RoundThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int) -> Tensor:
        ctx.save_for_backward(x)
        return (x.clamp(-1, 1) * levels).round() / levels

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() <= 1), None


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.strength * grads[0], None


@final
class DomainAdversary(nn.Module):
    """Two heads, one behind a gradient reversal (Ganin and Lempitsky 2014, arXiv:1409.7495)."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = dense(FEATURES, WIDTH), dense(WIDTH), dense(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.features(x)
        return self.label(x), self.domain(_Reverse.apply(x, 0.3))


class QuantLinear(nn.Linear):
    """Weights and activations rounded in forward; the gradient passes."""

    def forward(self, input: Tensor) -> Tensor:
        scale = self.weight.detach().abs().amax()
        weight = _RoundThrough.apply(self.weight / scale, 7) * scale
        return F.linear(_RoundThrough.apply(input, 15), weight, self.bias)


@final
class QuantizedNet(nn.Module):
    """Quantisation-aware training three ways: a Function, detach, and torch's fake quantisation."""

    lowest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([QuantLinear(FEATURES, WIDTH), QuantLinear(WIDTH, WIDTH)])
        self.last = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("lowest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.lowest.copy_(torch.minimum(self.lowest, x.detach().min()))
        x = x + ((x * 8).round() / 8 - x).detach()
        return self.last(torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127))


@final
class Checkpointed(nn.Module):
    """Blocks with dropout under torch.utils.checkpoint, in both of its ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(nn.Sequential(dense(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=i == 3)
        return self.last(x)
