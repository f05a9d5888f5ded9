"""Problem: cut n units in a row into runs and assign each to a device of a few unequal kinds.

    minimise T   with   seconds of kind t for run [first, end) <= T   and the run fits the device's memory

There are `counts[t]` devices of kind t, and some may stay idle. Devices of one kind are equal, so a state is
how many of each kind are used, and for a given T all that matters of a state is how far it reaches. Stages
are placed from the last one, because the stage with d stages after it holds min(m, d + 1) microbatches in
1F1B (planner/memory/account.py), however many come before it:

    far[0, ..., 0] = n
    far[used] = min over kinds t of  reach(t, d, far[used - one of t]),   d = sum(used) - 1
    reach(t, d, end) = the least first unit with which the run [first, end) takes kind t at most T and fits

It is exact, since a run that starts later and ends at the same unit costs no more: a state that reaches
further is never worse. T is found by bisection. The states with equal d are one plane, stored as an array
over all kinds but the most frequent one, whose number follows.

With `boundary_s` a run also takes the transfer at its two ends, and a cut further on may carry more bytes.
Then the same recursion with reach'(end) = min over later ends of reach bounds every arrangement from below,
and with reach itself it finds one: the answer lies within `gap` of the optimum, and says so.

Source: the min-max chain problem of Bokhari (IEEE Trans. Computers 37(1), 1988), its probe ("can T be met?")
after Pinar and Aykanat (J. Parallel Distrib. Comput. 64(8), 2004), here over multisets of kinds.
Complexity: O(S k) per T for S = product of (count + 1) states and k kinds, O(log(1 / tolerance)) values of T;
three kinds of 256 and 1,024 units: 17 million states, about half a second per T.
Oracle: tests/unit/planner/heterogeneous/test_heterogeneous_probe.py tries all orders and cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

# `fractional_s` updates its prices this often.
TURNS: Final = 60

Seconds = NDArray[np.float64]
Cuts = NDArray[np.int32]
Floor = Callable[[int, int], NDArray[np.integer]]
"""Maps (kind, stages after) to the least first unit whose run fits, for each end 0..n; ascending."""
Reach = Callable[[int, int], Cuts]
"""Maps (kind, stages after) to the least first unit that all limits allow, of shape (n + 1,)."""


@final
@dataclass(frozen=True)
class Arrangement:
    """Holds stages in order: kinds and bounds, and the `seconds` of the slowest; no arrangement is below
    `bound_s`.
    """

    kinds: tuple[int, ...]
    bounds: tuple[int, ...]
    seconds: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Returns how much slower than the bound it is, relative to it."""
        return self.seconds / self.bound_s - 1 if self.seconds > self.bound_s > 0 else 0.0


def balance(
    counts: Sequence[int],
    seconds: Seconds,
    boundary_s: Seconds | None = None,
    floor: Floor | None = None,
    tolerance: float = 1e-9,
) -> Arrangement | None:
    """Returns the arrangement with the fastest slowest stage; None when the model does not fit.

    counts      how many devices of each kind there are
    seconds     shape (kinds, n): one microbatch of each unit, forward and backward
    boundary_s  shape (kinds, n + 1): the transfers at each cut; 0 at 0 and n. None: no transfers
    floor       what memory allows; None: everything fits everywhere
    tolerance   stop when the best and the bound are this close, relatively
    """
    problem = _Problem(tuple(counts), _Costs.of(seconds, boundary_s), floor)
    high = problem.costs.upper()
    if not problem.met(high, relaxed=False):
        return None
    low = problem.costs.lower(sum(counts))
    best = _bisect(problem, low, high, tolerance, relaxed=False)
    if boundary_s is not None and boundary_s.any():
        high = min(best[1], high)
        bound = _bisect(problem, low, high, max(tolerance, 1e-4), relaxed=True)[0]
    else:
        bound = best[0]
    kinds, bounds = problem.probe(best[1], relaxed=False, keep=True).trace()
    slowest = max(problem.costs.run(t, a, b) for t, a, b in zip(kinds, bounds, bounds[1:], strict=False))
    return Arrangement(kinds, bounds, slowest, bound if slowest > bound * (1 + tolerance) else slowest)


def fractional_s(counts: Sequence[int], seconds: Seconds) -> float:
    """Returns a lower bound of the slowest stage of any arrangement, even if units could be divided.

    For any prices of a second, with sum of counts x prices = 1, it is the work where it is cheapest: the dual
    of a linear program. Prices rise where there is too much work (multiplicative weights).
    """
    units, repeats = np.unique(seconds.T, axis=0, return_counts=True)
    number, prices, best = np.array(counts, float), 1 / np.maximum(seconds.sum(axis=1), 1e-30), 0.0
    for turn in range(TURNS):
        prices = prices / float(prices @ number)
        costs = units * prices
        kind = costs.argmin(axis=1)
        best = max(best, float(costs.min(axis=1) @ repeats))
        assigned_s = repeats * units[np.arange(len(units)), kind]
        load = np.bincount(kind, assigned_s, len(counts)) / np.maximum(number, 1)
        prices = prices * np.exp((load / load.mean() - 1) / (2 * np.sqrt(turn + 1)))
    return best


def lowest_first(fixed: NDArray[np.int64], per_microbatch: NDArray[np.int64], room: int, held: int) -> Cuts:
    """Returns a `Floor` answer where bytes add up: `fixed` + `held` x `per_microbatch`, at most `room`."""
    total = np.concatenate([[0], np.cumsum(fixed + held * per_microbatch)])
    return np.searchsorted(total, total - room).astype(np.int32)


@final
@dataclass(frozen=True, eq=False)
class _Costs:
    """Holds prefix sums (kinds, n + 1), and what each cut adds to the runs on both sides of it."""

    prefix: Seconds
    cut: Seconds

    @classmethod
    def of(cls, seconds: Seconds, boundary_s: Seconds | None) -> _Costs:
        kinds, units = seconds.shape
        prefix = np.zeros((kinds, units + 1))
        np.cumsum(seconds, axis=1, out=prefix[:, 1:])
        return cls(prefix, np.zeros_like(prefix) if boundary_s is None else boundary_s)

    @property
    def units(self) -> int:
        return self.prefix.shape[1] - 1

    def run(self, kind: int, first: int, end: int) -> float:
        row, cut = self.prefix[kind], self.cut[kind]
        return float(row[end] - row[first] + cut[first] + cut[end])

    def upper(self) -> float:
        return float((self.prefix[:, -1] + 2 * self.cut.max(axis=1)).max()) * (1 + 1e-9)

    def lower(self, devices: int) -> float:
        unit = np.diff(self.prefix, axis=1).min(axis=0)
        return max(float(unit.max()), float(unit.sum()) / devices)

    def first(self, kind: int, limit: float) -> Cuts:
        """Returns for each end the least first unit within the limit; the end itself when there is none."""
        row, cut = self.prefix[kind], self.cut[kind]
        lowest = np.minimum.accumulate(cut - row)
        first = np.searchsorted(-lowest, row + cut - limit * (1 + 1e-12))
        return np.minimum(first, np.arange(len(row))).astype(np.int32)


@final
@dataclass(frozen=True, eq=False)
class _Problem:
    counts: tuple[int, ...]
    costs: _Costs
    floor: Floor | None

    def met(self, limit: float, relaxed: bool) -> bool:
        """Returns whether T can be this."""
        return self.probe(limit, relaxed).met

    def probe(self, limit: float, relaxed: bool, keep: bool = False) -> Probe:
        """Probes with `reach(t, d, end)` of the module's text."""
        within = [self.costs.first(t, limit) for t in range(len(self.counts))]
        reach = partial(self._reach, within, limit, relaxed)
        return Probe(self.counts, self.costs.units, reach, keep)

    def _reach(
        self, within: Sequence[Cuts], limit: float, relaxed: bool, kind: int, stages_after: int
    ) -> Cuts:
        first = within[kind]
        if self.floor is not None:
            ends = np.arange(self.costs.units + 1, dtype=np.int32)
            first = np.minimum(np.maximum(first, self.floor(kind, stages_after)), ends).astype(np.int32)
            if not relaxed:
                first = self._valid(kind, first, limit)
        return np.minimum.accumulate(first[::-1])[::-1] if relaxed else first

    def _valid(self, kind: int, first: Cuts, limit: float) -> Cuts:
        """Moves to the next first unit where memory forbids the least one and the next one's cut carries more
        bytes.
        """
        row, cut = self.costs.prefix[kind], self.costs.cut[kind]
        first, ends = first.copy(), np.arange(len(row))
        bad = np.flatnonzero(first < ends)
        while len(bad):
            run_s = row[bad] - row[first[bad]] + cut[first[bad]] + cut[bad]
            bad = bad[run_s > limit * (1 + 1e-12)]
            first[bad] += 1
            bad = bad[first[bad] < bad]
        return first


@final
class Probe:
    """Decides whether stages reach the first unit; `keep` stores the planes for `trace`."""

    def __init__(self, counts: Sequence[int], units: int, reach: Reach, keep: bool = False) -> None:
        self._counts, self._nowhere, self._reached = tuple(counts), units + 1, reach
        self._implied = max(range(len(counts)), key=lambda t: (counts[t], -t))
        self._axes = [t for t in range(len(counts)) if t != self._implied]
        self._planes: list[Cuts] = []
        self.met = any(plane.min() == 0 for plane in self._grow(keep))

    def _grow(self, keep: bool) -> Iterator[Cuts]:
        """Yields the planes with 1, 2, ... stages, until no device remains or the first unit is reached."""
        counts, nowhere = self._counts, self._nowhere
        shape = tuple(counts[t] + 1 for t in self._axes) or (1,)
        used = np.indices(shape).sum(axis=0)
        plane = np.where(used == 0, nowhere - 1, nowhere).astype(np.int32)
        self._planes.append(plane)
        for stages in range(1, sum(counts) + 1):
            plane = self._next(plane, stages - 1)
            plane[(used > stages) | (stages - used > counts[self._implied])] = nowhere
            if keep:
                self._planes.append(plane)
            yield plane
            if plane.min() == 0:
                return

    def _next(self, plane: Cuts, stages_after: int) -> Cuts:
        # `take` is three times as fast as an index, and a probe does little else.
        larger = self._reach(self._implied, stages_after).take(plane)
        for axis, kind in enumerate(self._axes):
            target, source = _shifted(plane.ndim, axis)
            larger[target] = np.minimum(larger[target], self._reach(kind, stages_after).take(plane[source]))
        return larger

    def _reach(self, kind: int, stages_after: int) -> Cuts:
        """Returns the reach with one more entry for unreachable states."""
        return np.append(self._reached(kind, stages_after), np.int32(self._nowhere))

    def trace(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns kinds and bounds of the stages of a met T, from the first one to the last."""
        state = np.unravel_index(int(self._planes[-1].argmin()), self._planes[-1].shape)
        kinds: list[int] = []
        bounds = [0]
        for stages_after in range(len(self._planes) - 2, -1, -1):
            kind, state = self._step(state, stages_after, bounds[-1])
            end = int(self._planes[stages_after][state])
            if end > bounds[-1]:
                kinds.append(kind)
                bounds.append(end)
        return tuple(kinds), tuple(bounds)

    def _step(
        self, state: tuple[np.intp, ...], stages_after: int, first: int
    ) -> tuple[int, tuple[np.intp, ...]]:
        """Returns the kind of the stage that brought this state to `first`, and the state before."""
        for kind in range(len(self._counts)):
            earlier = list(state)
            if kind != self._implied:
                earlier[self._axes.index(kind)] -= 1
            exists = min(earlier, default=0) >= 0
            if (
                exists
                and self._reach(kind, stages_after)[self._planes[stages_after][tuple(earlier)]] == first
            ):
                return kind, tuple(earlier)
        raise AssertionError("a plane comes from the one before it")


def _shifted(dims: int, axis: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    target, source = [slice(None)] * dims, [slice(None)] * dims
    target[axis], source[axis] = slice(1, None), slice(None, -1)
    return tuple(target), tuple(source)


def _bisect(
    problem: _Problem, low: float, high: float, tolerance: float, relaxed: bool
) -> tuple[float, float]:
    """Returns (a lower bound, a value that can be met); `high` can be met."""
    if problem.met(low, relaxed):
        return low, low
    while high > low * (1 + tolerance):
        middle = (low * high) ** 0.5 if high > 4 * low else (low + high) / 2
        low, high = (low, middle) if problem.met(middle, relaxed) else (middle, high)
    return low, high
