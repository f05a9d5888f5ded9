"""Performs SHOW and VERIFY: who shows which work in a step, and who repeats it.

                SHOW sends                                     VERIFY repeats
    replicas    its own work to the next replica               that of the replica before it
    one         the work of a part of one of its stages        that of rank p - 1, with its weights
    pipeline    (division.py), and the weights of that part,
                to rank p + 1, the last one to the first

A `VerifiedTurn` is one such turn: a stage of this rank and one that it repeats, with a microbatch. Rows of
actions are made once for each, as for other actions, so a step that is verified walks its list like any other
one, and a step that is not knows nothing of this. Which part of the stage is shown changes no row: its record
names it.
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
from outsize.run.verified.stage_in_parts import StageInParts
from outsize.schedules.job import StageCost
from outsize.schedules.verified import Check, step_s, with_checks
from outsize.train.context.run_context import RunContext, stages_on
from outsize.train.variants.variant import Variant
from outsize.train.verify.division import DividedVariant

# A backward takes twice as long as a forward, where no plan says it.
UNPRICED: Final = StageCost(1.0, 2.0)


@final
@dataclass(frozen=True, eq=False)
class VerifyingRank:
    """Lets a rank take part in turns of verification: make a stage of a divided variant for the step, show
    and verify. `divided` returns the divided variant of a microbatch of the running step.
    """

    make: Callable[[Variant, int], RunnableStage]
    divided: Callable[[int], DividedVariant]
    show: Callable[[], None]
    verify: Callable[[], None]
    record: WorkRecord = field(default_factory=WorkRecord)


@final
@dataclass(eq=False)
class VerifiedTurn:
    """One turn of verification: what each rank of the pipeline shows, and what happens on this rank."""

    checks: tuple[Check, ...]
    own: Check
    costs: tuple[StageCost, ...]
    rank: VerifyingRank
    run: RunContext
    number_s: float = 0.0  # What one number from all ranks to all takes.
    added: float | None = None  # Which share of a step is added, as it is simulated.

    @property
    def key(self) -> Hashable:
        """Returns what tells this turn from others of the run, also from those of a verification before."""
        return self.checks, self.rank

    def shown(self, stage: RunnableStage, number: int, microbatch: int) -> RunnableStage:
        """Returns the stage, which notes its work if it is the one that is shown."""
        if (number, microbatch) != (self.own.stage, self.own.microbatch):
            return stage
        rank, model = self.rank, self.run.whole
        divided = rank.divided(microbatch)
        if not divided.has_parts:
            return ShownStage(stage, model, rank.record)
        numbers = divided.parts[number]
        parts = [rank.make(divided.variant, part) for part in numbers]
        return StageInParts(stage, parts, numbers[0], model, rank.record)

    def moves(self, inner: Moves) -> Moves:
        """Returns the moves of a step together with what is shown and verified."""
        return _VerifyingMoves(inner, self)


def shown_in_turn(run: RunContext, turn: int, each: Sequence[DividedVariant]) -> tuple[int, list[int]]:
    """Returns the microbatch that a turn shows, and the part that each rank of the pipeline does.

    `each` are the divided variants of the step's microbatches. Each rank shows its parts one after the other,
    and with each round other microbatches.
    """
    most = round_of(run, each[0])
    microbatch = (turn % most + turn // most) % len(each)
    return microbatch, [of_rank[turn % len(of_rank)] for of_rank in _parts_by_rank(run, each[microbatch])]


def round_of(run: RunContext, divided: DividedVariant) -> int:
    """Returns after how many turns each rank has shown all of its parts."""
    return max(map(len, _parts_by_rank(run, divided)))


def _parts_by_rank(run: RunContext, divided: DividedVariant) -> list[list[int]]:
    each = (stages_on(run.plan, rank) for rank in range(run.plan.axes.pp))
    return [[part for stage in stages for part in divided.parts[stage]] for stages in each]


def checks_of(
    run: RunContext, divided: DividedVariant, microbatch: int, parts: Sequence[int]
) -> tuple[Check, ...]:
    """Returns what ranks of a pipeline check of each other, where each shows a part."""
    ranks, replicated = run.plan.axes.pp, run.replicas.count > 1
    stages = [divided.stage_of(part) for part in parts]
    return tuple(
        Check(stage, microbatch, rank if replicated else (rank + 1) % ranks)
        for rank, stage in enumerate(stages)
    )


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
        before_s = step_s(before, place.costs)
        place.added = (step_s(with_them, place.costs) + place.number_s) / before_s - 1
        return with_them

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        if row[at].kind not in VERIFICATION:
            return self._inner.action(row, at)
        rank = self._place.rank
        return rank.show if row[at].kind is Kind.SHOW else rank.verify

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        return self._inner.arrival(row, at)
