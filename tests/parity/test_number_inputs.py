"""A number that the model's own forward reads and that changes at every step is an input of the program.

Each case is compared with the plain loop, bit by bit, and captures are counted.
"""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Callable
from math import exp
from types import SimpleNamespace
from typing import Any

import guard_models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from guard_models import WIDTH, Reading, Switch, Use, reset, squared
from guard_runs import batches, engine_of, insist_on_equal, plain, plan_of, sgd, split
from test_guards_moving import captures
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import record
from outsize.run.stage.rng import borrowed_generators, seeder
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

STEPS = 6
Change = Callable[[Switch, int], Any]


@pytest.fixture(autouse=True)
def _first_values() -> Any:
    reset()
    yield
    reset()


def number(s: Switch, n: int) -> None:
    """Takes 0.1, 0.2, 0.3 and so on, some of which no binary fraction is."""
    s.number = (n + 1) / 10


def both(s: Switch, n: int) -> None:
    s.number, s.settings.scale = (n + 1) / 10, 1 / (n + 1)


def _scaled_by_global(_: Switch, x: Tensor) -> Tensor:
    return x * (1 - guard_models.SCALE)


def _set_global(_: Switch, n: int) -> None:
    guard_models.SCALE = n / 7  # pyright: ignore[reportConstantRedefinition]


def _helped(x: Tensor, factor: float, *, power: float = 1.0) -> Tensor:
    return x * (factor if power == 1 else factor**power)


def _in_place(s: Switch, x: Tensor) -> Tensor:
    y = x.clone()
    y *= s.number
    y[0] = s.number
    return y


FOLLOWED: dict[str, tuple[Use, Change]] = {
    "factor": (lambda s, x: x * s.number, number),
    "from the left": (lambda s, x: s.number * x + (s.number - x), number),
    "one minus": (lambda s, x: x * (1 - s.number), number),
    "expression": (lambda s, x: x / (2 * s.number**2 + abs(-s.number) % 3 + 7 // (s.number + 1)), number),
    "product of two": (lambda s, x: x * (s.number * s.settings.scale), both),
    "helper": (lambda s, x: _helped(x, 1 / s.number, power=s.number), number),
    "list": (lambda s, x: x * sum([s.number, 1.0]) + torch.tensor([s.number, 1.0, 2.0, 3.0]), number),
    "math": (lambda s, x: x * (0.5 * (1 + math.cos(math.pi * s.number))), number),
    "rounded": (lambda s, x: x * round(s.number / 3, 2), number),
    "limited": (lambda s, x: x * max(min(s.number, 2.0), 0.0), number),
    "is a float": (lambda s, x: x * s.number if isinstance(s.number, float) else x, number),
    "dataclass": (lambda s, x: x * s.settings.scale, lambda s, n: setattr(s.settings, "scale", 1 / (n + 3))),
    "slots": (lambda s, x: x * s.slotted.scale, lambda s, n: setattr(s.slotted, "scale", 1 / (n + 3))),
    "namespace": (lambda s, x: x * s.computed, lambda s, n: setattr(s.namespace.inner, "scale", n / 3)),
    "dict": (lambda s, x: x * s.table["scale"], lambda s, n: s.table.update(scale=n / 3)),
    "new dict": (lambda s, x: x * s.table["scale"], lambda s, n: setattr(s, "table", {"scale": n / 3})),
    "list item": (lambda s, x: x * s.numbers[1], lambda s, n: s.numbers.__setitem__(1, n / 3)),
    "class": (lambda s, x: x * s.of_class, lambda s, n: setattr(Switch, "of_class", n / 3)),
    "global": (_scaled_by_global, _set_global),
    "closure": (lambda s, x: s.closure(x), lambda s, n: s.set_closure(n / 3)),
    "numpy": (lambda s, x: x * (1 - s.number), lambda s, n: setattr(s, "number", np.float64(n) / 7)),
    "int": (lambda s, x: x * s.number + s.number / 7, lambda s, n: setattr(s, "number", n + 2)),
    "full_like": (lambda s, x: x + torch.full_like(x, s.number), number),
    "alpha=": (lambda s, x: x.add(x.tanh(), alpha=s.number), number),
    "leaky_relu": (lambda s, x: F.leaky_relu(x, s.number), number),
    "clamp": (lambda s, x: torch.clamp(x, -s.number, s.number), number),
    "in place": (_in_place, number),
}


def trained(use: Use, change: Change, steps: int = STEPS) -> tuple[int, list[str]]:
    """Insists on the numbers of the plain loop; returns how many captures there were and what was said."""
    model = Reading(use)
    expected = plain(model, squared, lambda n: change(model.switch, n), steps)
    reset()
    other = Reading(use)
    change(other.switch, 0)
    engine = engine_of(other, squared)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = split(engine, lambda n: change(other.switch, n), steps)
    insist_on_equal(expected, found)
    return captures(engine), [str(w.message) for w in said]


@pytest.mark.parametrize("kind", FOLLOWED)
def test_it_is_captured_three_times_at_most(kind: str) -> None:
    count, said = trained(*FOLLOWED[kind])
    assert count == 3
    assert sum("it is an input of the program from now on" in text for text in said) in (1, 2)
    assert not any("keeps changing" in text for text in said)


def test_it_is_said_once() -> None:
    _, said = trained(lambda s, x: x * s.number, number, 8)
    file = __file__.rpartition("/")[2]
    line = test_it_is_said_once.__code__.co_firstlineno + 1
    assert said == [
        f"s.number 0.1 -> 0.2, {file}:{line}: the program is captured again",
        f"s.number 0.2 -> 0.3, {file}:{line}: it is an input of the program from now on",
    ]


def _type_of(value: Any) -> type:
    return next(map(type, [value]))


RECORDED_AGAIN: dict[str, tuple[Use, Change]] = {
    "float()": (lambda s, x: x * float(s.number), number),
    "math by name": (lambda s, x: x * exp(s.number), number),
    "text": (lambda s, x: x * (len(f"{s.number:.3f}") + ord(str(s.number)[-1])), number),
    "key": (lambda s, x: x * {0.1: 2.0}.get(s.number, s.number), number),
    "type()": (lambda s, x: x * s.number if type(s.number) is float and s.number > 0.3 else x, number),
    "type by map": (
        lambda s, x: x * s.number if _type_of(s.number) is float and s.number > 0.3 else x,
        number,
    ),
    "numpy function": (lambda s, x: x * float(np.exp(s.number)), number),
    "thread": (lambda s, x: x * s.of_thread.scale, lambda s, n: setattr(s.of_thread, "scale", n / 3)),
    "operator": (lambda s, x: x * operator.index(s.number), lambda s, n: setattr(s, "number", n + 1)),
    "shape": (
        lambda s, x: x + x[:, : s.number].sum(1, keepdim=True),
        lambda s, n: setattr(s, "number", n % 6),
    ),
    "shape by a factor": (
        lambda s, x: x + F.interpolate(x[None], scale_factor=s.number)[0].mean(1, keepdim=True),
        lambda s, n: setattr(s, "number", 1 + n / 4),
    ),
    "length": (
        lambda s, x: x + torch.arange(0, s.number, 0.1).sum(),
        lambda s, n: setattr(s, "number", 0.61 + n / 100),
    ),
}


@pytest.mark.parametrize("kind", RECORDED_AGAIN)
def test_what_cannot_be_followed_is_recorded_again(kind: str) -> None:
    count, said = trained(*RECORDED_AGAIN[kind])
    assert count == STEPS
    assert sum("keeps changing" in text for text in said) == 1
    assert not any("input of the program" in text for text in said)


def test_a_decision_that_falls_otherwise_is_recorded_again() -> None:
    count, said = trained(lambda s, x: x * s.number if s.number > 0.45 else x - s.number, number, 8)
    assert count == 4
    assert len(said) == 3
    assert "s.number 0.3 -> 0.5" in said[-1]
    assert "Python decides otherwise on it" in said[-1]


def test_a_number_on_which_each_step_decides_otherwise_is_given_up() -> None:
    """No capture is made twice, and none goes wrong."""
    steps = 14
    count, said = trained(lambda s, x: x * s.number + int(10 * s.number), number, steps)
    assert count == steps
    assert "keeps changing" in said[-1]


def test_a_number_of_another_type_is_recorded_again() -> None:
    values = [0.0, 0.25, 0.5, 0.75, 1, 0.125]
    count, _ = trained(lambda s, x: x * (1 - s.number), lambda s, n: setattr(s, "number", values[n]))
    assert count == 4


def test_dropout_follows_its_rate() -> None:
    def dropped(s: Switch, x: Tensor) -> Tensor:
        return F.dropout(x, p=s.number)

    rates = [0.1, 0.2, 0.3, 0.5, 0.0, 0.9, 1.0, 0.4]

    def change(s: Switch, n: int) -> None:
        s.number = rates[n]

    model: Any = Reading(dropped)
    model.switch.number = 0.1
    tape = record(model, (batches()[0][0],), {}, squared, (batches()[0][1],))
    index = next(i.index for i in tape.instructions if i.random)
    calls = itertools.count()

    def seeded(s: Switch, x: Tensor) -> Tensor:
        step, microbatch = divmod(next(calls), 2)
        seeder(0, step, microbatch)(index)
        return dropped(s, x)

    model = Reading(seeded)
    with borrowed_generators():
        expected = plain(model, squared, lambda n: change(model.switch, n), len(rates))
    other = Reading(dropped)
    other.switch.number = 0.1
    engine = engine_of(other, squared)
    with pytest.warns(UserWarning, match="input of the program"):
        found = split(engine, lambda n: change(other.switch, n), len(rates))
    insist_on_equal(expected, found)
    # At 0.0 the result is the argument itself, and at 1.0 nothing is drawn: each has a program of its own.
    assert captures(engine) == 5


class Shared(nn.Module):
    """A module without weights, which stages share."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = SimpleNamespace(temperature=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x / self.schedule.temperature


class Sharing(nn.Module):
    """Layers with the shared module behind each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.cooled = Shared()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.cooled(layer(x).tanh())
        return x


def _cool(model: Any, n: int) -> None:
    model.cooled.schedule.temperature = 1 + n / 3


PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "naive": {"schedule": "naive"},
    "zero bubble": {"schedule": "zero-bubble"},
    "recompute": {"recompute": "full"},
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.sample("1f1b", "zero bubble", "recompute")
def test_a_module_that_stages_share_in_every_way_to_run(name: str) -> None:
    model = Sharing()
    expected = plain(model, squared, lambda n: _cool(model, n), STEPS)
    other = Sharing()
    plan = plan_of(other, squared, 4).model_copy(update=PLANS[name])
    engine = make_engine(other, plan, None, EngineOptions(loss_fn=squared, optimizer=sgd))
    with pytest.warns(UserWarning, match="input of the program"):
        found = split(engine, lambda n: _cool(other, n), STEPS)
    insist_on_equal(expected, found)
    assert captures(engine) == 3


def test_evaluation_reads_the_number_as_well() -> None:
    model: Any = Reading(lambda s, x: x * (1 - s.number))
    engine = engine_of(model, squared)
    x, y = batches()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(STEPS):
            number(model.switch, n)
            engine.step(x, target=y)
            number(model.switch, n + 3)
            result = engine.evaluate(x, target=y)
            with torch.no_grad():
                expected = [model(part) for part in x.chunk(2)]
            assert result.outputs is not None
            assert all(map(torch.equal, result.outputs, expected))
    assert captures(engine) <= 5
