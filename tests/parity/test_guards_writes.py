"""What forward or a loss writes and draws is written and drawn as often as in the plain loop, or refused."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guard_models import (
    WRITES,
    Reading,
    ReadingInside,
    ReadingLoss,
    reset,
    squared,
    written,
)
from guard_runs import MICROBATCHES, STEPS, engine_of, insist_on_equal, plain, split
from torch import Tensor, nn

from outsize.errors import NotCapturable

CALLS = 0


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    reset()
    yield
    reset()


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


@pytest.mark.parametrize("kind", WRITES)
def test_what_a_submodule_writes_and_draws_is_what_the_plain_loop_does(kind: str) -> None:
    model = ReadingInside(WRITES[kind])
    expected = plain(model, squared, nothing)
    values = written(model.switch)
    reset()
    other = ReadingInside(WRITES[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        insist_on_equal(expected, split(engine_of(other, squared), nothing))
    assert written(other.switch) == values


@pytest.mark.parametrize("kind", WRITES)
def test_what_a_loss_writes_and_draws_is_what_the_plain_loop_does(kind: str) -> None:
    loss = ReadingLoss(WRITES[kind])
    expected = plain(Reading(), loss, nothing)
    values = written(loss.switch)
    reset()
    other = ReadingLoss(WRITES[kind])
    insist_on_equal(expected, split(engine_of(Reading(), other), nothing))
    assert written(other.switch) == values


@pytest.mark.parametrize("kind", WRITES)
def test_what_the_models_own_forward_writes_and_uses_is_refused(kind: str) -> None:
    model = Reading(WRITES[kind])
    before = written(model.switch)
    with pytest.raises(NotCapturable, match=r"uses what it writes|unknown origin|of its own"):
        engine_of(model, squared)
    assert written(model.switch) == before


class Counter(nn.Module):
    """Counts its calls in its own forward; `late` uses the count from the sixth call on."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.calls, self.late, self.seen = 0, late, SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.calls += 1
        x = self.layers(x)
        return x * 2 if self.late and self.calls > 5 else x


def test_a_count_that_matters_from_a_later_call_on_is_refused() -> None:
    with pytest.raises(NotCapturable, match=r"self.calls: a later call may compute something else"):
        engine_of(Counter(late=True), squared)


def test_a_count_of_the_models_own_forward_that_nothing_uses_is_said() -> None:
    expected = plain(Counter(late=False), squared, nothing)
    engine = engine_of(Counter(late=False), squared)
    with pytest.warns(UserWarning, match=r"self.seen.calls: written by the forward at .*not by a split run"):
        insist_on_equal(expected, split(engine, nothing))


class InPlace:
    """Averages in place into a tensor that it holds."""

    def __init__(self) -> None:
        self.mean = torch.ones(())

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * output.detach().mean())
        return squared(output, target) / self.mean


def test_what_a_recording_or_a_trial_writes_in_place_is_taken_back() -> None:
    expected = plain(Reading(), InPlace(), nothing)
    insist_on_equal(expected, split(engine_of(Reading(), InPlace()), nothing))


def test_the_environment_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(_: Any, x: Tensor) -> Tensor:
        return x * float(os.environ.get("GUARDED_SCALE", "1"))

    def between(number: int) -> None:
        if number == 2:
            monkeypatch.setenv("GUARDED_SCALE", "0.5")

    for make in (Reading, ReadingInside):
        monkeypatch.delenv("GUARDED_SCALE", raising=False)
        expected = plain(make(scaled), squared, between)
        monkeypatch.delenv("GUARDED_SCALE")
        insist_on_equal(expected, split(engine_of(make(scaled), squared), between))
