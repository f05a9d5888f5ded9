"""Problem: which two neighbouring actions of a rank should swap places, so that the step gets shorter?

Only a change on the critical path can help, and there only of actions that wait for the one before them on
their rank (van Laarhoven, Aarts and Lenstra, Operations Research 40(1), 1992). One pair at a time, the first
that helps, until none does or CHANGES have been tried. A stage's microbatches keep their order, and the rank
keeps its room.
Complexity: O(CHANGES x actions). Oracle: tests/unit/schedules/test_compose.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Final, final

from outsize.ir.schedule import Action, Kind, Schedule
from outsize.schedules.job import Job

# How many exchanges are tried, and the number of actions above which none is.
CHANGES: Final = 400
MOST: Final = 600
SAME: Final = 1 + 1e-9


@final
@dataclass(frozen=True)
class Composed:
    """A compute-only schedule, and the seconds of its step where messages do not queue."""

    schedule: Schedule
    step_s: float


def played_s(job: Job, schedule: Schedule) -> float:
    """Returns the seconds of a step where messages do not queue; infinite for a schedule that hangs."""
    return Played(job, schedule.actions).step_s


def most_bytes(job: Job, schedule: Schedule) -> list[int]:
    """Returns the most bytes that each rank holds of microbatches in flight."""
    return [max(accumulate(job.change(action) for action in row)) for row in schedule.actions]


def improved(job: Job, original: Composed) -> Composed:
    """Swaps neighbours on the critical path, one pair at a time, as long as the step gets shorter."""
    rows = [list(row) for row in original.schedule.actions]
    if sum(map(len, rows)) > MOST:
        return original
    played, tried = Played(job, rows), 0
    improving = True
    while improving and tried < CHANGES:
        improving = False
        for rank, place in played.exchanges():
            if not _may_change(job, rank, rows[rank], place):
                continue
            tried += 1
            _exchange(rows[rank], place)
            exchanged = Played(job, rows)
            if exchanged.step_s < played.step_s / SAME:
                played, improving = exchanged, True
                break
            _exchange(rows[rank], place)
            if tried >= CHANGES:
                break
    actions = tuple(map(tuple, rows))
    return Composed(
        Schedule(original.schedule.name, job.microbatches, actions), min(played.step_s, original.step_s)
    )


def _exchange(row: list[Action], place: int) -> None:
    row[place - 1], row[place] = row[place], row[place - 1]


def _may_change(job: Job, rank: int, row: Sequence[Action], place: int) -> bool:
    """Tells whether the two neighbours may swap.

    They may not when this changes the order of a stage's microbatches, when one needs the other, or when the
    rank has no room for it.
    """
    first, second = row[place - 1], row[place]
    if first.stage == second.stage and (
        first.microbatch == second.microbatch or _adds(first.kind) & _adds(second.kind)
    ):
        return False
    if second.kind is not Kind.F or first.kind is Kind.F:
        return True
    used = sum(job.change(action) for action in row[: place - 1])
    return used + job.held[second.stage] <= job.room[rank]


def _adds(kind: Kind) -> int:
    """Returns the orders that an action is part of, as bits: forwards, input gradients, weight gradients."""
    return {Kind.F: 1, Kind.I: 2, Kind.W: 4, Kind.B: 6}[kind]


@final
@dataclass(eq=False)
class Played:
    """The rows with the times of their actions; `step_s` is infinite where they hang."""

    job: Job
    rows: Sequence[Sequence[Action]]
    step_s: float = 0.0
    _end: dict[Action, float] = field(default_factory=dict[Action, float])
    _late: dict[Action, tuple[int, int] | Action | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        next_place, free = [0] * len(self.rows), [0.0] * len(self.rows)
        advancing = True
        while advancing:
            advancing = False
            for rank, row in enumerate(self.rows):
                while next_place[rank] < len(row) and self._run(rank, next_place[rank], free):
                    next_place[rank], advancing = next_place[rank] + 1, True
        done = all(place == len(row) for place, row in zip(next_place, self.rows, strict=True))
        self.step_s = max(free) if done else inf

    def _run(self, rank: int, place: int, free: list[float]) -> bool:
        """Runs an action; returns False while an action that it needs has not run."""
        action = self.rows[rank][place]
        start, late = free[rank], (rank, place) if place else None
        for other, seconds in self._needs(action):
            if other not in self._end:
                return False
            if self._end[other] + seconds > start:
                start, late = self._end[other] + seconds, other
        self._late[action] = late
        self._end[action] = free[rank] = start + self.job.costs[action.stage].seconds(action.kind)
        return True

    def _needs(self, action: Action) -> Iterator[tuple[Action, float]]:
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind is Kind.F:
            for source, seconds in self.job.before_forward[stage]:
                yield Action(source, Kind.F, microbatch), seconds
        elif kind is not Kind.W:
            yield Action(stage, Kind.F, microbatch), 0.0
            for source, seconds in self.job.before_backward[stage]:
                yield Action(source, kind, microbatch), seconds
        else:
            yield Action(stage, Kind.I, microbatch), 0.0

    def exchanges(self) -> Iterator[tuple[int, int]]:
        """Yields (rank, place) of actions on the critical path that wait for the action before them on
        their rank.
        """
        if self.step_s == inf:
            return
        action: Action | None = max(self._end, key=self._end.__getitem__)
        while action is not None:
            late = self._late[action]
            if isinstance(late, tuple):
                yield late
                action = self.rows[late[0]][late[1] - 1]
            else:
                action = late
