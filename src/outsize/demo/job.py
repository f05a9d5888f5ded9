"""Job: one training run of the demo, written as a user would: a model, its batches, a loss, an optimizer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LossFn = Callable[..., Tensor]


@final
@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train. `warmup` steps up to `learning_rate`, then a cosine down to a tenth."""

    batch_size: int
    steps: int
    learning_rate: float
    warmup: int

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW over the parameters of one rank."""
        return torch.optim.AdamW(parameters, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)

    def factor(self, step: int) -> float:
        """The learning rate of a step (from 0), as a share of the largest."""
        rising = min(1.0, (step + 1) / self.warmup)
        done = max(0.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return rising * (0.55 + 0.45 * math.cos(math.pi * done))


@final
@dataclass(frozen=True)
class Batch:
    """What the model is called with, and what the loss function gets besides the output."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    target: Any = None


class Job(ABC):
    """A model with its data. Everything is seeded, so each process builds the same."""

    name: str
    title: str
    source: str  # of the data
    about: str  # one line
    recipe: Recipe
    microbatches: int | None = None  # None: the planner chooses
    loss_fn: LossFn | None = None
    goal: float | None = None  # the loss must end below it; None: below the first one
    checked_over_processes: bool = False

    @abstractmethod
    def model(self) -> nn.Module:
        """The unmodified model, in train mode."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """The global batch of a step."""


def seeded(seed: int) -> torch.Generator:
    """A generator of its own, so that data do not depend on what else draws numbers."""
    return torch.Generator().manual_seed(seed)
