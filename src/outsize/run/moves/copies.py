"""Adds copies of activations or boundary values, to the host and back, to the moves of a rank's weights.

    2OFFLOAD_F3   what the forward of stage 2 has left of microbatch 3 begins to move to the host
    2FETCH_B3     what the backward of stage 2 needs of microbatch 3 begins to come to the device

schedules/offload.py adds these actions to a row: activations.py says which activations move, and
boundary_values.py which values between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, final

from outsize.ir.schedule import COMPUTE, FETCH, OFFLOAD, Action, Schedule
from outsize.run.moves.base import Moves
from outsize.run.stage.cut import Cut


class ActionCopies(Protocol):
    """Copies what compute actions have left to the host, and what they need to the device."""

    def scheduled(self, schedule: Schedule) -> Schedule:
        """Returns the schedule with the copies as actions."""
        ...

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        """Returns the function that performs `row[at]`, an OFFLOAD or a FETCH."""
        ...

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        """Returns the function that waits for what the compute action `row[at]` needs, or None."""
        ...


@final
class WithCopies(Moves):
    """Performs the moves of weights, and the copies of what computes leave and need."""

    def __init__(self, weights: Moves, copies: ActionCopies) -> None:
        self._weights, self._copies = weights, copies

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        return self._copies.scheduled(self._weights.scheduled(schedule, cut))

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        owner = self._copies if row[at].kind in OFFLOAD | FETCH else self._weights
        return owner.action(row, at)

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        waits = (self._weights.arrival(row, at), self._copies.arrival(row, at))
        both = [wait for wait in waits if wait is not None]
        if len(both) < len(waits):
            return both[0] if both else None

        def arrive() -> None:
            for wait in both:
                wait()

        return arrive


def following_compute(row: Iterable[Action]) -> Action | None:
    """Returns the first compute action of the rest of a row."""
    return next((action for action in row if action.kind in COMPUTE), None)
