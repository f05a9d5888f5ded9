"""A check compares more steps where later calls may compute something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.api import running
from outsize.train.check.check import STATEFUL_STEPS, Question, verify

X = torch.ones(4, 3)


class Counting(nn.Module):
    """A submodule whose calls count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


class CountingLoss:
    """A loss whose calls count."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor) -> Tensor:
        self.calls += 1
        return output.square().mean() * self.calls


TALLY = {"calls": 0}


def counted_elsewhere(output: Tensor) -> Tensor:
    TALLY["calls"] += 1
    return output.square().mean() * TALLY["calls"]


class Sharing(nn.Module):
    """Counts in an object that copies of it share, and drops at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        TALLY["calls"] += 1
        return self.drop(self.layer(x)) * TALLY["calls"]


class Deciding(nn.Module):
    """Runs by modules, since it decides on activations."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.other(x) if x.sum() > 0 else self.other(-x)


def plain(output: Tensor) -> Tensor:
    return output.square().mean()


CASES = {
    "nothing kept": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), plain, 1),
    "a counting submodule": (lambda: nn.Sequential(Counting(), nn.Linear(3, 3)), plain, STATEFUL_STEPS),
    "a counting loss": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
        CountingLoss(),
        STATEFUL_STEPS,
    ),
    "a counter in a global, and dropout": (
        lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 3), nn.Linear(3, 3)),
        counted_elsewhere,
        STATEFUL_STEPS,
    ),
    "a counter that copies share": (
        lambda: nn.Sequential(Sharing(), nn.Linear(3, 3)),
        plain,
        STATEFUL_STEPS,
    ),
    "by modules": (Deciding, plain, STATEFUL_STEPS),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_of_a_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, loss_fn, steps = CASES[name]
    asked = list[int]()

    def watched(question: Question, **how: Any) -> Any:
        asked.append(question.steps)
        return verify(question, **how)

    monkeypatch.setattr(running, "verify", watched)
    torch.manual_seed(0)
    assert outsize.check(make(), (X,), loss_fn=loss_fn, microbatches=2).bit_equal
    outsize.check(make(), (X,), loss_fn=loss_fn, microbatches=2, steps=2)
    assert asked == [steps, 2]
    assert (TALLY["calls"], getattr(loss_fn, "calls", 0)) == (0, 0)
