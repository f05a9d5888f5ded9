"""Derives from a schedule whose messages an action waits for.

0F1 waits for what 0RECV_F1 has posted, which 1SEND_F1@0 of the rank of stage 1 sends
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from outsize.ir.schedule import Action, Kind, Schedule

POSTED: Final = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
_OTHER_END: Final = {
    Kind.RECV_F: Kind.SEND_F,
    Kind.RECV_B: Kind.SEND_B,
    Kind.SEND_F: Kind.RECV_F,
    Kind.SEND_B: Kind.RECV_B,
}


@final
@dataclass(frozen=True, slots=True)
class Wait:
    """The transfer `own` of a rank and its other end, the transfer `other` of rank `rank`."""

    own: str
    other: str
    rank: int


def awaited(schedule: Schedule, rank: int, at: int, *, lacks_messages: bool) -> tuple[Wait, ...]:
    """Returns the transfers that hold up action `at` of a rank; past the row's end, all of its sends.

    An action that has its messages waits for nobody, unless it sends.
    """
    row = schedule.actions[rank]
    if at >= len(row):
        return tuple(wait_of(schedule, a) for a in row if a.kind in (Kind.SEND_F, Kind.SEND_B))
    action = row[at]
    if action.kind in (Kind.SEND_F, Kind.SEND_B):
        return (wait_of(schedule, action),)
    posted = POSTED.get(action.kind)
    if posted is None or not lacks_messages:
        return ()
    place = (posted, action.stage, action.microbatch)
    return tuple(wait_of(schedule, a) for a in row[:at] if (a.kind, a.stage, a.microbatch) == place)


def wait_of(schedule: Schedule, own: Action) -> Wait:
    """Returns a transfer of a rank with its other end."""
    other = Action.transfer(own.peer, _OTHER_END[own.kind], own.microbatch, own.stage)
    return Wait(str(own), str(other), schedule.rank_of[own.peer])
