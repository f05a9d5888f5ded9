"""Problem: solve the partition of chain_dp.py where only few of the runs of units can be a stage at all.

A cut whose slowest stage takes no longer than a limit has no stage that computes for longer than that, so of
the n (n + 1) / 2 runs only those within the limit are listed and priced: about n^2 / p of them. The least
bottleneck T over them is the true one if T is within the limit; otherwise the limit has to be raised. Of
these only runs are left that begin where the stages before can end, and end where those after can begin: of
one stage a single run, of two stages 2 n. Ties are broken as in chain_dp.py.

Symbols: n -> units, p -> stages. Complexity: O(p r) for r runs, each pass a few array operations. Oracle:
tests/unit/planner/partition/test_sparse_chain_dp.py compares with chain_dp.py on all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.planner.costs.unit_times import Seconds
from outsize.planner.partition.chain_dp import SAME

Index = NDArray[np.int64]
Prices = Callable[[int], Seconds]
"""Maps a stage to the seconds of each run of its window as that stage, infinite where it does not fit."""


@final
@dataclass(frozen=True, eq=False)
class Runs:
    """Holds runs first..end-1 of n units, ascending; `windows[stage]` are those that a stage can be, all of
    them where there are no windows.
    """

    units: int
    first: Index
    end: Index
    windows: tuple[slice, ...] = ()

    @classmethod
    def within(cls, total: Seconds, limit_s: float) -> Self:
        """Returns the runs that take no longer than the limit; `total`, of shape (n + 1,), are seconds summed
        over units.
        """
        n = len(total) - 1
        first = np.arange(n)
        last = np.searchsorted(total, total[:-1] + limit_s * SAME, side="right") - 1
        lengths = np.maximum(last - first, 0)
        starts = np.repeat(first, lengths)
        ends = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) + starts + 1
        return cls(n, starts, ends)

    def between(self, begins: Sequence[tuple[int, int]]) -> Self:
        """Returns those of the runs that some stage can be: stage s begins in `begins[s]`, ends included,
        and ends where the next stage can begin, the last one with the last unit. Both ends ascend.
        """
        firsts, lasts = np.array([*begins, (self.units, self.units)]).T
        units = np.arange(self.units + 1)
        least = np.searchsorted(lasts, units, side="left")
        most = np.searchsorted(firsts, units, side="right") - 1
        least_end, most_end = least[self.end] - 1, most[self.end] - 1
        kept = np.maximum(least[self.first], least_end) <= np.minimum(most[self.first], most_end)
        kept &= (least[self.first] <= most[self.first]) & (least_end <= most_end)
        first = self.first[kept]
        starts = np.searchsorted(first, firsts[:-1]).tolist()
        stops = np.searchsorted(first, lasts[:-1], side="right").tolist()
        return replace(self, first=first, end=self.end[kept], windows=tuple(map(slice, starts, stops)))

    def window(self, stage: int) -> slice:
        """Returns the runs that begin where a stage can begin."""
        return self.windows[stage] if self.windows else slice(0, len(self.first))

    def bottleneck(self, stages: int, price: Prices) -> float:
        """Returns the least possible maximum over stages; infinite when nothing is feasible."""
        best = np.full(self.units + 1, np.inf)
        best[0] = 0.0
        for stage in range(stages):
            by_end, ends, places = self._ending(stage)
            if not len(ends):
                return float(np.inf)
            slowest = np.maximum(best[self.first[self.window(stage)]], price(stage))[by_end]
            best = np.full(self.units + 1, np.inf)
            best[ends] = np.minimum.reduceat(slowest, places)
            if not np.isfinite(best).any():  # No stage can begin anywhere, so the later ones are not priced.
                return float(np.inf)
        return float(best[self.units])

    def cut(self, stages: int, price: Prices, limit: float, traffic: Index) -> tuple[int, ...]:
        """Returns, of the cuts with no stage above the limit (there is one), the earliest with least traffic.

        `traffic` is that of each run; the result is the first unit of each stage, then n.
        """
        later_traffic = np.full(self.units + 1, np.inf)
        later_traffic[self.units] = 0.0
        choices: list[Index] = []
        for stage in reversed(range(stages)):
            window = self.window(stage)
            first, end = self.first[window], self.end[window]
            total = np.where(price(stage) <= limit, traffic[window] + later_traffic[end], np.inf)
            later_traffic = np.full(self.units + 1, np.inf)
            places = _starts(first)
            later_traffic[first[places]] = np.minimum.reduceat(total, places)
            choices.append(self._earliest(first, end, total <= later_traffic[first]))
        return self._followed(choices[::-1])

    def _ending(self, stage: int) -> tuple[Index, Index, Index]:
        """Returns the places of a stage's runs by ascending end, the ends, and where each of them starts."""
        window = self.window(stage)
        key = window.start, window.stop
        if key not in self._by_end:
            ends = self.end[window]
            # numpy sorts numbers of 16 bits by their digits, in a tenth of the time.
            by_end = np.argsort(ends.astype(np.uint16) if self.units < 1 << 16 else ends, kind="stable")
            ascending = ends[by_end]
            places = _starts(ascending)
            self._by_end[key] = by_end, ascending[places], places
        return self._by_end[key]

    @cached_property
    def _by_end(self) -> dict[tuple[int, int], tuple[Index, Index, Index]]:
        return {}

    def _earliest(self, first: Index, end: Index, best: NDArray[np.bool_]) -> Index:
        """Returns for each first unit the first end that is as good as the best."""
        chosen = np.zeros(self.units + 1, np.int64)
        places = np.flatnonzero(best)[::-1]
        chosen[first[places]] = end[places]
        return chosen

    def _followed(self, choices: list[Index]) -> tuple[int, ...]:
        bounds = [0]
        for choice in choices:
            bounds.append(int(choice[bounds[-1]]))
        return tuple(bounds)


def _starts(ascending: Index) -> Index:
    """Returns where each of the numbers begins."""
    return np.flatnonzero(np.diff(ascending, prepend=-1))
