"""The judge of the checks: microbatches one after another on one device, as PyTorch's documentation writes
gradient accumulation. It uses nothing of outsize, and nothing that it judges.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer of all checks: one multiply and one add, whose result every layout shares."""
    return torch.optim.SGD(parameters, lr=0.05)


@final
@dataclass(frozen=True, slots=True)
class Training:
    """Says how a step is made: its microbatches, and what a user may add to them."""

    microbatches: int = 4
    steps: int = 2
    clip_norm: float | None = None
    scaler: Callable[[], torch.amp.GradScaler] | None = None
    autocast: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)


@final
@dataclass(frozen=True, slots=True)
class Trained:
    """Holds the loss of each step and the weights after the last, on the CPU, by name."""

    losses: tuple[float, ...]
    weights: dict[str, Tensor]

    def differences(self, other: Trained) -> tuple[str, ...]:
        """Names what is not bit-equal in `other`, which may have a part of the weights (a rank's own)."""
        losses = () if self.losses == other.losses else (f"losses {self.losses} and {other.losses}",)
        return losses + tuple(
            f"{name} by {float((theirs - self.weights[name]).abs().max()):.3g}"
            for name, theirs in other.weights.items()
            if not torch.equal(theirs, self.weights[name])
        )

    def relative_difference(self, other: Trained) -> float:
        """Returns the largest difference, relative to the largest element of its tensor."""
        return max(
            float((theirs - self.weights[name]).abs().max() / (self.weights[name].abs().max() + 1e-12))
            for name, theirs in other.weights.items()
        )


def train(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    training: Training,
) -> Trained:
    """Trains the model where it is, with a batch on the same device."""
    optimizer = sgd(list(model.parameters()))
    scaler = None if training.scaler is None else training.scaler()
    losses = list[float]()
    for _ in range(training.steps):
        optimizer.zero_grad()
        total: Tensor | None = None
        parts = [tensor.chunk(training.microbatches) for tensor in batch]
        for x, y in zip(*parts, strict=True):
            with training.autocast():
                loss = loss_fn(model(x), y) / training.microbatches
            (loss if scaler is None else scaler.scale(loss)).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        losses.append(float(total))
        if scaler is not None:
            scaler.unscale_(optimizer)
        if training.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return Trained(tuple(losses), {n: p.detach().cpu() for n, p in model.named_parameters()})
