"""Performs SHOW and VERIFY: who shows which work in a step, and who repeats it.

                SHOW sends                                     VERIFY repeats
    replicas    its own work to the next replica               that of the replica before it
    one         its own work, and the weights of the stage,    that of rank p - 1, with its weights
    pipeline    to rank p + 1, the last one to the first

A `VerifiedTurn` is one such turn: a stage of this rank and one that it repeats, with a microbatch. Rows of
actions are made once for each, as for other actions, so a step that is verified walks its list like any other
one, and a step that is not knows nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from outsize.ir.schedule import VERIFICATION, Action, Kind, Schedule
from outsize.run.moves.base import Moves
from outsize.run.stage.base import RunnableStage
from outsize.run.stage.cut import Cut
from outsize.run.verified.shown_work import ShownStage, WorkRecord
from outsize.schedules.job import StageCost
from outsize.schedules.verified import Check, step_s, with_checks
from outsize.train.context.run_context import RunContext, stages_on

# A backward takes twice as long as a forward, where no plan says it.
UNPRICED: Final = StageCost(1.0, 2.0)


@final
@dataclass(eq=False)
class VerifiedTurn:
    """One turn of verification: what each rank of the pipeline shows, and what happens on this rank."""

    checks: tuple[Check, ...]
    own: Check
    costs: tuple[StageCost, ...]
    show: Callable[[VerifiedTurn], None]
    verify: Callable[[VerifiedTurn], None]
    run: RunContext
    record: WorkRecord = field(default_factory=WorkRecord)
    added: float | None = None  # Which share of a step is added, as it is simulated.

    @property
    def key(self) -> Hashable:
        """Returns what tells this turn from others of the run."""
        return self.checks

    def shown(self, stage: RunnableStage, number: int, microbatch: int) -> RunnableStage:
        """Returns the stage, which notes its work if it is the one that is shown."""
        if (number, microbatch) != (self.own.stage, self.own.microbatch):
            return stage
        return ShownStage(stage, self.run.whole, self.record)

    def moves(self, inner: Moves) -> Moves:
        """Returns the moves of a step together with what is shown and verified."""
        return _VerifyingMoves(inner, self)


def checks_of_turn(run: RunContext, turn: int, microbatches: int) -> tuple[Check, ...]:
    """Returns what ranks of a pipeline check in a turn: each its stages one after the other, and with each
    round another microbatch.
    """
    ranks, replicated = run.plan.axes.pp, run.replicas.count > 1
    made = []
    for rank in range(ranks):
        stages = stages_on(run.plan, rank)
        microbatch = turn // len(stages) % microbatches
        checker = rank if replicated else (rank + 1) % ranks
        made.append(Check(stages[turn % len(stages)], microbatch, checker))
    return tuple(made)


def costs_of(run: RunContext) -> tuple[StageCost, ...]:
    """Returns the seconds of stages as the plan expects them."""
    expected = run.plan.expected
    if expected is None or len(expected.stages) != len(run.plan.stages):
        return (UNPRICED,) * len(run.plan.stages)
    return tuple(StageCost(s.forward_s, s.backward_s, s.backward_s / 2) for s in expected.stages)


@final
class _VerifyingMoves(Moves):
    """Performs the moves of a step, and SHOW and VERIFY of a turn."""

    def __init__(self, inner: Moves, place: VerifiedTurn) -> None:
        self._inner, self._place = inner, place

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        place, before = self._place, self._inner.scheduled(schedule, cut)
        with_them = with_checks(before, place.checks, place.costs)
        place.added = step_s(with_them, place.costs) / step_s(before, place.costs) - 1
        return with_them

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        if row[at].kind not in VERIFICATION:
            return self._inner.action(row, at)
        place = self._place
        handler = place.show if row[at].kind is Kind.SHOW else place.verify
        return lambda: handler(place)

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        return self._inner.arrival(row, at)
