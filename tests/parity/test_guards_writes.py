"""What a loss writes is written as often as in the plain loop, and what it draws is drawn at each call."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guard_models import Reading, squared
from guard_runs import MICROBATCHES, STEPS, engine_of, insist_on_equal, plain, split
from torch import Tensor, nn

CALLS = 0


class Counting:
    """Warms up: the weight depends on how often it was called."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(calls=0, history=[])

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.state.calls += 1
        self.state.history.append(self.state.calls)
        return squared(output, target) * min(1.0, self.state.calls / 5)


class Averaging(nn.Module):
    """Divides by a running mean of its own values, which it binds again at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.mean: Tensor

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = squared(output, target)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


class Global:
    """Counts in a global."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return squared(output, target) * CALLS


def nothing(_: int) -> None:
    """Nobody changes anything between the steps."""


@pytest.mark.parametrize("make", [Counting, Averaging, Global])
def test_what_a_loss_writes_is_written_at_each_call(make: Any) -> None:
    global CALLS
    CALLS = 0
    loss, other = make(), make()
    expected = plain(Reading(), loss, nothing)
    CALLS = 0
    insist_on_equal(expected, split(engine_of(Reading(), other), nothing))
    if isinstance(other, Counting):
        assert other.state.calls == STEPS * MICROBATCHES
        assert other.state == loss.state


class OwnGenerator:
    """Mixes with noise of a generator of its own."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(3)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return squared(output, target + torch.rand(target.shape, generator=self.draw))


def test_a_loss_with_a_generator_of_its_own_draws_as_in_the_plain_loop() -> None:
    expected = plain(Reading(), OwnGenerator(), nothing)
    insist_on_equal(expected, split(engine_of(Reading(), OwnGenerator()), nothing))


def test_a_loss_that_draws_from_python_draws_at_each_call() -> None:
    drawn: list[float] = []

    def mixed(output: Tensor, target: Tensor) -> Tensor:
        drawn.append(random.random())
        return squared(output, target) * drawn[-1]

    engine = engine_of(Reading(), mixed)
    drawn.clear()
    split(engine, nothing)
    assert len(drawn) == STEPS * MICROBATCHES == len(set(drawn))
