"""What forward or a loss writes and draws is written and drawn as often as in the plain loop, or refused."""

from __future__ import annotations

import os
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guard_models import (
    COPIES_ITERTOOLS,
    OF_ITERTOOLS,
    SETTINGS,
    WIDTH,
    WRITES,
    Inner,
    Reading,
    ReadingInside,
    ReadingLoss,
    Setting,
    reset,
    squared,
    written,
)
from guard_runs import MICROBATCHES, STEPS, batches, engine_of, insist_on_equal, plain, sgd, split
from torch import Tensor, nn
from turns import in_turns

import outsize
from outsize.capture.recording.fallbacks import record
from outsize.errors import NotCapturable

CALLS = 0
PLACES = in_turns(WRITES, ["submodule", "loss"], each=1)  # a loss and a submodule are told apart by one rule


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


@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_what_is_written_and_drawn_is_what_the_plain_loop_does(kind: str, place: str) -> None:
    insist = insist_on_writes_of_a_submodule if place == "submodule" else insist_on_writes_of_a_loss
    if kind in OF_ITERTOOLS and not COPIES_ITERTOOLS:
        with pytest.raises(NotCapturable, match=r"which changes with each use|cannot be copied"):
            insist(kind)
    else:
        insist(kind)


def insist_on_writes_of_a_submodule(kind: str) -> None:
    model = ReadingInside(WRITES[kind])
    expected = plain(model, squared, nothing)
    values = written(model.switch)
    reset()
    other = ReadingInside(WRITES[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        insist_on_equal(expected, split(engine_of(other, squared), nothing))
    assert written(other.switch) == values


def insist_on_writes_of_a_loss(kind: str) -> None:
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
    reasons = "uses what it writes|unknown origin|of its own|which changes with each use|cannot be copied"
    with pytest.raises(NotCapturable, match=reasons):
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


def _from_a_generator(s: Any, x: Tensor) -> Tensor:
    return x * next(s.numbers)


@pytest.mark.parametrize("where", ["forward", "submodule", "loss"])
def test_a_generator_is_refused_and_keeps_its_values(where: str) -> None:
    loss = ReadingLoss(_from_a_generator if where == "loss" else lambda _, x: x)
    model: Any = ReadingInside(_from_a_generator) if where == "submodule" else Reading()
    if where == "forward":
        model = Reading(_from_a_generator)
    numbers = (float(number) for number in range(1, 99))
    model.switch.numbers = loss.switch.numbers = numbers
    with pytest.raises(NotCapturable, match=r"a generator that lives between calls .*guard.*py:\d+"):
        engine_of(model, loss)
    assert next(numbers) == 1.0


def test_an_iterator_of_two_modules_is_refused() -> None:
    first, second = (Inner(WRITES["itertools.count"]) for _ in range(2))
    second.switch.counter = first.switch.counter
    with pytest.raises(NotCapturable, match=r"counter, (a count that lives|which changes with each use)"):
        engine_of(nn.Sequential(first, second, nn.Linear(4, 4)), squared)


class Catching(nn.Module):
    """Catches whatever goes wrong with its iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.counter = nn.Linear(4, 4), iter([float(number) for number in range(1, 99)])

    def forward(self, x: Tensor) -> Tensor:
        try:
            number = next(self.counter)
        except:  # noqa: E722
            number = 0.0
        return self.layer(x) * number


def test_code_that_catches_everything_is_interrupted_nevertheless() -> None:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Catching(), nn.Linear(4, 4))

    expected = plain(built(), squared, nothing)
    insist_on_equal(expected, split(engine_of(built(), squared), nothing))


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


class CountingInPlace:
    """Counts, and scales the output in place."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        output *= 2
        loss = squared(output, target)
        loss *= 3
        return loss


def test_a_loss_that_writes_into_what_it_is_given_runs_as_it_is() -> None:
    """It is recorded first to learn what its numbers are divided by, and then as one instruction."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    loss = CountingInPlace()
    expected = plain(built(), CountingInPlace(), nothing)
    insist_on_equal(expected, split(engine_of(built(), loss), nothing))
    assert loss.calls == STEPS * MICROBATCHES


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


# Layers of torch, and objects of a layer.
REFUSED = ("an object", "a constant in an object", "the epsilon of a norm", "the mode of a norm")


def _set_inside(change: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Setting(change), nn.Linear(4, 4))


def _set_by_the_model(change: Any) -> nn.Module:
    torch.manual_seed(0)
    return Setting(change)


def _trained(model: nn.Module, run: Any) -> list[Tensor]:
    (setting,) = (m for m in model.modules() if isinstance(m, Setting))
    torch.manual_seed(7)
    return run(lambda number: setattr(setting, "number", (number + 1) / 10))


def _insist_on_parity(make: Any, change: Any) -> None:
    model, other = make(change), make(change)
    expected = _trained(model, lambda between: plain(model, squared, between))
    engine = engine_of(other, squared)
    insist_on_equal(expected, _trained(other, lambda between: split(engine, between)))


@pytest.mark.parametrize("kind", SETTINGS)
def test_what_a_submodule_sets_of_the_modules_that_it_calls_is_set_at_each_call(kind: str) -> None:
    _insist_on_parity(_set_inside, SETTINGS[kind])


@pytest.mark.parametrize("kind", SETTINGS)
def test_what_the_models_own_forward_sets_of_a_layer_is_followed_or_refused(kind: str) -> None:
    if kind in REFUSED:
        with pytest.raises(NotCapturable, match=r"(it sets|writes) .* reads.* at .*guard_models.py:\d+"):
            engine_of(Setting(SETTINGS[kind]), squared)
    else:
        _insist_on_parity(_set_by_the_model, SETTINGS[kind])


@pytest.mark.parametrize("kind", ["a constant", "a number that moves", "a table", "the epsilon of a norm"])
def test_what_is_set_for_the_next_call_is_refused(kind: str) -> None:
    with pytest.raises(NotCapturable):
        engine_of(Setting(SETTINGS[kind], late=True), squared)


def test_what_is_set_as_it_was_and_what_no_layer_reads_changes_nothing() -> None:
    def change(model: Any, x: Tensor) -> None:
        model.scaled.scale, model.norm.eps, model.scaled.namespace.scale = 1.0, 1e-5, 1.0
        model.layer.last_input, model.norm.calls = x.detach(), id(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _insist_on_parity(_set_by_the_model, change)


def _collect(*_: Any) -> None:
    """Does what hooks of transformers do that collect outputs."""


_collect.__module__ = "transformers.utils.output_capturing"


def test_hooks_that_collect_are_not_set_for_a_layer() -> None:
    model = _set_inside(lambda m, x: m.layer._forward_hooks.setdefault(0, _collect))
    ((x, y),) = batches(1)
    assert "1.layer" in [i.target for i in record(model, (x,), {}, squared, (y,)).instructions]


class Remembers(nn.Module):
    """The model's own forward writes into a container, and computes with its length."""

    def __init__(self, memory: Any, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory, self.write = memory, write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.memory)
        return self.last(self.first(x).tanh() / len(self.memory))


MEMORIES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (list, lambda memory: memory.append(1)),
    "dict": (dict, lambda memory: memory.update({len(memory): 1})),
    "set": (set, lambda memory: memory.add(len(memory))),
    "deque": (lambda: deque(maxlen=3), lambda memory: memory.append(1)),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_a_container_of_the_models_own_forward_grows_as_in_the_plain_loop(name: str) -> None:
    make, write = MEMORIES[name]

    def built() -> nn.Module:
        torch.manual_seed(0)
        return Remembers(make(), write)

    model, (x, y) = built(), batches(1)[0]
    expected = plain(built(), squared, lambda _: None)
    options: dict[str, Any] = {"loss_fn": squared, "target": y, "optimizer": sgd}
    engine = outsize.parallelize(model, (x,), stages=2, microbatches=MICROBATCHES, **options)
    insist_on_equal(expected, split(engine, lambda _: None))
