"""A value that changes at every step: a module or the loss runs live, after at most three captures."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guard_models import WIDTH, Reading, squared
from guard_runs import engine_of, insist_on_equal, plain, split
from torch import Tensor, nn

from outsize.train.engine.pipelined import Pipelined

STEPS = 8


def captures(engine: Any) -> int:
    executor = engine._executor
    assert isinstance(executor, Pipelined)
    return len(executor.variants)


class Annealed:
    """A loss whose weight the user changes at each step."""

    def __init__(self) -> None:
        self.beta = 0.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() + self.beta * output.square().mean()


class AnnealedModule(nn.Module):
    """The same as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.inner = 0.0, nn.MSELoss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.inner(output, target) + self.beta * output.square().mean()


@pytest.mark.parametrize("make", [Annealed, AnnealedModule])
def test_an_annealed_loss_is_captured_three_times_at_most(make: Any) -> None:
    loss = make()
    expected = plain(Reading(), loss, lambda n: setattr(loss, "beta", n / STEPS), STEPS)
    loss = make()
    engine = engine_of(Reading(), loss)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = split(engine, lambda n: setattr(loss, "beta", n / STEPS), STEPS)
    insist_on_equal(expected, found)
    assert captures(engine) <= 3
    texts = [str(w.message) for w in said if "self.beta" in str(w.message)]
    assert len(texts) == 2
    assert "self.beta 0.0 -> 0.125" in texts[0]
    assert "loss_fn runs as one instruction" in texts[1]


class Block(nn.Module):
    """A submodule that reads a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.schedule = SimpleNamespace(temperature=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh() / self.schedule.temperature)


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


def test_a_submodule_with_a_moving_value_runs_live() -> None:
    model: Any = blocks()
    expected = plain(model, squared, lambda n: setattr(model[0].schedule, "temperature", 1.0 + n), STEPS)
    model = blocks()
    engine = engine_of(model, squared)
    with pytest.warns(UserWarning, match=r"self.schedule.temperature 2.0 -> 3.0.*0 runs as one instruction"):
        found = split(engine, lambda n: setattr(model[0].schedule, "temperature", 1.0 + n), STEPS)
    insist_on_equal(expected, found)
    assert captures(engine) <= 3


def test_a_value_that_goes_back_finds_its_program() -> None:
    model: Any = Reading(lambda s, x: x * s.number)
    engine = engine_of(model, squared)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        split(engine, lambda n: setattr(model.switch, "number", 1.0 + n % 2), STEPS)
    assert captures(engine) == 2
    assert len([w for w in said if "captured again" in str(w.message)]) == 1


class Sloped(nn.Module):
    """Reads an attribute of its class."""

    slope = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.slope + getattr(self, "shift", 0.0))


def test_a_change_names_the_value_of_the_class_and_a_value_that_was_not_there() -> None:
    model = Sloped()
    engine = engine_of(model, squared)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        split(engine, lambda n: setattr(model, "slope", 0.5) if n == 1 else None, 2)
        split(engine, lambda n: setattr(model, "shift", 2.0) if n == 1 else None, 2)
    texts = [str(w.message).partition(", test")[0] for w in said if "captured again" in str(w.message)]
    assert texts == ["self.slope 0.1 -> 0.5", "self.shift no value -> 2.0"]


class TokensAnnealed(Annealed):
    """A loss that counts tokens and runs live: microbatches still weigh by their tokens."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        labels = torch.where(target[:, 0] > 0.3, -100, 1)
        return F.cross_entropy(output, labels) + self.beta * 0


def test_a_live_loss_still_weighs_by_tokens() -> None:
    found = []
    for moving in (False, True):
        loss = TokensAnnealed()
        engine = engine_of(Reading(), loss)
        found.append(split(engine, lambda n, m=moving, k=loss: setattr(k, "beta", float(n * m)), STEPS))
        assert captures(engine) == (3 if moving else 1)
    insist_on_equal(*found)
