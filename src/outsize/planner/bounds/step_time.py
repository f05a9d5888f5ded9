"""Problem: what is the shortest possible step of this schedule, whatever the cuts are, if links cost nothing?

Stage s with units first..end-1 computes f_s + b_s for each of m microbatches. The units that it depends on
have to be computed before its first forward, and those that depend on it after: `before` is the work of the
units in a chain that ends at `first`, `behind` of those from `end` on. A stage that begins with unit k
depends on the stage of the last unit that made something for k (with a gradient); the units between the two,
such as a query's projection before a key's, may be a stage of their own at the same time. So each cut of a
chain may cost that much, at most `slack`; where it is more than BRANCH of the model, the chain is broken. A
step lasts at least the maximum over the stages of

    any schedule   before + m (f + b)
    gpipe          before + m (f + b) + behind          all forwards are done before a backward
    1f1b           before + (f + b) + behind + (m - 1) b + (m - w) f      w = min(p - s, m)
    naive          m (before + (f + b) + behind)        one microbatch after the other
    zero-bubble    the forwards of before, + m (f + b)      weight gradients overlap with what is before
    interleaved    m max(total / p, heaviest unit)      on p ranks

For a chain of equal stages these are (m + p - 1)(f + b) for gpipe and 1f1b, which is their step
(families.py). The result is the least over all cuts of the maximum over the stages. For a limit T each stage
takes as many units as T allows, because a later begin never hurts; whether the end is reached says if T can
be met (Pinar and Aykanat, JPDC 64(8), 2004), and bisection finds the least T. Memory is ignored here:
partition/stage_prices.py includes it, for cuts of which it has tables.

Source: the critical paths of GPipe (arXiv 1811.06965, sec. 2.3) and PipeDream-flush (arXiv 2104.04473, sec.
2.2), for unequal stages. Symbols: p -> stages, m -> microbatches, f, b, w -> forward_s, backward_s, ahead.
Complexity: O(p n) for each T. Oracle: tests/unit/planner/bounds/test_step_time.py simulates every cut of
small models.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import Any, Final, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.graph import ModelGraph
from outsize.ir.plan import ScheduleName
from outsize.planner.bounds.chain import ChainBound, ChainShape, Queue, Room
from outsize.planner.costs.unit_times import Seconds, UnitSeconds
from outsize.schedules.families import family_of
from outsize.schedules.family import StagePath

Index = np.intp | NDArray[np.intp]
# Bisection stops at this relative width: far below the error of a prediction.
PRECISE: Final = 1e-5
# The search begins this far above the work alone, and then goes this many times further.
FIRST: Final = 1e-3
FURTHER: Final = 8.0
# More than this share of all work between a unit and its dependency is a branch, not a detail.
BRANCH: Final = 0.02


@final
@dataclass(frozen=True, eq=False)
class PrefixTimes:
    """Holds seconds per microbatch, summed over units, of shape (n + 1,).

    `before[k]`: of the chain that ends at cut k, `before_forward` its forwards; `behind[k]`: of the chain
    that begins there. Each cut within a chain may take `slack_s` from it. `hidden` is what `backward` is
    without, and a stage that recomputes does not hide; None: nothing.
    """

    forward: Seconds
    backward: Seconds
    before: Seconds
    before_forward: Seconds
    behind: Seconds
    slack_s: float
    heaviest_s: float
    hidden: Seconds | None = None

    @classmethod
    def of(cls, graph: ModelGraph, seconds: UnitSeconds) -> Self:
        """Computes the sums of a model with its costs."""
        return cls.along(made_for(graph), seconds)

    @classmethod
    def along(cls, made: NDArray[np.int64], seconds: UnitSeconds) -> Self:
        """Computes the same for a graph of which `made_for` is known."""
        forward, backward = prefix(seconds.forward), prefix(seconds.backward)
        total = forward + backward
        lost = losses(made, total)
        linked = lost <= BRANCH * total[-1]
        return cls(
            forward=forward,
            backward=backward,
            before=_row_before(total, linked),
            before_forward=_row_before(forward, linked),
            behind=_row_behind(total, linked),
            slack_s=float(lost[linked].max(initial=0.0)),
            heaviest_s=float(np.diff(total).max()),
        )

    @property
    def total_s(self) -> float:
        """Returns the seconds of all units."""
        return float(self.forward[-1] + self.backward[-1])

    def least_s(self, stages: int, microbatches: int) -> float:
        """Returns a lower bound for every cut into `stages` under any schedule: no table is needed."""
        return microbatches * max(self.total_s / stages, self.heaviest_s)

    def costing(self, seconds: UnitSeconds) -> Self:
        """Returns the same chains around a stage with other costs, such as with recompute."""
        return replace(self, forward=prefix(seconds.forward), backward=prefix(seconds.backward))

    def stage_s(
        self, schedule: ScheduleName, first: Index, end: Index, place: tuple[int, int], microbatches: int
    ) -> Seconds:
        """Returns the least seconds of a step with a stage made of the units first..end-1 (broadcast).

        `place`: how many stages are before it, and how many after it.
        """
        rows = self.forward, self.backward, self.before, self.before_forward, self.behind
        stage = _StageOfStep(*place, schedule, microbatches)
        return _through(rows, self.slack_s, (first, end), stage, _ARRAYS)

    def balanced_s(self, schedule: ScheduleName, stages: int, ranks: int, microbatches: int) -> float:
        """Returns an interleaved step of equal chunks (arXiv 2104.04473, sec. 2.2): about what the best cut
        takes. Gradients of weights may fill the bubble where a schedule computes them by themselves.
        """
        filling = 0.0 if family_of(schedule).splits_backward else (ranks - 1) / stages
        return self.total_s * (microbatches / ranks + filling)

    def floor_s(
        self, schedule: ScheduleName, stages: int, ranks: int, microbatches: int, room: Room | None = None
    ) -> float:
        """Returns a lower bound of a step cut into `stages` on `ranks`; in a chain, of the cuts that fit into
        `room`.

        It is infinite when nothing fits.
        """
        return self.bound(schedule, stages, ranks, microbatches, room).sharpened()

    def bound(
        self,
        schedule: ScheduleName,
        stages: int,
        ranks: int,
        microbatches: int,
        room: Room | None = None,
        queue: Queue | None = None,
    ) -> StepBound:
        """Returns the same as a bound that is not sharp yet; in a chain, also of collectives (`queue`)."""
        low_s = self.least_s(ranks, microbatches)
        if family_of(schedule).bound_is_work:
            return StepBound(low_s)
        reaching = partial(self._reaching, ChainShape(schedule, stages, microbatches), room, queue)
        return StepBound(low_s, reaching, room is not None)

    def _reaching(self, shape: ChainShape, room: Room | None, queue: Queue | None) -> Callable[[float], bool]:
        """Returns a function limit -> whether the stages reach the end, none of them above the limit."""
        if not self.unbroken:
            return partial(self._reaches, *shape)
        before = self.before_forward if family_of(shape.schedule).forwards_lead else self.before
        passes = (self.forward, self.backward)
        if self.hidden is not None:
            passes = (*passes, self.forward + self.backward + self.hidden)
        return ChainBound(before, passes, self.slack_s, shape, room, queue).reaches

    def _reaches(self, schedule: ScheduleName, stages: int, microbatches: int, limit_s: float) -> bool:
        """Returns the same where chains break off."""
        first, n = 0, len(self.forward) - 1
        for stage in range(stages):
            place = stage, stages - 1 - stage
            longest_s = limit_s / microbatches * (1 + PRECISE)
            ends = range(first, bisect_right(self._total, self._total[first] + longest_s))
            # Plain numbers are used, because arrays of one element take ten times as long.
            seconds = partial(self._one_s, schedule, place, microbatches, first)
            first = next((end for end in reversed(ends) if seconds(end) <= limit_s), first)
        return first == n

    def _one_s(
        self, schedule: ScheduleName, place: tuple[int, int], microbatches: int, first: int, end: int
    ) -> float:
        stage = _StageOfStep(*place, schedule, microbatches)
        return _through(self._rows, self.slack_s, (first, end), stage, _NUMBERS)

    @cached_property
    def unbroken(self) -> bool:
        """Returns whether a stage that takes more units never takes less time: all units are in one chain."""
        total = self.forward + self.backward
        return bool(np.allclose(self.behind[1:], total[-1] - total[1:], rtol=0.0, atol=1e-9 * total[-1]))

    @cached_property
    def _rows(self) -> tuple[list[float], ...]:
        rows = self.forward, self.backward, self.before, self.before_forward, self.behind
        return tuple(row.tolist() for row in rows)

    @cached_property
    def _total(self) -> list[float]:
        return (self.forward + self.backward).tolist()


@final
class StepBound:
    """Bounds a step from below, and sharpens the bound by bisection, no further than it is asked to.

    `reaching` returns the function limit -> whether the stages reach the end, which makes a table when it is
    asked for the first time; None where the bound is sharp. `may_not_fit`: they may not reach it at all.
    """

    def __init__(
        self,
        low_s: float,
        reaching: Callable[[], Callable[[float], bool]] | None = None,
        may_not_fit: bool = False,
    ) -> None:
        self.low_s, self._high_s = low_s, inf
        self._reaching, self._may_not_fit = reaching, may_not_fit
        self._steps = iter(()) if reaching is None else self._bisected()
        self.sharp = reaching is None

    @cached_property
    def _reaches(self) -> Callable[[float], bool]:
        assert self._reaching is not None, "a bound that is not sharp has a function"
        return self._reaching()

    def exceeds(self, limit_s: float) -> bool:
        """Returns whether no step within the limit is possible, by a single question, and raises the bound to
        the limit then.
        """
        if self.low_s < limit_s < self._high_s and not self.sharp:
            if self._reaches(limit_s):
                self._high_s = limit_s
            else:
                self.low_s = limit_s
        return self.low_s >= limit_s

    def sharpen(self) -> None:
        """Asks once whether the stages reach the end."""
        self.sharp = self.sharp or next(self._steps, True)

    def sharpened(self) -> float:
        """Returns the sharp bound: infinite where nothing fits."""
        while not self.sharp:
            self.sharpen()
        return self.low_s

    def _bisected(self) -> Iterator[bool]:
        """Yields after each question whether the bound is sharp."""
        if self._may_not_fit and not self._reaches(inf):
            self.low_s = inf
            return
        gap, high_s = FIRST, self.low_s * (1 + FIRST)
        while not self._reaches(high_s):  # The bound is usually close to the work alone.
            gap *= FURTHER
            self.low_s, high_s = max(self.low_s, high_s), high_s * (1 + gap)
            yield False
        while high_s > self.low_s * (1 + PRECISE):
            middle_s = (self.low_s + high_s) / 2
            if self._reaches(middle_s):
                high_s = middle_s
            else:
                self.low_s = max(self.low_s, middle_s)
                yield False


@final
class _StageOfStep(NamedTuple):
    """Describes how many stages are before and after a stage, and the step that they are in."""

    earlier: int
    later: int
    schedule: ScheduleName
    microbatches: int


@final
class _Arithmetic(NamedTuple):
    """Holds the maximum and the choice, for arrays or for numbers."""

    larger: Callable[..., Any]
    either: Callable[..., Any]


def _either(condition: bool, yes: float, no: float) -> float:
    return yes if condition else no


_ARRAYS: Final = _Arithmetic(np.maximum, np.where)
_NUMBERS: Final = _Arithmetic(max, _either)


def _through(
    rows: Sequence[Any], slack_s: float, run: tuple[Any, Any], stage: _StageOfStep, of: _Arithmetic
) -> Any:
    """Returns the critical path through a stage of the units `run`, for arrays or for numbers."""
    (forwards, backwards, befores, before_forwards, behinds), (first, end) = rows, run
    family = family_of(stage.schedule)
    leads = before_forwards if family.forwards_lead else befores
    before = of.larger(0.0, leads[first] - stage.earlier * slack_s)
    forward, backward = forwards[end] - forwards[first], backwards[end] - backwards[first]
    # A stage between a unit and its dependency may have nothing after it.
    linked = forward + backward > slack_s
    behind = of.either(linked, of.larger(0.0, behinds[end] - stage.later * slack_s), 0.0)
    m, in_flight = stage.microbatches, family.in_flight(stage.later + 1, stage.microbatches)
    return family.path_s(StagePath(before, forward, backward, behind, linked, m, in_flight, *of))


def made_for(graph: ModelGraph) -> NDArray[np.int64]:
    """Returns for each unit the last one that made something for it, with a gradient; -1 for none, and after
    all units.
    """
    made_by = [-1] * (len(graph.units) + 1)
    for value in graph.values:
        for unit in value.consumers if value.requires_grad else ():
            made_by[unit] = max(made_by[unit], value.producer if value.producer < unit else -1)
    return np.array(made_by)


def losses(made: NDArray[np.int64], total: Seconds) -> Seconds:
    """Returns for each cut k the work between the last unit that made something for unit k, and k."""
    lost = total - total[made + 1]
    lost[0] = lost[-1] = np.inf
    return lost


def _row_before(total: Seconds, linked: NDArray[np.bool_]) -> Seconds:
    """Returns the seconds of the unbroken chain that ends at each cut."""
    starts = np.where(linked, 0.0, total)
    return total - np.maximum.accumulate(starts)


def _row_behind(total: Seconds, linked: NDArray[np.bool_]) -> Seconds:
    """Returns the seconds of the unbroken chain that begins at each cut; 0 where the cut itself is
    a break.
    """
    breaks = np.where(linked, np.inf, total)
    breaks[-1] = total[-1]
    after = np.minimum.accumulate(breaks[::-1])[::-1]
    return np.where(linked, after - total, 0.0)


def prefix(seconds: Seconds) -> Seconds:
    """Returns sums over the units before each cut, of shape (n + 1,)."""
    return np.concatenate(([0.0], np.cumsum(seconds)))
