"""A Python value of any kind that changes between two steps, in forward or in the loss: the plain numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from guard_models import KINDS, Reading, ReadingLoss, reset, squared
from guard_runs import engine_of, insist_on_equal, plain, split
from torch import Tensor


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    reset()
    yield
    reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(every=2)
def test_a_value_that_forward_reads_changes_at_step_two(kind: str) -> None:
    use, change = KINDS[kind]
    model = Reading(use)
    expected = plain(model, squared, lambda n: change(model.switch) if n == 2 else None)
    reset()
    other = Reading(use)
    found = split(engine_of(other, squared), lambda n: change(other.switch) if n == 2 else None)
    insist_on_equal(expected, found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(every=2, first=1)
def test_a_value_that_the_loss_reads_changes_at_step_two(kind: str) -> None:
    use, change = KINDS[kind]
    model, loss = Reading(), ReadingLoss(use)
    expected = plain(model, loss, lambda n: change(loss.switch) if n == 2 else None)
    reset()
    other, loss = Reading(), ReadingLoss(use)
    found = split(engine_of(other, loss), lambda n: change(loss.switch) if n == 2 else None)
    insist_on_equal(expected, found)


def test_every_kind_matters() -> None:
    for kind, (use, change) in KINDS.items():
        reset()
        model = Reading(use)
        changed = plain(model, squared, lambda n, m=model, c=change: c(m.switch) if n == 2 else None)
        reset()
        assert any(
            (a != b).any() for a, b in zip(changed, plain(Reading(use), squared, lambda _: None), strict=True)
        ), kind


def test_what_a_partial_hands_to_the_loss_counts() -> None:
    def weighted(table: dict[str, float], output: Tensor, target: Tensor, *, rates: list[float]) -> Tensor:
        return squared(output, target) * table["scale"] * sum(rates)

    def loss() -> Any:
        return partial(weighted, {"scale": 1.0}, rates=[1.0])

    def change(loss_fn: Any, number: int) -> None:
        if number == 1:
            loss_fn.args[0]["scale"] = 0.5
        if number == 2:
            loss_fn.keywords["rates"].append(2.0)

    model, loss_fn = Reading(), loss()
    expected = plain(model, loss_fn, lambda n: change(loss_fn, n))
    other, another = Reading(), loss()
    found = split(engine_of(other, another), lambda n: change(another, n))
    insist_on_equal(expected, found)
