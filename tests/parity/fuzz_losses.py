"""The losses of fuzzed models, each with what the loss of a microbatch is divided by.

A microbatch whose divisor is d of the batch's D weighs d / D, which is what makes the microbatches' losses
the loss of the whole batch; one without anything to count is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from fuzz_pieces import READS
from guard_models import WIDTH, Switch
from torch import Tensor, nn

CLASS_WEIGHTS = torch.tensor([1.0, 0.25, 2.0, 0.5])  # Their sums are exact.
Target = tuple[Tensor, ...]


@final
@dataclass(frozen=True)
class Loss:
    """`make` builds the loss function anew; `target` draws what it compares with; `count` is the divisor."""

    make: Callable[[], Any]
    target: Callable[[int, torch.Generator], Target]
    count: Callable[[Target], float]
    limit: float = 0.0  # the divisor is at least this


def numbers(samples: int, draw: torch.Generator) -> Target:
    return (torch.randn(samples, WIDTH, generator=draw),)


def labels(samples: int, draw: torch.Generator) -> Target:
    return (torch.randint(0, WIDTH, (samples,), generator=draw),)


def padded(samples: int, draw: torch.Generator) -> Target:
    """Some labels are ignored, never all of them."""
    (found,) = labels(samples, draw)
    found[torch.rand(samples, generator=draw) < 0.4] = -100
    found[-1] = 1
    return (found,)


def masked(samples: int, draw: torch.Generator) -> Target:
    mask = (torch.rand(samples, WIDTH, generator=draw) < 0.6).float()
    mask[-1] = 1
    return (torch.randn(samples, WIDTH, generator=draw), mask)


def samples_of(target: Target) -> float:
    return len(target[0])


def targets_of(target: Target) -> float:
    return int((target[0] != -100).sum())


def weights_of(target: Target) -> float:
    chosen = target[0][target[0] != -100]
    return float(CLASS_WEIGHTS[chosen].double().sum())


def mask_of(target: Target) -> float:
    return float(target[1].sum())


# -- the functions -----------------------------------------------------------------------------------------


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def summed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def masked_mean(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return ((output - target).abs() * mask).sum() / mask.sum()


def masked_least(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return ((output - target).square() * mask).sum() / mask.sum().clamp(min=1)


def counted(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum") / (target != -100).sum()


def two_heads(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + 0.3 * F.cross_entropy(2 * output, target)


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, weight=CLASS_WEIGHTS)


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


class ReadingLoss:
    """Reads a Python value, which the loop may change."""

    def __init__(self, kind: str) -> None:
        self.switch, self.use = Switch(), READS[kind][0]

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return squared(self.use(self.switch, output), target)


class Annealed(nn.Module):
    """A loss module with a weight that the loop changes at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.inner = 0.0, nn.MSELoss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.inner(output, target) + self.beta * output.square().mean()


class WarmingUp:
    """Weighs by how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return squared(output, target) * min(1.0, self.calls / 5)


LOSSES: dict[str, Loss] = {
    "squared": Loss(lambda: squared, numbers, samples_of),
    "summed": Loss(lambda: summed, numbers, lambda target: 1.0),
    "huber": Loss(nn.HuberLoss, numbers, samples_of),
    "masked mean": Loss(lambda: masked_mean, masked, mask_of),
    "masked, at least one": Loss(lambda: masked_least, masked, mask_of, limit=1.0),
    "classes": Loss(lambda: F.cross_entropy, labels, samples_of),
    "classes by a module": Loss(nn.CrossEntropyLoss, padded, targets_of),
    "counted": Loss(lambda: counted, padded, targets_of),
    "two heads": Loss(lambda: two_heads, padded, targets_of),
    "weighted": Loss(lambda: weighted, padded, weights_of),
    "weighted by a module": Loss(lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS), padded, weights_of),
    "smoothed": Loss(lambda: smoothed, padded, targets_of),
    "annealed": Loss(Annealed, numbers, samples_of),
    "warming up": Loss(WarmingUp, numbers, samples_of),
}


def loss_named(name: str) -> Loss:
    """A loss of the table, or one that `reads KIND`."""
    if name.startswith("reads "):
        return Loss(lambda: ReadingLoss(name.removeprefix("reads ")), numbers, samples_of)
    return LOSSES[name]


def some_loss(draw: random.Random) -> str:
    """The name of a loss; one in four reads a Python value."""
    return f"reads {draw.choice(list(READS))}" if draw.random() < 0.25 else draw.choice(list(LOSSES))


def shares(loss: Loss, targets: list[Target]) -> list[float]:
    """What each microbatch weighs."""
    if loss.make() is summed:
        return [1.0] * len(targets)
    counts = [loss.count(target) for target in targets]
    whole = max(sum(counts), loss.limit)
    return [max(count, loss.limit) / whole if count else 0.0 for count in counts]
