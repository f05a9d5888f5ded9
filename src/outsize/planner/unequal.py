"""Problem: cut n units in a row into runs and give each a device, where devices are of a few unequal kinds.

    minimise T   with   seconds of kind t for run [first, end) <= T   and the run fits the device's memory

Which kind comes where is decided here; of kind t there are `counts[t]`, and some may stay idle. Devices of
one kind are alike, so a state is how many of each kind are used, and for a given T all that matters of a
state is how far it reaches. Stages are laid from the back, for the stage with d stages behind it holds
min(m, d + 1) microbatches in 1F1B (planner/memory.py), however many come before it:

    far[0, ..., 0] = n
    far[used] = min over kinds t of  reach(t, d, far[used - one of t]),   d = sum(used) - 1
    reach(t, d, end) = the least first unit with which the run [first, end) takes kind t at most T and fits

Exact, since a run that starts behind another and ends with it costs no more: who has come further is
never worse off. T is found by bisection. The states with equal d are one plane, held as an array over all
kinds but the most frequent one, whose number follows.

With `boundary_s` a run also takes the transfer at its two ends, and a further cut may be a fatter one. Then
the same recursion with reach'(end) = min over ends behind of reach bounds every arrangement from below, and
with reach itself it finds one: the answer lies within `gap` of the optimum, and says so.

Source: the min-max chain problem of Bokhari (IEEE Trans. Computers 37(1), 1988), its probe ("can T be met?")
after Pinar and Aykanat (J. Parallel Distrib. Comput. 64(8), 2004), here over multisets of kinds.
Complexity: O(S k) per T for S = product of (count + 1) states and k kinds, O(log(1 / tolerance)) values of T;
three kinds of 256 and 1,024 units: 17 million states, about half a second per T.
Oracle: tests/unit/planner/test_unequal.py tries all orders and cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

# Of the prices of `fractional_s`.
TURNS: Final = 60

Seconds = NDArray[np.float64]
Cuts = NDArray[np.int32]
Floor = Callable[[int, int], NDArray[np.integer]]
"""(kind, stages behind) -> for each end 0..n the least first unit whose run fits; ascending."""
Reach = Callable[[int, int], Cuts]
"""The same for all that a stage is asked for: reach(kind, stages behind), of shape (n + 1,)."""


@final
@dataclass(frozen=True)
class Arrangement:
    """Stages in order: kinds and bounds. `seconds` of the slowest; no arrangement is below `bound_s`."""

    kinds: tuple[int, ...]
    bounds: tuple[int, ...]
    seconds: float
    bound_s: float

    @property
    def gap(self) -> float:
        """How much slower than the bound, relative to it."""
        return self.seconds / self.bound_s - 1 if self.seconds > self.bound_s > 0 else 0.0


def balance(
    counts: Sequence[int],
    seconds: Seconds,
    boundary_s: Seconds | None = None,
    floor: Floor | None = None,
    tolerance: float = 1e-9,
) -> Arrangement | None:
    """The arrangement with the fastest slowest stage; None when the model fits in no way.

    counts      how many devices of each kind there are
    seconds     shape (kinds, n): one microbatch of each unit, forward and backward
    boundary_s  shape (kinds, n + 1): the transfers at each cut; 0 at 0 and n. None: nothing is moved
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
    """No arrangement has a faster slowest stage, even if units could be divided.

    For any prices of a second, with sum of counts x prices = 1, the work where it is cheapest: the dual of a
    linear program. Prices go up where there is too much of it (multiplicative weights).
    """
    units, often = np.unique(seconds.T, axis=0, return_counts=True)
    number, prices, best = np.array(counts, float), 1 / np.maximum(seconds.sum(axis=1), 1e-30), 0.0
    for turn in range(TURNS):
        prices = prices / float(prices @ number)
        costs = units * prices
        kind = costs.argmin(axis=1)
        best = max(best, float(costs.min(axis=1) @ often))
        taken = often * units[np.arange(len(units)), kind]
        load = np.bincount(kind, taken, len(counts)) / np.maximum(number, 1)
        prices = prices * np.exp((load / load.mean() - 1) / (2 * np.sqrt(turn + 1)))
    return best


def lowest_first(fixed: NDArray[np.int64], per_microbatch: NDArray[np.int64], room: int, held: int) -> Cuts:
    """A Floor's answer where bytes add up: `fixed` + `held` x `per_microbatch`, at most `room`."""
    total = np.concatenate([[0], np.cumsum(fixed + held * per_microbatch)])
    return np.searchsorted(total, total - room).astype(np.int32)


@final
@dataclass(frozen=True, eq=False)
class _Costs:
    """Prefix sums (kinds, n + 1), and what each cut adds to the run on either side of it."""

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
        """For each end the least first unit within the limit; the end itself when there is none."""
        row, cut = self.prefix[kind], self.cut[kind]
        lowest = np.minimum.accumulate(cut - row)
        found = np.searchsorted(-lowest, row + cut - limit * (1 + 1e-12))
        return np.minimum(found, np.arange(len(row))).astype(np.int32)


@final
@dataclass(frozen=True, eq=False)
class _Problem:
    counts: tuple[int, ...]
    costs: _Costs
    floor: Floor | None

    def met(self, limit: float, relaxed: bool) -> bool:
        """Whether T can be this."""
        return self.probe(limit, relaxed).met

    def probe(self, limit: float, relaxed: bool, keep: bool = False) -> Probe:
        """With `reach(t, d, end)` of the file's text."""
        within = [self.costs.first(t, limit) for t in range(len(self.counts))]
        reach = partial(self._reach, within, limit, relaxed)
        return Probe(self.counts, self.costs.units, reach, keep)

    def _reach(self, within: Sequence[Cuts], limit: float, relaxed: bool, kind: int, behind: int) -> Cuts:
        found = within[kind]
        if self.floor is not None:
            ends = np.arange(self.costs.units + 1, dtype=np.int32)
            found = np.minimum(np.maximum(found, self.floor(kind, behind)), ends).astype(np.int32)
            if not relaxed:
                found = self._valid(kind, found, limit)
        return np.minimum.accumulate(found[::-1])[::-1] if relaxed else found

    def _valid(self, kind: int, first: Cuts, limit: float) -> Cuts:
        """Memory may forbid the least first unit and leave one whose cut is fatter: go on to the next."""
        row, cut = self.costs.prefix[kind], self.costs.cut[kind]
        first, ends = first.copy(), np.arange(len(row))
        bad = np.flatnonzero(first < ends)
        while len(bad):
            taken = row[bad] - row[first[bad]] + cut[first[bad]] + cut[bad]
            bad = bad[taken > limit * (1 + 1e-12)]
            first[bad] += 1
            bad = bad[first[bad] < bad]
        return first


@final
class Probe:
    """Do stages reach the first unit? `keep` keeps the planes for `trace`."""

    def __init__(self, counts: Sequence[int], units: int, reach: Reach, keep: bool = False) -> None:
        self._counts, self._nowhere, self._reached = tuple(counts), units + 1, reach
        self._implied = max(range(len(counts)), key=lambda t: (counts[t], -t))
        self._axes = [t for t in range(len(counts)) if t != self._implied]
        self._planes: list[Cuts] = []
        self.met = any(plane.min() == 0 for plane in self._walk(keep))

    def _walk(self, keep: bool) -> Iterator[Cuts]:
        """The planes with 1, 2, ... stages, until nothing is left to do or nobody gets further."""
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

    def _next(self, plane: Cuts, behind: int) -> Cuts:
        larger = self._reach(self._implied, behind)[plane]
        for axis, kind in enumerate(self._axes):
            to, of = _shifted(plane.ndim, axis)
            larger[to] = np.minimum(larger[to], self._reach(kind, behind)[plane[of]])
        return larger

    def _reach(self, kind: int, behind: int) -> Cuts:
        """With one more entry for "nowhere"."""
        return np.append(self._reached(kind, behind), np.int32(self._nowhere))

    def trace(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Kinds and bounds of the stages of a met T, from the first one to the last."""
        state = np.unravel_index(int(self._planes[-1].argmin()), self._planes[-1].shape)
        kinds: list[int] = []
        bounds = [0]
        for behind in range(len(self._planes) - 2, -1, -1):
            kind, state = self._step(state, behind, bounds[-1])
            end = int(self._planes[behind][state])
            if end > bounds[-1]:
                kinds.append(kind)
                bounds.append(end)
        return tuple(kinds), tuple(bounds)

    def _step(self, state: tuple[np.intp, ...], behind: int, first: int) -> tuple[int, tuple[np.intp, ...]]:
        """Whose stage brought this state to `first`, and the state before."""
        for kind in range(len(self._counts)):
            earlier = list(state)
            if kind != self._implied:
                earlier[self._axes.index(kind)] -= 1
            fine = min(earlier, default=0) >= 0
            if fine and self._reach(kind, behind)[self._planes[behind][tuple(earlier)]] == first:
                return kind, tuple(earlier)
        raise AssertionError("a plane comes from the one before it")


def _shifted(dims: int, axis: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    to, of = [slice(None)] * dims, [slice(None)] * dims
    to[axis], of[axis] = slice(1, None), slice(None, -1)
    return tuple(to), tuple(of)


def _bisect(
    problem: _Problem, low: float, high: float, tolerance: float, relaxed: bool
) -> tuple[float, float]:
    """(what cannot be beaten, what can be met); `high` can be met."""
    if problem.met(low, relaxed):
        return low, low
    while high > low * (1 + tolerance):
        middle = (low * high) ** 0.5 if high > 4 * low else (low + high) / 2
        low, high = (low, middle) if problem.met(middle, relaxed) else (middle, high)
    return low, high
