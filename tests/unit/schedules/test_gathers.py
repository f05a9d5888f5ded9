"""Where weights are whole: each row played with what it has gathered."""

from __future__ import annotations

from collections import Counter

import pytest

from outsize.ir.schedule import COMPUTE, NO_MICROBATCH, Action, Kind, Schedule, parse_row
from outsize.schedules.builders import build
from outsize.schedules.lower import lower
from outsize.schedules.sharded import (
    end_of_forwards,
    with_gathers,
    with_gathers_of_call,
    with_reductions,
)

BACKWARD = {Kind.B, Kind.W}
LOADS = {Kind.LOAD, Kind.UNLOAD}


def in_a_row(stages: int, microbatches: int) -> Schedule:
    """All stages on one rank, microbatch after microbatch."""
    row = "".join(
        f"{s}F{m}," for m in range(microbatches) for s in range(stages)
    )  # forwards first, so that stages come round again
    row += ",".join(f"{s}B{m}" for m in range(microbatches) for s in reversed(range(stages)))
    return Schedule("custom", microbatches, (parse_row(row),))


def test_one_stage_ahead_is_gathered_and_what_is_not_next_is_given_up() -> None:
    row = parse_row("0F0,1F0,2F0,2B0,1B0,0B0")
    found = with_gathers(Schedule("custom", 1, (row,)), {(s, s) for s in range(3)})
    assert ",".join(map(str, found.actions[0])) == (
        "0UNSHARD,1UNSHARD,0F0,0RESHARD,2UNSHARD,1F0,1RESHARD,2F0,1UNSHARD,2B0,2REDUCE_GRAD,2RESHARD,"
        "0UNSHARD,1B0,1REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,0RESHARD"
    )


def test_a_stage_is_reduced_behind_its_last_backward_and_what_that_sends() -> None:
    row = parse_row("1F0,3F0,3B0,3SEND_B0,1I0,1SEND_B0,1W0")
    found = with_reductions(Schedule("custom", 1, (row,))).actions[0]
    assert ",".join(map(str, found)) == "1F0,3F0,3B0,3SEND_B0,3REDUCE_GRAD,1I0,1SEND_B0,1W0,1REDUCE_GRAD"
    forwards = with_reductions(Schedule("custom", 1, (parse_row("0F0,1F0"),))).actions[0]
    assert all(action.kind is not Kind.REDUCE_GRAD for action in forwards)


def test_once_a_step_what_is_gathered_stays_until_its_last_backward() -> None:
    row = parse_row("0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1")
    found = with_gathers(Schedule("custom", 2, (row,)), {(s, s) for s in range(2)}, once=True)
    assert ",".join(map(str, found.actions[0])) == (
        "0UNSHARD,1UNSHARD,0F0,1F0,1B0,0B0,0F1,1F1,1B1,1REDUCE_GRAD,1RESHARD,0B1,0REDUCE_GRAD,0RESHARD"
    )


def test_once_a_step_forwards_alone_reduce_nothing() -> None:
    row = parse_row("0F0,1F0,0F1,1F1")
    found = with_gathers(Schedule("custom", 2, (row,)), {(s, s) for s in range(2)}, once=True)
    text = ",".join(map(str, found.actions[0]))
    assert text == "0UNSHARD,1UNSHARD,0F0,1F0,0F1,0RESHARD,1F1,1RESHARD"


def test_a_call_gathers_for_its_forwards_and_again_for_its_backwards() -> None:
    """The picture of with_gathers_of_call, and one of two stages, the first of which sends."""
    row = parse_row("0F0,0F1,0B1,0B0")
    for once in (False, True):
        found = with_gathers_of_call(Schedule("custom", 2, (row,)), {(0, 0)}, once=once)
        text = ",".join(map(str, found.actions[0]))
        assert text == "0UNSHARD,0F0,0F1,0RESHARD,0UNSHARD,0B1,0B0,0RESHARD"
        assert end_of_forwards(found.actions[0]) == 4
    two = Schedule("custom", 1, (parse_row("0F0,0SEND_F0,2F0,2B0,0RECV_B0,0B0"), parse_row("1F0,1B0")))
    found = with_gathers_of_call(two, {(0, 0), (2, 2)}).actions[0]
    assert ",".join(map(str, found)) == (
        "0UNSHARD,2UNSHARD,0F0,0SEND_F0,0RESHARD,2F0,2RESHARD,"
        "2UNSHARD,0UNSHARD,2B0,2RESHARD,0RECV_B0,0B0,0RESHARD"
    )
    assert end_of_forwards(found) == 7


def test_stages_without_weights_of_their_own_move_none() -> None:
    found = with_gathers(Schedule("custom", 1, (parse_row("0F0,1F0,1B0,0B0"),)), {(1, 1)})
    assert [str(a) for a in found.actions[0] if a.kind in NO_MICROBATCH] == [
        "1UNSHARD",
        "1REDUCE_GRAD",
        "1RESHARD",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "in a row"])
@pytest.mark.parametrize("ties", [(), ((0, 3),)])
@pytest.mark.parametrize("once", [False, True])
def test_every_action_has_the_weights_that_it_uses(
    name: str, ties: tuple[tuple[int, int], ...], once: bool
) -> None:
    ranks = {"interleaved": 2, "zero-bubble-v": 2, "in a row": 1}.get(name, 4)
    plain = in_a_row(4, 3) if name == "in a row" else build(name, 4, 4, ranks)
    edges = frozenset((s, s + 1) for s in range(3))
    lowered = lower(plain, edges, frozenset((b, a) for a, b in edges))
    uses = {(s, s) for s in range(4)} | set(ties)
    found = with_gathers(lowered, uses, once=once)
    assert [[a for a in row if a.kind not in NO_MICROBATCH] for row in found.actions] == [
        list(row) for row in lowered.actions
    ]
    for row in found.actions:
        insist(row, {(o, u) for o, u in uses if plain.rank_of[o] == plain.rank_of[u]}, once)
        if once:
            own = {a.stage for a in row}
            moves = Counter(a for a in row if a.kind in NO_MICROBATCH)
            assert moves == Counter(Action(s, kind) for s in own for kind in NO_MICROBATCH - LOADS)


def insist(row: tuple[Action, ...], uses: set[tuple[int, int]], once: bool) -> None:
    whole, dirty = set[int](), set[int]()
    for action in row:
        stage, kind = action.stage, action.kind
        if kind is Kind.UNSHARD:
            assert stage not in whole
            whole.add(stage)
        elif kind is Kind.REDUCE_GRAD:
            dirty.remove(stage)
        elif kind is Kind.RESHARD:
            assert stage not in dirty
            whole.remove(stage)
        elif kind in COMPUTE:
            assert {o for o, u in uses if u == stage} <= whole
            assert once or len(whole) <= (2 if len(uses) <= 4 else 4)
            dirty |= {stage} if kind in BACKWARD else set()
    assert not whole
    assert not dirty
