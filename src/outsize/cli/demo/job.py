"""A training run of the demo as a user would write it: a model, its batches, a loss, an optimizer."""

from __future__ import annotations

import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.capture.models.imports import TorchvisionNote

LossFn = Callable[..., Tensor]


@final
@dataclass(frozen=True)
class TrainingRecipe:
    """Batch size, steps, and the learning rate, which rises for `warmup` steps and then falls to a tenth."""

    batch_size: int
    steps: int
    learning_rate: float
    warmup: int

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Returns AdamW over the parameters of one rank."""
        return torch.optim.AdamW(parameters, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)

    def factor(self, step: int) -> float:
        """Returns the learning rate of a step (the first is 0) as a share of the largest one."""
        rising = min(1.0, (step + 1) / self.warmup)
        falling = max(0.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return rising * (0.55 + 0.45 * math.cos(math.pi * falling))


@final
@dataclass(frozen=True)
class DemoBatch:
    """The arguments of the model, and the target of the loss function."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    target: Any = None


class DemoJob(ABC):
    """A model with its data. Everything is seeded, so each process builds the same model and batches."""

    name: str
    title: str
    data: str
    about: str
    recipe: TrainingRecipe
    microbatches: int | None = None
    """The planner chooses where this is None."""
    loss_fn: LossFn | None = None
    goal: float | None = None
    """The last losses must be below it; where it is None, below the first loss."""
    checked_over_processes: bool = False

    @abstractmethod
    def model(self) -> nn.Module:
        """Returns the unmodified model in train mode."""

    @abstractmethod
    def batch(self, step: int) -> DemoBatch:
        """Returns the global batch of a step."""


def seeded(seed: int) -> torch.Generator:
    """Returns a generator of its own, so that data do not depend on other random draws."""
    return torch.Generator().manual_seed(seed)


@contextmanager
def library_messages_off() -> Iterator[None]:
    """Hides transformers' hints, and the note about torchvision's operators, which nothing here uses."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TorchvisionNote)
            yield
    finally:
        logger.setLevel(level)
