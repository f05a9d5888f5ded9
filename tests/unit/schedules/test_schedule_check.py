"""The checker: every kind of fault is named with its cell, and an independent oracle agrees."""

from __future__ import annotations

import random
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.schedules.builders import build
from outsize.schedules.check import check, check_compute
from outsize.schedules.families import built
from outsize.schedules.lower import lower

DOWN, UP = frozenset({(0, 1)}), frozenset({(1, 0)})
GOOD = """\
0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1
1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1
"""


def fault(csv: str) -> str:
    with pytest.raises(InvalidSchedule) as caught:
        check(Schedule.from_csv(csv), DOWN, UP)
    return str(caught.value)


def edit(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def test_good_schedule_passes() -> None:
    assert lower(build("gpipe", 2, 2), DOWN, UP).to_csv() == GOOD
    check(Schedule.from_csv(GOOD), DOWN, UP)


@pytest.mark.parametrize(
    ("csv", "what", "cell"),
    [
        (edit(",0B1", ""), "0B1 is missing", "(end)"),
        (edit("1F0,1F1", "1F0,1F1,1F0"), "1F0 appears twice; rank 1, cell 5 of 9", "1F0"),
        (edit("0SEND_F1,", "0SEND_F1,0SEND_F1,"), "0SEND_F1 appears twice", "0SEND_F1"),
        (edit("1F0,1F1", "1F1,1F0"), "1F0 runs after 1F1; rank 1, cell 4 of 8", "1F0"),
        (edit("0B0,0B1", "0B1,0B0"), "0B0 runs after 0B1", "0B0"),
        (edit("1F1,1B0,1SEND_B0,1B1", "1B0,1SEND_B0,1B1,1F1"), "1B1 runs before 1F1", "1B1"),
        (edit("0F1,", "").replace("1F1,", "1F1,0F1,"), "stage 0 acts on ranks 0 and 1", "0F1"),
        (edit("1RECV_F1,", ""), "1F1 needs 1RECV_F1, which is missing", "1F1"),
        (edit("1RECV_F0,1RECV_F1,1F0", "1RECV_F1,1F0,1RECV_F0"), "1F0 needs 1RECV_F0, which", "1F0"),
        (edit("0F1,0SEND_F1", "0SEND_F1,0F1"), "0SEND_F1 needs 0F1, which comes after", "0SEND_F1"),
        (edit("0SEND_F1,", ""), "1RECV_F1 has no 0SEND_F1", "1RECV_F1"),
        (GOOD.replace(",0B0", ",0SEND_F1@5,0B0"), "0SEND_F1@5 has no 5RECV_F1@0", "0SEND_F1@5"),
        (edit("1RECV_F0,1RECV_F1", "1RECV_F1,1RECV_F0"), "1RECV_F1 where rank 0 sends 0SEND_F0", "1RECV_F1"),
    ],
)  # fmt: skip
def test_fault_is_named_with_its_cell(csv: str, what: str, cell: str) -> None:
    message = fault(csv)
    assert what in message.splitlines()[0]
    assert ". Next: " in message.splitlines()[0]
    assert message.count("<-- HERE") == 1
    assert f" {cell} <-- HERE" in message


def test_whole_message() -> None:
    assert fault(edit("1F0,1F1", "1F1,1F0")) == (
        "InvalidSchedule [E301]: 1F0 runs after 1F1; rank 1, cell 4 of 8; gradients accumulate in "
        "microbatch order. Next: put it before 1F1\n"
        "cell   1        2        3        4            5        6        7\n"
        "rank 0 0F0      0SEND_F0 0RECV_B0 0F1          0SEND_F1 0RECV_B1 0B0\n"
        "rank 1 1RECV_F0 1RECV_F1 1F1      1F0 <-- HERE 1B0      1SEND_B0 1B1"
    )


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ("0F0,0F1,0F2,0F3,0B1,0B0,0B3,0B2", ""),
        ("0F0,0F1,0B1,0F2,0B0,0F3,0B3,0B2", ""),
        ("0F0,0F1,0F2,0F3,0B0,0B1,0B3,0B2", "0B1 runs after 0B0"),
        ("0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0", "0B1 runs after 0B2"),
        ("0F1,0F0,0F2,0F3,0B1,0B0,0B3,0B2", "0F0 runs after 0F1"),
        ("0F0,0B0,0F1,0B1,0F2,0F3,0B3,0B2", "0B1 runs after 0B0"),
        ("0F0,0F1,0F2,0B1,0B0,0B2", "none of whole microbatches"),
    ],
)
def test_slices_go_back_from_the_last_one_of_their_microbatch(rows: str, what: str) -> None:
    found = Schedule.from_csv(rows)
    schedule = Schedule("custom", found.microbatches, found.actions, slices=2)
    if not what:
        check_compute(schedule)
        return
    with pytest.raises(InvalidSchedule, match=what):
        check_compute(schedule)


def test_deadlock_names_every_wait() -> None:
    circle = (
        "0RECV_B0,0F0,0B0,0SEND_F0\n"  # sends its activations only behind its backward
        "1RECV_F0,1F0,1B0,1SEND_B0\n"
    )
    message = fault(circle)
    assert "the schedule deadlocks; rank 0, cell 3 of 4" in message
    assert "rank 0 waits in 0B0 for 1SEND_B0, rank 1 waits in 1F0 for 0SEND_F0" in message
    assert "0B0 <-- HERE" in message


def test_transfers_nobody_asked_for() -> None:
    lowered = lower(build("gpipe", 3, 1), frozenset({(0, 1), (1, 2), (0, 2)}), frozenset({(2, 1), (1, 0)}))
    with pytest.raises(InvalidSchedule, match=r"0SEND_F0@2 moves nothing; .*no edge 0 -> 2"):
        check(lowered, frozenset({(0, 1), (1, 2)}), frozenset({(2, 1), (1, 0)}))


def test_microbatch_beyond_the_step() -> None:
    schedule = Schedule("custom", 1, Schedule.from_csv("0F0,0B0,0F1,0B1\n").actions)
    with pytest.raises(InvalidSchedule, match="0F1 names a microbatch that the step does not have"):
        check_compute(schedule)


def test_stage_left_out() -> None:
    with pytest.raises(InvalidSchedule, match="1F0 is missing"):
        check_compute(Schedule.from_csv("0F0,0B0\n2F0,2B0\n"))


def test_local_edges_need_the_order_alone() -> None:
    check(Schedule.from_csv("0F0,1F0,1B0,0B0\n"), DOWN, UP)
    with pytest.raises(InvalidSchedule, match="1F0 needs 0F0, which comes after it"):
        check(Schedule.from_csv("1F0,0F0,1B0,0B0\n"), DOWN, UP)


Edges = frozenset[tuple[int, int]]


@pytest.mark.parametrize("name", built())
@settings(max_examples=60, deadline=None, derandomize=True)
@given(stages=st.integers(2, 4), microbatches=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_any_random_dag_of_edges_lowers_to_a_valid_schedule(
    name: str, stages: int, microbatches: int, seed: int
) -> None:
    schedule, *edges = _random_lowered(name, stages, microbatches, random.Random(seed))
    check(schedule, *edges)


@pytest.mark.parametrize("change", ["swap", "move", "drop"])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(name=st.sampled_from(built()), seed=st.integers(0, 10_000))
def test_oracle_agrees_on_edited_schedules(change: str, name: str, seed: int) -> None:
    dice = random.Random(seed)
    good, *edges = _random_lowered(name, dice.randint(2, 3), dice.randint(1, 3), dice)
    edited = _EDITS[change](good, dice)
    assert _passes(edited, *edges) == _oracle(edited, good)


def _random_lowered(
    name: str, stages: int, microbatches: int, dice: random.Random
) -> tuple[Schedule, Edges, Edges, Edges]:
    chain = {(s, s + 1) for s in range(stages - 1)}
    skips = {(a, b) for a in range(stages) for b in range(a + 2, stages) if dice.random() < 0.5}
    back = {(b, a) for a, b in chain | {e for e in skips if dice.random() < 0.5}}
    forward, step = frozenset(chain | set(list(skips)[::2])), frozenset(skips)
    lowered = lower(build(name, stages, microbatches), forward, frozenset(back), step)
    return lowered, forward, frozenset(back), step


def _passes(schedule: Schedule, forward: Edges, backward: Edges, step: Edges) -> bool:
    try:
        check(schedule, forward, backward, step)
    except InvalidSchedule:
        return False
    return True


def _swap(row: list[Action], dice: random.Random) -> None:
    i, j = dice.randrange(len(row)), dice.randrange(len(row))
    row[i], row[j] = row[j], row[i]


def _move(row: list[Action], dice: random.Random) -> None:
    at = dice.randrange(len(row))
    row.insert(max(0, at + dice.choice([-2, -1, 1, 2])), row.pop(at))


def _drop(row: list[Action], dice: random.Random) -> None:
    row.pop(dice.randrange(len(row)))


def _edit(
    schedule: Schedule, dice: random.Random, change: Callable[[list[Action], random.Random], None]
) -> Schedule:
    rows = [list(row) for row in schedule.actions]
    change(rows[dice.randrange(len(rows))], dice)
    return Schedule(schedule.name, schedule.microbatches, tuple(map(tuple, rows)))


_EDITS: dict[str, Callable[[Schedule, random.Random], Schedule]] = {
    "swap": lambda schedule, dice: _edit(schedule, dice, _swap),
    "move": lambda schedule, dice: _edit(schedule, dice, _move),
    "drop": lambda schedule, dice: _edit(schedule, dice, _drop),
}


def _oracle(edited: Schedule, good: Schedule) -> bool:
    """Valid: the same cells as a good schedule, one graph of 'must stand before' without a circle, FIFO.

    Rows are total orders; every law is an edge between two cells, so law and deadlock are one question.
    """
    if [sorted(map(str, row)) for row in edited.actions] != [sorted(map(str, row)) for row in good.actions]:
        return False
    after: dict[Action, set[Action]] = {a: set() for row in edited.actions for a in row}
    for row in edited.actions:
        for first, second in pairwise(row):
            after[second].add(first)
        for action in row:
            _add_laws(action, after)
    try:
        tuple(TopologicalSorter(after).static_order())
    except CycleError:
        return False
    return _fifo(edited)


def _add_laws(action: Action, after: dict[Action, set[Action]]) -> None:
    stage, kind, microbatch, peer = action.stage, action.kind, action.microbatch, action.peer
    if kind in COMPUTE and microbatch:
        after[action].add(Action(stage, kind, microbatch - 1))
    if kind in (Kind.B, Kind.I):
        after[action].add(Action(stage, Kind.F, microbatch))
    if kind is Kind.W:
        after[action].add(Action(stage, Kind.I, microbatch))
    split = Action(stage, Kind.I, microbatch)
    near = split if kind[-1] == "B" and split in after else Action(stage, Kind(kind[-1]), microbatch)
    if kind in (Kind.SEND_F, Kind.SEND_B):
        after[action].add(near)
    if kind in (Kind.RECV_F, Kind.RECV_B):
        after[near] |= {action, Action(peer, Kind(f"SEND_{kind[-1]}"), microbatch, stage)}


def _fifo(schedule: Schedule) -> bool:
    cells = [a for row in schedule.actions for a in row if a.kind not in COMPUTE]
    sends = sorted(
        ((a.stage, a.peer, a.kind[-1]), n, a.microbatch) for n, a in enumerate(cells) if a.kind[0] == "S"
    )
    receives = sorted(
        ((a.peer, a.stage, a.kind[-1]), n, a.microbatch) for n, a in enumerate(cells) if a.kind[0] == "R"
    )
    return [(p, m) for p, _, m in sends] == [(p, m) for p, _, m in receives]
