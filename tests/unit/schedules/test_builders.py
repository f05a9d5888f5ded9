"""Builders: the law of ascending microbatches, the pictures, the options that make no sense."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest

from outsize.errors import BadOption
from outsize.ir.schedule import Kind, Schedule
from outsize.schedules import builders
from outsize.schedules.builders import NAMES, build
from outsize.schedules.check import check_compute
from outsize.schedules.grid import draw

SIZES = [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (5, 3), (3, 8)]


@pytest.mark.parametrize(
    ("name", "row", "microbatches"),
    [
        ("naive", builders.naive_row, 2),
        ("gpipe", builders.gpipe_row, 4),
        ("1f1b", builders.one_f_one_b_row, 4),
    ],
)
def test_docstring_picture_is_the_schedule(name: str, row: Callable[..., Any], microbatches: int) -> None:
    picture = draw(build(name, 3, microbatches))
    assert dedent(picture) in (inspect.getdoc(row) or "")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_each_stage_runs_in_microbatch_order(name: str, stages: int, microbatches: int) -> None:
    schedule = build(name, stages, microbatches)
    check_compute(schedule)
    assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, stages, microbatches)
    for stage, row in enumerate(schedule.actions):
        assert {a.stage for a in row} == {stage}
        for kind in (Kind.F, Kind.B):
            assert [a.microbatch for a in row if a.kind is kind] == list(range(microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_microbatches_in_flight(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        assert _in_flight(build("naive", stages, microbatches), stage) == 1
        assert _in_flight(build("gpipe", stages, microbatches), stage) == microbatches
        assert _in_flight(build("1f1b", stages, microbatches), stage) == min(stages - stage, microbatches)


def _in_flight(schedule: Schedule, stage: int) -> int:
    alive = peak = 0
    for action in schedule.actions[stage]:
        alive += 1 if action.kind is Kind.F else -1
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "text"),
    [
        ("gpipe", 0, 4, "stages = 0"),
        ("1f1b", 2, -1, "microbatches = -1"),
        ("1f2b", 2, 4, "known schedules: naive, gpipe, 1f1b"),
    ],
)
def test_bad_options(name: str, stages: int, microbatches: int, text: str) -> None:
    with pytest.raises(BadOption, match=text):
        build(name, stages, microbatches)
