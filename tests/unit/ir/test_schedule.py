"""The text grammar of actions, and schedules as CSV."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.ir.schedule import NO_MICROBATCH, TRANSFER, Action, Kind, Schedule

KINDS = st.sampled_from(list(Kind))


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind, stage = draw(KINDS), draw(st.integers(0, 99))
    microbatch = -1 if kind in NO_MICROBATCH else draw(st.integers(0, 999))
    peer = draw(st.integers(0, 99).filter(lambda p: p != stage)) if kind in TRANSFER else -1
    return Action(stage, kind, microbatch, peer)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(actions())
def test_every_action_is_read_as_it_was_written(action: Action) -> None:
    assert Action.parse(str(action)) == action


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.lists(actions(), min_size=1, max_size=6), min_size=1, max_size=4))
def test_csv_round_trip(rows: list[list[Action]]) -> None:
    schedule = Schedule("x", 1, tuple(tuple(row) for row in rows))
    assert Schedule.from_csv(schedule.to_csv()).actions == schedule.actions


def test_neighbours_need_no_name_and_others_do() -> None:
    assert str(Action(0, Kind.SEND_F, 3, 1)) == "0SEND_F3"
    assert str(Action(0, Kind.SEND_F, 3, 2)) == "0SEND_F3@2"
    assert Action.parse("2RECV_F1") == Action(2, Kind.RECV_F, 1, 1)
    assert Action.parse("0RECV_B1") == Action(0, Kind.RECV_B, 1, 1)


@pytest.mark.parametrize("text", ["F0", "0X1", "0F", "0UNSHARD3", "0F1@2", "0SEND_B1", "1SEND_F0@1", ""])
def test_nonsense_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=repr(text).replace("(", r"\(")):
        Action.parse(text)


def test_torch_idle_cells_are_skipped() -> None:
    schedule = Schedule.from_csv("0F0,,0B0\n,1F0,1B0\n")
    assert [[str(a) for a in row] for row in schedule.actions] == [["0F0", "0B0"], ["1F0", "1B0"]]
    assert schedule.microbatches == 1
    assert schedule.rank_of == {0: 0, 1: 1}
