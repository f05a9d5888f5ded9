"""Builders: the law of ascending microbatches, the pictures, the options that make no sense."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from textwrap import dedent
from typing import Any

import pytest

from outsize.errors import BadOption
from outsize.ir.schedule import Action, Kind
from outsize.schedules import families
from outsize.schedules.builders import build
from outsize.schedules.check import check, check_compute
from outsize.schedules.families import built, family_of, sliced
from outsize.schedules.grid import draw
from outsize.schedules.lower import lower

SIZES = [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (5, 3), (3, 8)]


@pytest.mark.parametrize(
    ("name", "row", "microbatches"),
    [
        ("naive", families.naive_row, 2),
        ("gpipe", families.gpipe_row, 4),
        ("1f1b", families.one_f_one_b_row, 4),
        ("zero-bubble", families.zero_bubble_row, 4),
    ],
)
def test_docstring_picture_is_the_schedule(name: str, row: Callable[..., Any], microbatches: int) -> None:
    picture = draw(build(name, 3, microbatches))
    assert dedent(picture) in (inspect.getdoc(row) or "")


@pytest.mark.parametrize(
    ("name", "row", "microbatches"),
    [("interleaved", families.interleaved_row, 4), ("gpipe", families.gpipe_row, 3)],
)
def test_docstring_picture_of_two_stages_on_a_rank(
    name: str, row: Callable[..., Any], microbatches: int
) -> None:
    picture = draw(build(name, 4, microbatches, ranks=2))
    assert dedent(picture) in (inspect.getdoc(row) or "")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("naive", families.naive_sliced_row),
        ("gpipe", families.gpipe_sliced_row),
        ("1f1b", families.one_f_one_b_sliced_row),
    ],
)
def test_docstring_picture_of_slices(name: str, row: Callable[..., Any]) -> None:
    picture = draw(build(name, 2, 2, slices=2))
    assert dedent(picture) in (inspect.getdoc(row) or "")


@pytest.mark.parametrize("slices", [1, 2, 3, 8])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("name", sliced())
def test_slices_are_a_step_that_ends(name: str, stages: int, microbatches: int, slices: int) -> None:
    schedule = build(name, stages, microbatches, slices=slices)
    chain = range(stages)
    down, up = frozenset(pairwise(chain)), frozenset(pairwise(reversed(chain)))
    check(lower(schedule, down, up), down, up)
    if slices == 1:
        assert schedule == build(name, stages, microbatches)


@pytest.mark.parametrize(("stages", "slices"), [(4, 4), (4, 16), (8, 8)])
def test_slices_in_flight_are_hardly_more_than_a_microbatch(stages: int, slices: int) -> None:
    for stage, row in enumerate(build("1f1b", stages, 8, slices=slices).actions):
        held = most = 0
        for action in row:
            held += 1 if action.kind is Kind.F else -1
            most = max(most, held)
        assert most == slices + stages - stage - 1


def test_a_schedule_without_slices_says_which_ones_have_them() -> None:
    with pytest.raises(BadOption, match="knows no slices of sequences; slices=2; schedules that do: naive"):
        build("interleaved", 2, 2, slices=2)


def test_docstring_picture_of_a_v() -> None:
    picture = draw(build("zero-bubble-v", 4, 3, ranks=2))
    assert dedent(picture) in (inspect.getdoc(families.zero_bubble_v_row) or "")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 8, 13])
def test_a_v_holds_as_much_as_1f1b_and_ends_almost_when_the_work_does(ranks: int, microbatches: int) -> None:
    """Equal chunks of F = I = W; a microbatch needs as much memory as 2 chunks."""
    stages = 2 * ranks
    schedule = build("zero-bubble-v", stages, microbatches, ranks)
    check_compute(schedule)
    assert [schedule.rank_of[s] for s in range(stages)] == [*range(ranks), *reversed(range(ranks))]
    forward = frozenset(pairwise(range(stages)))
    backward = frozenset((b, a) for a, b in forward)
    check(lower(schedule, forward, backward), forward, backward)
    assert all(_in_flight(row) <= 2 * min(ranks, microbatches) for row in schedule.actions)
    slots = len(draw(schedule).splitlines()[0].split()) - 1
    if microbatches >= ranks:
        assert slots <= 1.05 * (6 * microbatches + ranks - 1)


@pytest.mark.parametrize("name", built())
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_each_stage_runs_in_microbatch_order(name: str, stages: int, microbatches: int) -> None:
    schedule = build(name, stages, microbatches)
    check_compute(schedule)
    assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, stages, microbatches)
    # dualpipe-v with one stage on a rank is no V.
    is_split = family_of(name).splits_backward and name != "dualpipe-v"
    kinds = (Kind.F, Kind.I, Kind.W) if is_split else (Kind.F, Kind.B)
    for stage, row in enumerate(schedule.actions):
        assert {a.stage for a in row} == {stage}
        assert {a.kind for a in row} == set(kinds)
        for kind in kinds:
            assert [a.microbatch for a in row if a.kind is kind] == list(range(microbatches))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8, 9, 11])
def test_interleaved(ranks: int, chunks: int, microbatches: int) -> None:
    schedule = build("interleaved", ranks * chunks, microbatches, ranks)
    check_compute(schedule)
    assert schedule.rank_of == {stage: stage % ranks for stage in range(ranks * chunks)}
    forward = frozenset(pairwise(range(ranks * chunks)))
    backward = frozenset((b, a) for a, b in forward)
    check(lower(schedule, forward, backward), forward, backward)
    slots = len(draw(schedule).splitlines()[0].split()) - 1
    if microbatches >= ranks:
        assert slots == 2 * chunks * microbatches + 2 * (ranks - 1)
    if microbatches % ranks == 0:
        for rank, row in enumerate(schedule.actions):
            ahead = (chunks - 1) * ranks + 2 * (ranks - rank) - 1
            assert _in_flight(row) == min(ahead, chunks * microbatches)


@pytest.mark.parametrize(("stages", "microbatches"), [*SIZES, (4, 9), (8, 20)])
def test_zero_bubble_holds_as_much_as_1f1b_and_is_faster(stages: int, microbatches: int) -> None:
    schedule = build("zero-bubble", stages, microbatches)
    assert all(_in_flight(row) <= min(stages, microbatches) for row in schedule.actions)
    slots = len(draw(schedule).splitlines()[0].split()) - 1
    if microbatches >= 2 * stages - 1:
        assert slots == 3 * microbatches + stages - 1
    assert slots <= 3 * (microbatches + stages - 1)


@pytest.mark.parametrize(
    ("name", "stages", "ranks"), [("1f1b", 4, 2), ("interleaved", 4, 3), ("naive", 2, 4)]
)
def test_stages_that_do_not_go_on_the_ranks(name: str, stages: int, ranks: int) -> None:
    with pytest.raises(BadOption, match=rf"{stages} stages cannot be put on {ranks} ranks under {name}"):
        build(name, stages, 4, ranks)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_microbatches_in_flight(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        rows = {name: build(name, stages, microbatches).actions[stage] for name in built()}
        assert _in_flight(rows["naive"]) == 1
        assert _in_flight(rows["gpipe"]) == microbatches
        assert _in_flight(rows["1f1b"]) == min(stages - stage, microbatches)


def _in_flight(row: Sequence[Action]) -> int:
    alive = peak = 0
    for action in row:
        alive += {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}[action.kind]
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
