"""Problem: in which order should these stages on these ranks run their microbatches for a short step?

Stages may be uneven, several on a rank, and form any DAG; a rank has a limit on the bytes of microbatches
in flight; each backward may be whole (B) or split (I, W). This is a job-shop with precedences and storage,
NP-hard (Garey and Johnson 1979), so list schedules are made by several rules, and the best are improved.

    list      whenever a rank is free it starts the most urgent action that is ready (Graham 1969); it never
              waits for a better one, but with W, which only fills gaps, it may
    urgency   backwards before forwards or forwards first, later stages or longer paths to the end first
    depth     stage s has at most k (path from its F to its B) / (work of the busiest rank) microbatches in
              flight, k = 1, 1.25, ... or unlimited; k = 1 is 1F1B's p - s where stages are equal
    room      a forward that would not leave memory for the rank's later stages waits; if backwards are split,
              it leaves memory for the waiting gradients of all microbatches in flight as well
    improve   two neighbours on a rank swap places, one pair at a time, the first that helps, until none does
              or CHANGES have been tried. Only a change on the critical path can help, and there only of
              actions that wait for the one before them on their rank (van Laarhoven, Aarts and Lenstra,
              Operations Research 40(1), 1992). A stage's microbatches keep their order, and the rank its room

The result is complete, in order and free of deadlocks: actions are started in the order of their times, and
microbatches of a stage ascend. Symbols: p -> ranks, m -> microbatches, f, b, w -> StageCost. Deviation:
links delay, but messages do not queue; the caller plays it with `simulate`. No randomness, no clock.
Complexity: O(actions x stages of a rank) for each rule, and O(CHANGES x actions). Oracle:
tests/unit/schedules/test_compose.py, where all orders of small jobs are tried, and no schedule of families.py
is better on the same stages and memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from math import ceil, inf
from typing import Final, NamedTuple, final

from outsize.ir.schedule import COMPOSED_NAME, Action, Kind, Schedule
from outsize.schedules.job import Job

# How many exchanges are tried, and the number of actions above which none is.
CHANGES: Final = 400
MOST: Final = 600
SAME: Final = 1 + 1e-9

DEPTHS: Final = (1.0, 1.25, 1.5, 2.0, inf)
# The share of a W's seconds that must fit into a gap for the W to fill it.
PATIENCE: Final = (0.0, 0.7)


@final
class Rule(NamedTuple):
    """The rule by which a rank chooses its next action."""

    split: bool
    depth: float
    backward_first: bool
    by_way: bool
    patience: float


# The rule of zero-bubble-v: no other rule makes a V of equal stages shorter by more than 5 %.
IN_A_V: Final = Rule(True, inf, True, False, 0.0)
QUICK: Final = Rule(False, 1.5, True, True, 0.0)


def listed(job: Job, rule: Rule) -> tuple[tuple[Action, ...], ...]:
    """Returns the rows of one list schedule.

    A forward that exceeds the room still runs when nothing else can run.
    """
    return _Run(job, rule).rows()


def quick_s(job: Job) -> float:
    """Returns the seconds of the shorter of two list schedules, with whole and with split backwards, to
    compare many jobs. In tests/unit/planner/strategies no other rule makes a step shorter by more than 8 %.
    """
    rules = (QUICK, IN_A_V) if can_split(job) else (QUICK,)
    return min(_Run(job, rule).ends_s() for rule in rules)


def can_split(job: Job) -> bool:
    """Returns whether some stage has a gradient of weights to postpone."""
    return any(cost.weight_s > 0 for cost in job.costs)


def compose(job: Job, rivals: Iterable[Schedule] = ()) -> tuple[Composed, ...]:
    """Returns schedules by every rule, the shortest first, together with `rivals`.

    Those by the best rules with and without split backwards are improved; all keep to the room, if any does.
    Of schedules as short as each other those with whole backwards come first. Two ranks, F, I and W of one
    and of two seconds, room for two microbatches each: 25 seconds, by position and not by time:

    cell   1   2   3   4   5   6   7   8   9   10  11  12
    rank 0 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
    rank 1 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
    """
    schedules: dict[tuple[tuple[Action, ...], ...], Composed] = {}
    forced: dict[tuple[tuple[Action, ...], ...], Composed] = {}
    for rule in _rules(job):
        run = _Run(job, rule)
        composed = Composed(Schedule(COMPOSED_NAME, job.microbatches, run.rows()), run.ends_s())
        (forced if run.forced else schedules).setdefault(composed.schedule.actions, composed)
    for rival in rivals:
        schedule = Schedule(COMPOSED_NAME, job.microbatches, rival.actions)
        if all(most <= room for most, room in zip(most_bytes(job, rival), job.room, strict=True)):
            schedules.setdefault(rival.actions, Composed(schedule, played_s(job, rival)))
    ranked = sorted((schedules or forced).values(), key=lambda c: c.step_s)
    best = [next((c for c in ranked if is_split(c) is kind), None) for kind in (False, True)]
    ranked += [improved(job, c) for c in best if c is not None]
    return tuple(sorted(ranked, key=lambda c: (c.step_s, is_split(c))))


def is_split(composed: Composed) -> bool:
    """Tells whether some backwards are in two halves (I and W)."""
    return any(action.kind is Kind.I for row in composed.schedule.actions for action in row)


def _rules(job: Job) -> Iterator[Rule]:
    for split, depth in product((False, True) if can_split(job) else (False,), DEPTHS):
        for backward_first, by_way in product((True, False), repeat=2):
            for patience in PATIENCE if split else PATIENCE[:1]:
                yield Rule(split, depth, backward_first, by_way, patience)


# -- a list schedule ----------------------------------------------------------------------------------------


@final
class _Run:
    """One list schedule; `forced`: some forward ran without room, since nothing else could."""

    def __init__(self, job: Job, rule: Rule) -> None:
        self._job, self._rule = job, rule
        waiting_bytes_of = job.waiting if rule.split and job.waiting else (0,) * len(job.held)
        self._held = [
            held_bytes + waiting_bytes
            for held_bytes, waiting_bytes in zip(job.held, waiting_bytes_of, strict=True)
        ]
        stages = range(len(job.ranks))
        self._next = {kind: [0 for _ in stages] for kind in (Kind.F, Kind.I, Kind.W)}
        self._ends = {kind: [[0.0] * job.microbatches for _ in stages] for kind in (Kind.F, Kind.I)}
        self._free = [0.0 for _ in job.on_rank]
        self._used = [0 for _ in job.on_rank]
        self._rows: list[list[Action]] = [[] for _ in job.on_rank]
        self._limits = [self._limit(stage) for stage in stages]
        self._choices: list[tuple[float, Kind, int] | None] = [None for _ in job.on_rank]
        self._changed: Iterable[int] = range(len(job.on_rank))
        self.forced = False
        remaining = len(job.ranks) * job.microbatches * (3 if rule.split else 2)
        while remaining:
            self._step()
            remaining -= 1

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(map(tuple, self._rows))

    def ends_s(self) -> float:
        return max(self._free)

    def _limit(self, stage: int) -> float:
        return (
            max(1, ceil(self._rule.depth * self._job.ways_s[Kind.F][stage] / self._job.busiest_s / SAME))
            if (self._rule.depth < inf and self._job.busiest_s)
            else inf
        )

    def _step(self) -> None:
        """Runs the next action of the rank that can act first."""
        for rank in self._changed:
            self._choices[rank] = self._choice(rank, strict=True)
        startable = [(c[0], rank) for rank, c in enumerate(self._choices) if c is not None]
        if not startable:
            self.forced = True
            self._choices = [self._choice(rank, strict=False) for rank in range(len(self._free))]
            startable = [(c[0], rank) for rank, c in enumerate(self._choices) if c is not None]
        start, rank = min(startable)
        choice = self._choices[rank]
        assert choice is not None, "a microbatch that is not through has an action that can run"
        self._act(rank, *choice[1:], start)

    def _choice(self, rank: int, *, strict: bool) -> tuple[float, Kind, int] | None:
        """Returns when and what the rank runs next: gaps are filled with W, and a W that does not fit
        waits.
        """
        free, split = self._free[rank], self._rule.split
        main = [c for stage in self._job.on_rank[rank] for c in self._main(rank, stage, strict)]
        soonest = max(free, min((ready for ready, _, _ in main), default=inf))
        if split:
            fill = [s for s in self._job.on_rank[rank] if self._next[Kind.W][s] < self._next[Kind.I][s]]
            for stage in fill:
                if soonest >= free + max(self._rule.patience * self._job.costs[stage].weight_s, 1e-12):
                    return free, Kind.W, stage
        if not main:
            return None
        urgent = [c for c in main if c[0] <= soonest * SAME]
        _, kind, stage = min(urgent, key=self._urgency)
        return soonest, kind, stage

    def _main(self, rank: int, stage: int, strict: bool) -> Iterator[tuple[float, Kind, int]]:
        """Yields the stage's next backward and forward, each with the time from which it can run."""
        backward, forward = self._next[Kind.I][stage], self._next[Kind.F][stage]
        if backward < forward and self._made(Kind.I, self._job.before_backward[stage], backward):
            arrival_s = self._came(Kind.I, self._job.before_backward[stage], backward)
            yield max(arrival_s, self._ends[Kind.F][stage][backward]), Kind.I, stage
        before = self._job.before_forward[stage]
        if forward == self._job.microbatches or not self._made(Kind.F, before, forward):
            return
        if not strict or self._has_room(rank, stage, forward):
            yield self._came(Kind.F, before, forward), Kind.F, stage

    def _made(self, kind: Kind, sources: Iterable[tuple[int, float]], microbatch: int) -> bool:
        done = self._next[kind]
        return all(done[source] > microbatch for source, _ in sources)

    def _came(self, kind: Kind, sources: Iterable[tuple[int, float]], microbatch: int) -> float:
        ends = self._ends[kind]
        return max((ends[source][microbatch] + seconds for source, seconds in sources), default=0.0)

    def _has_room(self, rank: int, stage: int, forward: int) -> bool:
        """Tells whether a forward fits, with one microbatch of each later stage of the rank that has none
        in flight.
        """
        job, done = self._job, self._next[Kind.W if self._rule.split else Kind.I]
        if forward - self._next[Kind.I][stage] >= self._limits[stage]:
            return False
        later = (s for s in job.on_rank[rank] if s > stage and self._next[Kind.F][s] == done[s])
        return self._used[rank] + self._held[stage] + sum(self._held[s] for s in later) <= job.room[rank]

    def _urgency(self, choice: tuple[float, Kind, int]) -> tuple[float, ...]:
        _, kind, stage = choice
        first = (kind is Kind.F) == self._rule.backward_first
        microbatch = self._next[kind][stage]
        path_s = -self._job.ways_s[Kind.F if kind is Kind.F else Kind.B][stage]
        if self._rule.by_way:
            return first, microbatch, path_s, -stage
        return first, -stage if kind is Kind.F else stage, microbatch

    def _act(self, rank: int, kind: Kind, stage: int, start: float) -> None:
        job, microbatch = self._job, self._next[kind][stage]
        shown = Kind.B if kind is Kind.I and not self._rule.split else kind
        end = start + job.costs[stage].seconds(shown)
        self._free[rank] = end
        if kind is not Kind.W:
            self._ends[kind][stage][microbatch] = end
        self._next[kind][stage] += 1
        if kind is Kind.F:
            self._used[rank] += self._held[stage]
        elif shown is not Kind.I:
            self._used[rank] -= self._held[stage]
        self._rows[rank].append(Action(stage, shown, microbatch))
        self._changed = (
            range(len(job.on_rank)) if self.forced else {rank, *job.listening[kind].get(stage, ())}
        )


# -- exchanges ---------------------------------------------------------------------------------------------


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
