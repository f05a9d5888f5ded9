"""Beside: what else moves while a rank computes. No action of the schedule says so; compute actions do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from outsize.ir.schedule import COMPUTE, Action, Schedule
from outsize.run.cut import Cut
from outsize.run.moves import Moves

Move = Callable[[], None]
# The compute action before, the one that begins, and the next one -> what moves.
Steps = Callable[[Action | None, Action, Action | None], list[Move]]


@final
class Beside(Moves):
    """Other moves of a rank, and such steps behind what they wait for."""

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
    """The first action of compute among these places of a row."""
    return next((row[n] for n in places if row[n].kind in COMPUTE), None)
