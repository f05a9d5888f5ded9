"""The pictures themselves."""

from __future__ import annotations

import pytest

from outsize.ir.schedule import Schedule
from outsize.schedules.grid import draw, window


def test_draw_waits_for_neighbours() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1B0\n")
    assert draw(schedule) == "time   0   1   2   3\nrank 0 0F0 .   .   0B0\nrank 1 .   1F0 1B0 ."


def test_draw_leaves_transfers_out() -> None:
    lowered = Schedule.from_csv("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert draw(lowered) == draw(lowered.compute())


def test_draw_refuses_a_circle() -> None:
    with pytest.raises(ValueError, match="deadlocks"):
        draw(Schedule.from_csv("0B0,0F0\n1F0,1B0\n"))


def test_window_marks_one_cell_and_cuts_the_rest() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0F2,0F3,0F4\n1F0,1F1,1F2,1F3,1F4\n")
    assert window(schedule, 1, 3, around=1) == (
        "cell   3   4            5\nrank 0 0F2 0F3          0F4\nrank 1 1F2 1F3 <-- HERE 1F4"
    )


def test_window_one_past_the_end() -> None:
    picture = window(Schedule.from_csv("0F0\n1F0,1B0\n"), 0, 1)
    assert picture == "cell   1   2\nrank 0 0F0 (end) <-- HERE\nrank 1 1F0 1B0"
