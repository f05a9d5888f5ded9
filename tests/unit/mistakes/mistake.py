"""A mistake that people make: what they write, what is answered, and the next step that the answer names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn

import outsize
from outsize.train.engine.engine import Engine

_DRAWS = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 8, generator=_DRAWS), torch.randint(0, 4, (8,), generator=_DRAWS)


@final
@dataclass(frozen=True)
class Mistake:
    """`make` ends in an error or a warning of outsize, or returns a text that a command line has said; parts
    of its text are `answer` and, behind "Next: ", `next_step`.
    """

    make: Callable[[], Any]
    answer: str
    next_step: str


def mlp(layers: int = 3) -> nn.Sequential:
    """Returns a small model of `layers` linear layers."""
    torch.manual_seed(0)
    sizes = [8, *[16] * (layers - 1), 4]
    parts = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of these examples."""
    return torch.optim.SGD(parameters, lr=0.1)


def engine(model: Any = None, **options: Any) -> Engine:
    """Returns an engine of two stages in this process."""
    wanted: dict[str, Any] = {
        "loss_fn": F.cross_entropy,
        "target": Y,
        "cluster": "2xcpu",
        "stages": 2,
        "microbatches": 4,
        "optimizer": sgd,
    }
    given = {name: value for name, value in (wanted | options).items() if value is not ...}
    return outsize.parallelize(mlp() if model is None else model, (X,), **given)
