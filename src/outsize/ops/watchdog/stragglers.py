"""Problem: all ranks step, but slowly. Whom do the others wait for, and is it computing, input, or a link?

Each rank tells, of up to four steps a second, how long it computed, how long its own code took before the
step, and how long its slowest link held it up:

    rank   computes   planned   before the step   held by a link    cycle of the plan    named
    0      0.20 s     0.20 s    0.00 s            0.00 s            1.0
    1      0.42 s     0.20 s    0.00 s            0.00 s            2.1                  compute
    2      0.20 s     0.20 s    0.50 s            0.00 s            1.0, with input 3.5  input
    3      0.20 s     0.20 s    0.00 s            0.30 s            1.0, with link 2.5   link to rank 2

All three are ratios of seconds: of compute to what is planned for the rank, relative to the others, so that a
machine that is slower than planned as a whole has no straggler (without a plan, or far from it, the rank's
own fastest step counts); of the longest compute with the rank's own input to the same with that of others;
and of the longest compute with the waiting for a link to that without.

A machine whose cores other programs use, too, disturbs all of this. So the ranks are compared twice: by their
seconds without those in which they waited for a core, and by the clock on the wall, which names a rank whose
cores are taken. Who is slow by the first must not be far behind another one by the second.

A ratio counts when it is 1.5 and when it is not noise. Its median over the last 8 steps, or over the last 32
where steps are noisy, must differ from the others' by six standard errors, as the differences from step to
step on all ranks give them. A rank must also be the slowest by far, since a lighter stage may be late without
holding up anybody, and cost 20 ms a step. Oracle: tests/unit/ops/watchdog/test_stragglers.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Final, final

from outsize.ops.watchdog.paces import LinkPace, RankPaces
from outsize.run.progress import Cause, Pace, Straggler

SAMPLES: Final = (8, 32)  # the latest steps of a rank that are looked at, together
_RATIO, _AHEAD, _LEAST_S, _SIGMAS = 1.5, 1.3, 0.02, 6.0
_TRUSTED: Final = 20.0  # A plan that is further off says nothing of single ranks.
_OF_MEDIAN: Final = 1.2533  # the standard error of a median, in those of a mean
_OF_DEVIATION: Final = 0.6745 * math.sqrt(2)  # the median absolute difference of two, in standard deviations


@final
@dataclass(slots=True)
class _History:
    """The latest steps of a rank."""

    last: RankPaces
    fastest_s: float = math.inf
    steps: deque[Pace] = field(default_factory=lambda: deque[Pace](maxlen=max(SAMPLES)))
    links: deque[LinkPace] = field(default_factory=lambda: deque[LinkPace](maxlen=max(SAMPLES)))

    def add(self, paces: RankPaces, on_a_core: bool) -> None:
        """Takes the steps that are new."""
        self.last = paces
        step = self.steps[-1].step if self.steps else -1
        new = [pace for pace in paces.steps if pace.step > step]
        self.steps += [pace.on_a_core() for pace in new] if on_a_core else new
        self.fastest_s = min(self.fastest_s, *(pace.compute_s for pace in self.steps))
        step = self.links[-1].step if self.links else -1
        self.links += [link for link in paces.links if link.step > step]

    def compute_s(self, count: int) -> float:
        """Returns the median seconds of compute over the latest steps."""
        return median(pace.compute_s for pace in [*self.steps][-count:])


@final
@dataclass(slots=True)
class Stragglers:
    """Names each straggler once, from the paces of all ranks."""

    _on_a_core: _Comparison = field(default_factory=lambda: _Comparison(on_a_core=True))
    _by_the_wall: _Comparison = field(default_factory=lambda: _Comparison(on_a_core=False))
    _named: set[tuple[int, Cause]] = field(default_factory=set[tuple[int, Cause]])

    def look(self, paces: Mapping[int, RankPaces]) -> Straggler | None:
        """Takes the latest steps of each rank; returns a straggler that was not named before."""
        by_the_wall = self._by_the_wall
        for comparison in (self._on_a_core, by_the_wall):
            comparison.add(paces)
        for count in SAMPLES:
            found = [one for one in self._on_a_core.slow(count) if by_the_wall.is_slow(one, count)]
            for one in (*found, *by_the_wall.slow(count)):
                if (one.rank, one.cause) not in self._named:
                    self._named.add((one.rank, one.cause))
                    return replace(one, core_wait_s=by_the_wall.core_wait_s(one, count))
        return None


@final
@dataclass(slots=True)
class _Comparison:
    """Compares the ranks by one kind of seconds: with those in which they waited for a core, or without."""

    on_a_core: bool
    _histories: dict[int, _History] = field(default_factory=dict[int, _History])

    def add(self, paces: Mapping[int, RankPaces]) -> None:
        """Takes the latest steps of each rank."""
        for rank, one in paces.items():
            self._histories.setdefault(rank, _History(one)).add(one, self.on_a_core)

    def slow(self, count: int) -> list[Straggler]:
        """Returns the stragglers of the latest `count` steps, at most one of each cause."""
        steps = min((len(history.steps) for history in self._histories.values()), default=0)
        if len(self._histories) < 2 or steps < SAMPLES[0]:
            return []
        finds = (self._slow_input, self._slow_link, self._slow_compute)
        found = (find(min(count, steps)) for find in finds)
        return [one for one in found if one is not None]

    def is_slow(self, straggler: Straggler, count: int) -> bool:
        """Tells whether no other rank has far more of the seconds that made it a straggler."""
        medians = {rank: self._median_s(rank, straggler.cause, count) for rank in self._histories}
        return straggler.cause == "link" or _AHEAD * medians[straggler.rank] >= max(medians.values())

    def core_wait_s(self, straggler: Straggler, count: int) -> float:
        """Returns the median of the seconds in which a straggler waited for a core."""
        steps = [*self._histories[straggler.rank].steps][-count:]
        is_input = straggler.cause == "input"
        return median(one.input_wait_s if is_input else one.compute_wait_s for one in steps)

    def _median_s(self, rank: int, cause: Cause, count: int) -> float:
        steps = [*self._histories[rank].steps][-count:]
        return median(one.input_s if cause == "input" else one.compute_s for one in steps)

    def _slow_input(self, count: int) -> Straggler | None:
        longest_s = self._longest_s(count)
        rows = {r: [pace.input_s + longest_s for pace in one.steps] for r, one in self._histories.items()}
        medians = {rank: median(row[-count:]) for rank, row in rows.items()}
        rank = max(medians, key=lambda one: medians[one])
        others_s = max(medians[one] for one in medians if one != rank)
        if medians[rank] - others_s < _LEAST_S or not _is_above(rows, rank, count, others_s):
            return None
        return self._straggler(rank, "input", medians[rank] - longest_s, others_s - longest_s)

    def _slow_link(self, count: int) -> Straggler | None:
        """Looks for a link that holds up a step for half of the longest compute."""
        longest_s = self._longest_s(count)
        for rank, one in self._histories.items():
            links = [*one.links]
            latest = links[-count:]
            if len(links) < SAMPLES[0] or any(link.peer != links[-1].peer for link in latest):
                continue
            held_s = median(link.held_s for link in latest)
            rows = {rank: [longest_s + link.held_s for link in links]}
            if held_s >= _LEAST_S and _is_above(rows, rank, count, longest_s):
                transit_s = median(link.transit_s for link in latest)
                return self._straggler(rank, "link", held_s, transit_s, links[-1].peer)
        return None

    def _slow_compute(self, count: int) -> Straggler | None:
        seconds = {rank: one.compute_s(count) for rank, one in self._histories.items()}
        planned = {rank: one.last.planned_s for rank, one in self._histories.items()}
        if not all(0 < seconds[rank] < _TRUSTED * planned[rank] for rank in seconds):
            planned = {rank: max(one.fastest_s, 1e-9) for rank, one in self._histories.items()}
        rank = max(seconds, key=lambda one: seconds[one])
        others = [one for one in seconds if one != rank]
        ratio = median(seconds[one] / planned[one] for one in others)
        is_ahead = seconds[rank] >= _AHEAD * max(seconds[one] for one in others)
        if not is_ahead or seconds[rank] - ratio * planned[rank] < _LEAST_S:
            return None
        rows = {r: [pace.compute_s / planned[r] for pace in one.steps] for r, one in self._histories.items()}
        if not _is_above(rows, rank, count, ratio):
            return None
        return self._straggler(rank, "compute", seconds[rank] / planned[rank], ratio)

    def _longest_s(self, count: int) -> float:
        return max(one.compute_s(count) for one in self._histories.values())

    def _straggler(self, rank: int, cause: Cause, own: float, others: float, peer: int = -1) -> Straggler:
        history = self._histories[rank]
        return Straggler(rank, history.last.stages, cause, own, others, history.steps[-1].step, peer)


def _is_above(rows: Mapping[int, Sequence[float]], rank: int, count: int, others: float) -> bool:
    """Tells whether the median of a rank's latest steps is above `others` by a ratio that is no noise.

    The noise of one step is that of the differences between neighbouring steps of all rows, which a rank that
    becomes slow at some step does not change.
    """
    own = rows[rank][-count:]
    ratio = median(own) / max(others, 1e-9)
    if ratio < _RATIO:
        return False
    jumps = [abs(math.log(b / a)) for row in rows.values() for a, b in pairwise(row) if a > 0 and b > 0]
    error = _OF_MEDIAN * median(jumps or [0.0]) / _OF_DEVIATION * math.sqrt(2 / len(own))
    return ratio >= math.exp(_SIGMAS * error)
