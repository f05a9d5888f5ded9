"""Whose message an action waits for, by the schedule."""

from __future__ import annotations

from outsize.ir.schedule import Schedule
from outsize.ops.watchdog.waits import Wait, awaited

ROWS = "0F0,0SEND_F0,0F1,0SEND_F1@2,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0,1W0\n2RECV_F1@0,2F1\n"
SCHEDULE = Schedule.from_csv(ROWS)


def test_a_forward_waits_for_the_send_of_its_receive() -> None:
    assert awaited(SCHEDULE, 1, 1, lacks_messages=True) == (Wait("1RECV_F0", "0SEND_F0", 0),)
    assert awaited(SCHEDULE, 2, 1, lacks_messages=True) == (Wait("2RECV_F1@0", "0SEND_F1@2", 0),)


def test_a_backward_waits_for_a_gradient() -> None:
    assert awaited(SCHEDULE, 0, 5, lacks_messages=True) == (Wait("0RECV_B0", "1SEND_B0", 1),)


def test_an_action_that_has_its_messages_waits_for_nobody() -> None:
    assert awaited(SCHEDULE, 1, 1, lacks_messages=False) == ()
    assert awaited(SCHEDULE, 1, 4, lacks_messages=True) == ()


def test_sends_wait_for_who_takes_them_also_at_the_end_of_the_row() -> None:
    assert awaited(SCHEDULE, 0, 3, lacks_messages=False) == (Wait("0SEND_F1@2", "2RECV_F1@0", 2),)
    assert [wait.rank for wait in awaited(SCHEDULE, 0, 6, lacks_messages=False)] == [1, 2]
