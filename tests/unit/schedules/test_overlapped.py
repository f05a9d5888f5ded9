"""Forwards inside of backwards: rows of all sizes are valid, hold what they may, and bring both together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import Action, Kind, Schedule, parse_row, together
from outsize.schedules.builders import build, first, read, written
from outsize.schedules.check import check, check_compute, check_waits
from outsize.schedules.families import family_of
from outsize.schedules.lower import lower

ONE, V = "1f1b-overlap", "dualpipe-v"
SIZES = [*product(range(2, 9), (1, 2, 3, 5, 8, 13, 20))]
SECONDS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


def built(name: str, ranks: int, microbatches: int) -> Schedule:
    return build(name, ranks * (2 if name == V else 1), microbatches, ranks)


def edges(schedule: Schedule) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]:
    down = frozenset(pairwise(range(schedule.stages)))
    return down, frozenset((b, a) for a, b in down)


def pairs(schedule: Schedule) -> list[list[tuple[Action, ...]]]:
    return [[cell for cell in together(row) if len(cell) == 2] for row in schedule.actions]


def needs(action: Action, stages: int, split: set[Action]) -> Iterator[Action]:
    """What a chain of stages makes an action wait for."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is Kind.F and stage:
        yield Action(stage - 1, Kind.F, microbatch)
    if kind is Kind.W:
        yield Action(stage, Kind.I, microbatch)
    if kind in (Kind.B, Kind.I):
        yield Action(stage, Kind.F, microbatch)
        if stage + 1 < stages:
            half = Action(stage + 1, Kind.I, microbatch)
            yield half if half in split else Action(stage + 1, Kind.B, microbatch)


def played_s(schedule: Schedule, hidden_s: float = 0.0) -> float:
    """The seconds of a step in which each pair lasts `hidden_s` less than its two actions; it has to end."""
    split = {action for row in schedule.actions for action in row if action.kind is Kind.I}
    rows = [[*together(row)] for row in schedule.actions]
    ends, free = dict[Action, float](), [0.0] * len(rows)
    while any(rows):
        moved = False
        for rank, row in enumerate(rows):
            while row:
                waits = {n for a in row[0] for n in needs(a, schedule.stages, split)} - {*row[0]}
                if not waits <= ends.keys():
                    break
                cell = row.pop(0)
                lasts_s = sum(SECONDS[action.kind] for action in cell) - hidden_s * (len(cell) - 1)
                free[rank] = max([free[rank], *(ends[n] for n in waits)]) + lasts_s
                ends |= dict.fromkeys(cell, free[rank])
                moved = True
        assert moved, schedule.to_csv()
    return max(free)


def most_held(row: tuple[Action, ...]) -> int:
    """The most microbatches in flight; during a pair the forward's is there, and so is the backward's."""
    held, most = 0, 0
    for action in row:
        held += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
        most = max(most, held)
    return most


@pytest.mark.parametrize("name", [ONE, V])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_rows_of_all_sizes_are_steps_that_end(name: str, ranks: int, microbatches: int) -> None:
    schedule = built(name, ranks, microbatches)
    check_waits(schedule, *edges(schedule))
    lowered = lower(schedule, *edges(schedule))
    check(lowered, *edges(schedule))
    work_s = sum(SECONDS[action.kind] for action in schedule.actions[0])
    assert played_s(schedule) >= work_s
    assert pairs(lowered) == pairs(schedule)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_what_one_stage_on_a_rank_holds_and_pairs(ranks: int, microbatches: int) -> None:
    schedule = built(ONE, ranks, microbatches)
    for rank, row in enumerate(schedule.actions):
        ahead = 2 * (ranks - rank) - 1
        assert len(pairs(schedule)[rank]) == max(0, microbatches - ahead)
        assert most_held(row) == min(microbatches, ahead + 1)
        assert most_held(row) == family_of(ONE).in_flight(ranks - rank, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [s for s in SIZES if s[1] >= 2 * s[0]])
def test_what_a_v_holds_and_pairs(ranks: int, microbatches: int) -> None:
    """Both stages of a rank together hold 2 p + 1 microbatches at most."""
    schedule = built(V, ranks, microbatches)
    for rank, row in enumerate(schedule.actions):
        behind, own = ranks - 1 - rank, pairs(schedule)[rank]
        assert len(own) == 2 * (microbatches - 2 * ranks + rank + 1) - (behind == 0) + behind
        assert most_held(row) <= 2 * ranks + 1
        assert all({f.stage, b.stage} == {rank, 2 * ranks - 1 - rank} for f, b in own)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 12), (8, 20)])
def test_pairs_of_a_v_run_at_one_time_on_all_ranks(ranks: int, microbatches: int) -> None:
    """What pairs hide shortens the step by nearly all of it: no rank waits for another one's pairs."""
    schedule, hidden_s = built(V, ranks, microbatches), 0.75
    fewest = min(map(len, pairs(schedule)))
    saved_s = played_s(schedule) - played_s(schedule, hidden_s)
    assert saved_s >= hidden_s * fewest - 1e-9


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 12), (8, 24)])
def test_pairs_of_one_stage_on_a_rank_follow_each_other(ranks: int, microbatches: int) -> None:
    """What a pair hides comes off for each pair of the rank that has fewest."""
    schedule, hidden_s = built(ONE, ranks, microbatches), 0.75
    saved_s = played_s(schedule) - played_s(schedule, hidden_s)
    assert saved_s >= hidden_s * min(map(len, pairs(schedule))) - 1e-9


@pytest.mark.parametrize(("ranks", "microbatches"), [s for s in SIZES if s[1] >= 2 * s[0]])
def test_a_v_is_that_of_torch(ranks: int, microbatches: int) -> None:
    """Action by action, with its pairs; torch writes schedules of at least 2 p microbatches."""
    theirs: Any = object.__new__(ScheduleDualPipeV)
    theirs.pp_group_size, theirs._n_microbatches = ranks, microbatches
    for rank, row in enumerate(built(V, ranks, microbatches).actions):
        expected = [a.sub_actions or (a,) for a in theirs._calculate_single_rank_operations(rank)]
        assert [tuple(map(str, cell)) for cell in together(row)] == [tuple(map(str, c)) for c in expected]


def test_the_picture_of_two_ranks() -> None:
    assert built(ONE, 2, 5).to_csv() == (
        "0F0,0F1,0F2,(0F3;0B0)OVERLAP_F_B,(0F4;0B1)OVERLAP_F_B,0B2,0B3,0B4\n"
        "1F0,(1F1;1B0)OVERLAP_F_B,(1F2;1B1)OVERLAP_F_B,(1F3;1B2)OVERLAP_F_B,(1F4;1B3)OVERLAP_F_B,1B4\n"
    )
    assert built(V, 1, 3).to_csv() == (
        "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,(0F2;1B1)OVERLAP_F_B,(1F2;0B1)OVERLAP_F_B,1B2,0I2,0W2\n"
    )


def test_sends_of_a_pair_leave_behind_it() -> None:
    text = lower(built(ONE, 2, 4), frozenset({(0, 1)}), frozenset({(1, 0)})).to_csv()
    assert "0RECV_B0,0F2,0SEND_F2,0RECV_B1,(0F3;0B0)OVERLAP_F_B,0SEND_F3,0RECV_B2,0B1" in text.replace(
        "0RECV_B0,0RECV_B1", "0RECV_B0"
    )


@pytest.mark.parametrize("name", [ONE, V])
def test_what_is_written_is_read_as_it_was(name: str) -> None:
    schedule = built(name, 3, 8)
    again = read(written(schedule), name)
    assert again == schedule
    assert pairs(again) == pairs(schedule)
    assert Schedule.from_csv(lower(schedule, *edges(schedule)).to_csv(), name).compute() == schedule


@pytest.mark.parametrize("name", [ONE, V])
@pytest.mark.parametrize("microbatches", range(1, 9))
def test_a_step_of_fewer_microbatches_is_valid(name: str, microbatches: int) -> None:
    fewer = first(built(name, 2, 8), microbatches)
    check_waits(fewer, *edges(fewer))
    for own in pairs(fewer):
        assert all(f.microbatch > b.microbatch for f, b in own)


def test_a_v_has_two_stages_on_a_rank_or_one() -> None:
    assert [stages for stages in range(1, 13) if family_of(V).allows(stages, 3)] == [3, 6]
    assert built(ONE, 3, 9).actions == build(V, 3, 9).actions


@pytest.mark.parametrize("cell", ["(0F0;0B0)OVERLAP_F_B", "(0B1;0F0)OVERLAP_F_B", "(0F1;1W0)OVERLAP_F_B"])
def test_a_pair_is_a_forward_and_a_backward_of_another_microbatch(cell: str) -> None:
    with pytest.raises(ValueError, match="a forward overlaps with a backward of another microbatch"):
        parse_row(f"0F0,{cell}")


def test_a_cell_that_is_wrong_within_a_pair_is_named() -> None:
    with pytest.raises(InvalidSchedule, match="cell 2 of 2"):
        read(("0F0,(0F1;0X0)OVERLAP_F_B",))


def test_a_pair_waits_for_what_both_need() -> None:
    """A rank that wants microbatch 2 before it returns the gradient of 0 waits in a circle, unless they run
    apart.
    """
    good = ("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2")
    bad = ("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2", "1F0,1F1,1F2,1B0,1B1,1B2")
    down, up = frozenset({(0, 1)}), frozenset({(1, 0)})
    check_waits(read(good), down, up)
    check(lower(read(good), down, up), down, up)
    apart = read(tuple(row.replace("(0F2;0B0)OVERLAP_F_B", "0F2,0B0") for row in bad))
    check_waits(apart, down, up)
    for checked in (lambda s: check_waits(s, down, up), lambda s: check(lower(s, down, up), down, up)):
        check_compute(read(bad))
        with pytest.raises(InvalidSchedule):
            checked(read(bad))
