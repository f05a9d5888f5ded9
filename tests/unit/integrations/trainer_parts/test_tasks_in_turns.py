"""Tasks that ask for answers run in turns, one at a time and in one order; requests are answered together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from outsize.integrations.trainer_parts.turns import PythonStates, Turns


class Asked:
    """Answers with the double, and notes which requests came together."""

    def __init__(self, *modules: nn.Module) -> None:
        self.together: list[list[Any]] = []
        self.events: list[Any] = []
        self.turns = Turns(self.answer, PythonStates(lambda: modules))

    def answer(self, requests: Sequence[Any]) -> list[Any]:
        self.together.append(list(requests))
        return [2 * request for request in requests]


def test_tasks_go_on_in_their_order_behind_each_answer() -> None:
    asked = Asked()

    def task(number: int) -> int:
        for turn in range(2 + (number == 1)):
            asked.events.append((number, turn))
            assert asked.turns.ask(10 * number + turn) == 2 * (10 * number + turn)
        asked.events.append((number, "end"))
        return number

    assert asked.turns.run([partial(task, number) for number in range(3)]) == [0, 1, 2]
    assert asked.together == [[0, 10, 20], [1, 11, 21], [12]]
    assert asked.events == [
        (0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, "end"), (1, 2), (2, "end"), (1, "end"),
    ]  # fmt: skip


def test_outside_of_a_task_a_request_is_answered_by_itself() -> None:
    asked = Asked()
    assert asked.turns.ask(3) == 6
    assert asked.turns.run([lambda: asked.turns.ask(4)]) == [8]
    assert asked.together == [[3], [4]]


@contextmanager
def adapter(module: nn.Module, name: str) -> Iterator[None]:
    """Sets a value for a while, and then the one that it has found."""
    before: Any = module.adapter
    module.adapter = name  # pyright: ignore[reportArgumentType]
    module.weight.requires_grad_(name == "default")
    try:
        yield
    finally:
        module.adapter = before
        module.weight.requires_grad_(before == "default")


def test_what_a_task_has_changed_for_a_while_is_its_own() -> None:
    """Without that the second task would find, and leave, what the first one has set for its call."""
    module: Any = nn.Linear(2, 2)
    module.adapter = "default"
    seen: list[tuple[str, bool, int]] = []

    def answer(requests: Sequence[Any]) -> list[Any]:
        seen.append((module.adapter, module.weight.requires_grad, len(requests)))
        return list(requests)

    turns = Turns(answer, PythonStates(lambda: [module]))

    def task(name: str) -> str:
        turns.ask(0)
        with adapter(module, name):
            turns.ask(1)
            assert module.adapter == name
        assert module.adapter == "default"
        return name

    turns.run([partial(task, "ref"), partial(task, "ref"), partial(task, "other")])
    assert seen == [("default", True, 3), ("ref", False, 2), ("other", False, 1)]
    assert (module.adapter, module.weight.requires_grad) == ("default", True)


def test_an_error_of_one_task_ends_all_and_is_raised() -> None:
    asked, ended = Asked(), list[int]()

    def task(number: int) -> None:
        try:
            asked.turns.ask(number)
            if number == 1:
                raise KeyError("one")
            asked.turns.ask(number)
        finally:
            ended.append(number)

    with pytest.raises(KeyError, match="one"):
        asked.turns.run([partial(task, number) for number in range(3)])
    assert sorted(ended) == [0, 1, 2]


def test_an_answer_that_fails_is_raised_in_the_task() -> None:
    def answer(_: Sequence[Any]) -> list[Any]:
        raise ValueError("no answer")

    turns = Turns(answer, PythonStates(list))

    def task() -> str:
        with pytest.raises(ValueError, match="no answer"):
            turns.ask(1)
        return "went on"

    assert turns.run([task, task]) == ["went on", "went on"]


def test_tasks_have_the_callers_gradients() -> None:
    with torch.no_grad():
        assert Asked().turns.run([torch.is_grad_enabled] * 2) == [False, False]
    assert Asked().turns.run([torch.is_grad_enabled] * 2) == [True, True]


def test_what_an_answer_has_changed_stays() -> None:
    """A model that runs in its own Python may get hooks, and a flag that it has them."""
    module: Any = nn.Linear(2, 2)
    module.adapter = "default"
    seen: list[Any] = []

    def answer(requests: Sequence[Any]) -> list[Any]:
        module.has_hooks = True
        module.bias.requires_grad_(False)
        seen.append(module.adapter)
        return list(requests)

    def task(name: str) -> None:
        with adapter(module, name):
            turns.ask(name)
            seen.append((name, module.adapter, module.has_hooks, module.bias.requires_grad))

    turns = Turns(answer, PythonStates(lambda: [module]))
    turns.run([partial(task, "default"), partial(task, "reference")])
    told = [(name, name, True, False) for name in ("default", "reference")]
    assert seen == ["default", "reference", *told]
    assert (module.adapter, module.has_hooks, module.bias.requires_grad) == ("default", True, False)
