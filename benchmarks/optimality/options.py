"""Problem: cut n units in a row into p stages and choose how each stage runs, so that a step is fastest.

    minimise  sum over stages of once_s  +  (m - 1) x max over stages of steady_s
    subject to  fixed_bytes + held(s) x held_bytes <= room(s)         for every stage s

A way to run (no recompute, full, selective, offload) is a `Way`: four tables over runs of units. For one run
it is a point (steady, once, fixed, held). `frontier` are the ways that no other beats in all four; which of
them is right depends on the stage's position, since `held` is the number of microbatches in flight there.

The first term is the time of one microbatch through the empty pipeline (`once_s` includes what only the
first or the last pass costs), the second the steady pace of GPipe and 1F1B (arXiv 1811.06965, sec. 2.3). A
maximum and a sum do not decompose together, so the pace T is fixed: under a T the least sum is a dynamic
program (Bokhari 1988, as in partition.py). T runs downward over the paces that answers have; a T for which
(m - 1) T and the least sum of all already exceed the best step cannot win.
Exact. Complexity: O(p n^2 ways) for each T tried. Oracle: tests/benchmarks/test_options.py tries all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from outsize.planner.partition.chain_dp import SAME, bottleneck

Seconds = NDArray[np.float64]
Bytes = NDArray[np.int64]


@final
@dataclass(frozen=True, eq=False)
class Way:
    """How a stage may run; tables of shape (n + 1, n + 1) over runs [first, end) of units.

    `steady_s` per microbatch; `once_s` of one microbatch alone; `fixed_bytes` for good; `held_bytes` for each
    microbatch in flight.
    """

    name: str
    steady_s: Seconds
    once_s: Seconds
    fixed_bytes: Bytes
    held_bytes: Bytes


@final
@dataclass(frozen=True)
class Choice:
    """First unit of each stage, then n; the place of each stage's way; seconds of a step."""

    bounds: tuple[int, ...]
    ways: tuple[int, ...]
    steady_s: float
    step_s: float


def frontier(ways: Sequence[Way], first: int, end: int) -> tuple[int, ...]:
    """The ways that no other one beats for this run: as good in all four, and better in one or earlier."""
    points = [_point(way, first, end) for way in ways]
    return tuple(
        i
        for i, mine in enumerate(points)
        if not any(
            all(a <= b for a, b in zip(other, mine, strict=True)) and (other != mine or j < i)
            for j, other in enumerate(points)
            if j != i
        )
    )


def fastest(
    stages: int,
    ways: Sequence[Way],
    microbatches: int,
    held: Callable[[int], int],
    room: Callable[[int], int],
) -> Choice | None:
    """The fastest step; None when no cut fits. Stage s holds `held(s)` microbatches in `room(s)` bytes."""
    problem = _Problem(stages, ways, held, room)
    least = bottleneck(stages, lambda s: np.min(problem.steady(s), axis=0), problem.units)
    if not np.isfinite(least):
        return None
    best, base = problem.under(least * SAME, microbatches), problem.under(np.inf, microbatches)
    assert best is not None, "the least bottleneck is finite"
    assert base is not None, "what is under a pace is under none"
    once_s = base.step_s - (microbatches - 1) * base.steady_s
    limit = _worth(best, once_s, microbatches)
    while (found := problem.under(limit, microbatches)) is not None:
        best = min(best, found, key=lambda c: c.step_s)
        # All that is faster in steady state, and could still win as a whole.
        limit = min(found.steady_s / SAME, _worth(best, once_s, microbatches))
        if limit <= least:
            break
    return best


def _worth(best: Choice, once_s: float, microbatches: int) -> float:
    """A slower pace cannot make a faster step, even with the least time for one microbatch."""
    return np.inf if microbatches == 1 else (best.step_s - once_s) / (microbatches - 1) * SAME


def _point(way: Way, first: int, end: int) -> tuple[float, float, int, int]:
    at = first, end
    return (
        float(way.steady_s[at]),
        float(way.once_s[at]),
        int(way.fixed_bytes[at]),
        int(way.held_bytes[at]),
    )


@final
@dataclass(frozen=True, eq=False)
class _Problem:
    stages: int
    ways: Sequence[Way]
    held: Callable[[int], int]
    room: Callable[[int], int]

    @property
    def units(self) -> int:
        return len(self.ways[0].steady_s) - 1

    def fits(self, stage: int) -> NDArray[np.bool_]:
        """(ways, n + 1, n + 1): whether the run fits this stage in that way."""
        held, room = self.held(stage), self.room(stage)
        return np.stack([way.fixed_bytes + held * way.held_bytes <= room for way in self.ways])

    def steady(self, stage: int) -> Seconds:
        """Seconds for a microbatch, infinite where it does not fit."""
        return np.where(self.fits(stage), np.stack([way.steady_s for way in self.ways]), np.inf)

    def under(self, pace_s: float, microbatches: int) -> Choice | None:
        """The least sum of `once_s` with no stage slower than the pace; None when there is none."""
        rest = np.full(self.units + 1, np.inf)
        rest[-1] = 0.0
        choices: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
        for stage in reversed(range(self.stages)):
            steady = self.steady(stage)
            allowed = np.isfinite(steady) & (steady <= pace_s)
            once = np.where(allowed, np.stack([w.once_s for w in self.ways]), np.inf)
            way = np.argmin(once, axis=0)
            total = np.min(once, axis=0) + rest
            total[np.tril_indices(len(rest))] = np.inf
            choices.append((np.argmin(total, axis=1), way))
            rest = np.min(total, axis=1)
        return self._choice(choices[::-1], float(rest[0]), microbatches) if np.isfinite(rest[0]) else None

    def _choice(
        self, choices: Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]], once_s: float, microbatches: int
    ) -> Choice:
        bounds, ways = [0], []
        for ends, way in choices:
            bounds.append(int(ends[bounds[-1]]))
            ways.append(int(way[bounds[-2], bounds[-1]]))
        steady_s = max(
            float(self.ways[w].steady_s[a, b]) for w, (a, b) in zip(ways, pairwise(bounds), strict=True)
        )
        return Choice(tuple(bounds), tuple(ways), steady_s, once_s + (microbatches - 1) * steady_s)
