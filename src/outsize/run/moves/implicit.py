"""Runs copies around compute actions without an action of the schedule that names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from outsize.ir.schedule import COMPUTE, Action, Schedule
from outsize.run.moves.base import Moves
from outsize.run.stage.cut import Cut

Move = Callable[[], None]
# The arguments are the compute actions before, at and after the present position; the result is what moves.
Steps = Callable[[Action | None, Action, Action | None], list[Move]]


@final
class ImplicitMoves(Moves):
    """Adds copies around compute actions to the moves of a rank."""

    def __init__(self, moves: Moves, steps: Steps) -> None:
        self._moves, self._steps = moves, steps

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        return self._moves.scheduled(schedule, cut)

    def action(self, row: Sequence[Action], at: int) -> Move:
        return self._moves.action(row, at)

    def arrival(self, row: Sequence[Action], at: int) -> Move | None:
        other = self._moves.arrival(row, at)
        before, after = _compute(row, range(at - 1, -1, -1)), _compute(row, range(at + 1, len(row)))
        steps = [*([other] if other is not None else []), *self._steps(before, row[at], after)]

        def run() -> None:
            for step in steps:
                step()

        return run if steps else None


def _compute(row: Sequence[Action], places: range) -> Action | None:
    """Returns the first compute action among these positions of a row."""
    return next((row[n] for n in places if row[n].kind in COMPUTE), None)
