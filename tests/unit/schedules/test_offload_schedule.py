"""Loads and unloads: the pictures, what moves, places of stages, and schedules that must be refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from inspect import getdoc
from itertools import pairwise
from textwrap import indent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.errors import BadOption, InvalidSchedule
from outsize.ir.schedule import COMPUTE, FETCH, OFFLOAD, Action, Kind, Schedule, parse_row
from outsize.schedules import offload
from outsize.schedules.builders import build
from outsize.schedules.check import check_compute
from outsize.schedules.grid import draw, listing
from outsize.schedules.offload import (
    ROOM,
    check_loads,
    computed,
    places,
    with_activation_copies,
    with_loads,
    with_value_copies,
)

SIZES = [(1, 1), (1, 4), (2, 3), (3, 1), (3, 2), (6, 4), (9, 2)]
Golden = Callable[[str, str], None]


def loaded(stages: int, microbatches: int, name: str = "gpipe", room: int = ROOM) -> Schedule:
    return with_loads(build(name, stages, microbatches, ranks=1), room)


def test_docstring_pictures_are_the_schedule() -> None:
    told = getdoc(offload) or ""
    assert indent(draw(build("gpipe", 3, 2, ranks=1)), "    ") in told
    assert indent(listing(loaded(3, 1)), "    ") in told
    assert indent(listing(loaded(3, 1, room=3)), "    ") in told
    assert indent(listing(with_activation_copies(build("gpipe", 1, 3, ranks=1), {0})), "    ") in told
    assert indent(listing(with_value_copies(build("gpipe", 2, 1, ranks=1))), "    ") in told


@pytest.mark.parametrize("name", ["gpipe", "naive"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_every_stage_is_there_when_it_computes(name: str, stages: int, microbatches: int) -> None:
    schedule = loaded(stages, microbatches, name)
    check_loads(schedule)
    check_compute(schedule)
    assert schedule.compute() == build(name, stages, microbatches, ranks=1)
    assert set(places(schedule.actions[0]).values()) == set(range(min(stages, ROOM)))


@pytest.mark.parametrize("name", ["gpipe", "naive"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_with_room_for_all_weights_move_once(name: str, stages: int, microbatches: int) -> None:
    """All before the first stage computes, and each goes behind its last backward."""
    schedule = loaded(stages, microbatches, name, room=stages)
    check_loads(schedule, stages)
    assert schedule.compute() == build(name, stages, microbatches, ranks=1)
    row = schedule.actions[0]
    assert row[:stages] == tuple(Action(stage, Kind.LOAD) for stage in range(stages))
    for stage in range(stages):
        last = row.index(Action(stage, Kind.B, microbatches - 1))
        assert row[last + 1] == Action(stage, Kind.UNLOAD)
    assert len(row) == len(schedule.compute().actions[0]) + 2 * stages
    assert sorted(places(row).values()) == list(range(stages))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(2, 7))
def test_with_more_room_no_more_moves(order: list[int], room: int) -> None:
    """Random rows, each of them allowed."""
    rows = (tuple(Action(stage, Kind.F, mb) for mb, stage in enumerate(order)),)
    moves = list[int]()
    for each in (room, room + 1):
        schedule = with_loads(Schedule("custom", len(order), rows), each)
        check_loads(schedule, each)
        moves.append(len(schedule.actions[0]))
    assert moves[1] <= moves[0]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_layer_by_layer_weights_move_once_a_pass(stages: int, microbatches: int) -> None:
    """Those of the two stages at which the pass turns once in all."""
    counts = Counter(a.stage for a in loaded(stages, microbatches).actions[0] if a.kind is Kind.LOAD)
    assert counts == {stage: 1 if stage >= stages - ROOM else 2 for stage in range(stages)}


def test_the_next_stage_is_loaded_before_this_one_computes() -> None:
    row = loaded(5, 2).actions[0]
    for stage in range(4):
        assert row.index(Action(stage + 1, Kind.LOAD)) < row.index(Action(stage, Kind.F, 0))
    last = max(at for at, a in enumerate(row) if a == Action(0, Kind.LOAD))
    assert last < row.index(Action(1, Kind.B, 0))


@pytest.mark.parametrize("name", ["gpipe", "naive"])
@pytest.mark.parametrize("room", [ROOM, 4])
def test_as_it_is_written(name: str, room: int, golden: Golden) -> None:
    which = "" if room == ROOM else f"-room{room}"
    golden(f"loads/{name}-p1-v4-m2{which}.csv", loaded(4, 2, name, room).to_csv())


def test_stages_that_are_there_together_have_other_places() -> None:
    """A row that nobody built: stages 0, 2, 1, 2, 0."""
    row = tuple(Action(stage, Kind.F, mb) for mb, stage in enumerate((0, 2, 1, 2, 0)))
    schedule = with_loads(Schedule("custom", 5, (row,)))
    check_loads(schedule)
    found = places(schedule.actions[0])
    assert found[0] != found[2] != found[1]


def moved(schedule: Schedule, action: Action, before: Action | None) -> Schedule:
    """With the first such action in front of another one, or without it."""
    row = list(schedule.actions[0])
    row.remove(action)
    if before is not None:
        row.insert(row.index(before), action)
    return Schedule(schedule.name, schedule.microbatches, (tuple(row),))


FAULTS = [
    (Action(1, Kind.LOAD), Action(1, Kind.F, 1), "1F0 runs while stage 1 is not loaded"),
    (Action(1, Kind.UNLOAD), Action(2, Kind.B, 1), "2LOAD finds no place|1B0 runs while|2UNLOAD|1UNLOAD"),
    (Action(0, Kind.UNLOAD), Action(0, Kind.F, 1), "0F1 runs while stage 0 is not loaded"),
    (Action(0, Kind.UNLOAD), None, "2LOAD finds no place"),
    (Action(2, Kind.LOAD), None, "2F0 runs while stage 2 is not loaded"),
    (Action(2, Kind.UNLOAD), None, "finds no place"),
]


@pytest.mark.parametrize(("action", "before", "fault"), FAULTS)
def test_what_is_refused(action: Action, before: Action | None, fault: str) -> None:
    with pytest.raises(InvalidSchedule, match=fault) as refused:
        check_loads(moved(loaded(3, 2), action, before))
    assert "<-- HERE" in (refused.value.picture or "")


def test_a_stage_that_stays_and_one_that_comes_twice() -> None:
    schedule = loaded(1, 1)
    with pytest.raises(InvalidSchedule, match="stage 0 is not unloaded"):
        check_loads(moved(schedule, Action(0, Kind.UNLOAD), None))
    twice = Schedule("gpipe", 1, ((Action(0, Kind.LOAD), *schedule.actions[0]),))
    with pytest.raises(InvalidSchedule, match="0LOAD loads what is there"):
        check_loads(twice)


def test_other_schedules_have_no_several_stages_on_one_rank() -> None:
    with pytest.raises(BadOption, match="3 stages cannot be put on 1 ranks under 1f1b"):
        build("1f1b", 3, 2, ranks=1)


ROWS = {
    "gpipe": (
        "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3",
        "0F0,0OFFLOAD_F0,0F1,0OFFLOAD_F1,0F2,0OFFLOAD_F2,0FETCH_B0,0F3,0OFFLOAD_F3,0FETCH_B1,0B0,0FETCH_B2,"
        "0B1,0FETCH_B3,0B2,0B3",
    ),
    "what comes back at once stays": ("0F0,0F1,0B0,0B1", "0F0,0F1,0B0,0B1"),
    "1f1b": (
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3",
        "0F0,0OFFLOAD_F0,0F1,0OFFLOAD_F1,0FETCH_B0,0F2,0OFFLOAD_F2,0B0,0FETCH_B1,0F3,0OFFLOAD_F3,0FETCH_B2,"
        "0B1,0FETCH_B3,0B2,0B3",
    ),
    "two stages": (
        "0F0,0F1,4F0,4F1,4B0,4B1,0B0,0B1",
        "0F0,0OFFLOAD_F0,0F1,0OFFLOAD_F1,4F0,4F1,4B0,0FETCH_B0,4B1,0FETCH_B1,0B0,0B1",
    ),
    "another stage keeps its own": (
        "0F0,3F0,0F1,3F1,3B0,0B0,3B1,0B1",
        "0F0,0OFFLOAD_F0,3F0,0F1,0OFFLOAD_F1,3F1,0FETCH_B0,3B0,0B0,0FETCH_B1,3B1,0B1",
    ),
    "an evaluation has no backward": ("0F0,0F1,0F2,0F3", "0F0,0F1,0F2,0F3"),
}


@pytest.mark.parametrize("name", list(ROWS))
def test_activations_leave_and_come_back(name: str) -> None:
    text, wanted = ROWS[name]
    schedule = Schedule("custom", 4, (parse_row(text),))
    assert with_activation_copies(schedule, {0, 4}).to_csv().strip() == wanted


@pytest.mark.parametrize("name", ["gpipe", "naive"])
def test_each_compute_has_its_copies(name: str) -> None:
    """The first compute finds all on the device, and what the last one leaves stays there."""
    row = build(name, 3, 4, ranks=1).actions[0]
    (found,) = with_value_copies(Schedule(name, 4, (row,))).actions
    computes = [action for action in found if action.kind in COMPUTE]
    assert computes == list(row)
    assert [computed(action) for action in found if action.kind in OFFLOAD] == computes[:-1]
    assert [computed(action) for action in found if action.kind in FETCH] == computes[1:]
    for left, computing in pairwise(computes):
        between = found[found.index(left) + 1 : found.index(computing)]
        assert [computed(action) for action in between if action.kind in OFFLOAD] == [left]
