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
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.planner.costs.unit_times import Seconds
from outsize.planner.partition.chain_dp import SAME

Index = NDArray[np.int64]
Prices = Callable[[int], Seconds]
"""Maps a stage to the seconds of each run as that stage, infinite where it does not fit."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Holds runs first..end-1 of n units, ascending; `by_end` has their indices by ascending end."""

    units: int
    first: Index
    end: Index
    by_end: Index

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
        return cls(n, starts, ends, np.argsort(ends, kind="stable"))

    def between(self, windows: Sequence[tuple[int, int]]) -> Self:
        """Returns those of the runs that some stage can be: stage s begins in `windows[s]`, ends included,
        and ends where the next stage can begin, the last one with the last unit. Windows ascend.
        """
        firsts, lasts = np.array([*windows, (self.units, self.units)]).T
        units = np.arange(self.units + 1)
        least = np.searchsorted(lasts, units, side="left")
        most = np.searchsorted(firsts, units, side="right") - 1
        least_end, most_end = least[self.end] - 1, most[self.end] - 1
        kept = np.maximum(least[self.first], least_end) <= np.minimum(most[self.first], most_end)
        kept &= (least[self.first] <= most[self.first]) & (least_end <= most_end)
        ends = self.end[kept]
        return replace(self, first=self.first[kept], end=ends, by_end=np.argsort(ends, kind="stable"))

    def beginning(self, first: int, last: int) -> slice:
        """Returns the slice of the runs that begin with one of these units."""
        return slice(
            int(np.searchsorted(self.first, first)), int(np.searchsorted(self.first, last, side="right"))
        )

    def bottleneck(self, stages: int, price: Prices) -> float:
        """Returns the least possible maximum over stages; infinite when nothing is feasible."""
        if not len(self.first):
            return float(np.inf)
        ends, places = np.unique(self.end[self.by_end], return_index=True)
        best = np.full(self.units + 1, np.inf)
        best[0] = 0.0
        for stage in range(stages):
            slowest = np.maximum(best[self.first], price(stage))[self.by_end]
            best = np.full(self.units + 1, np.inf)
            best[ends] = np.minimum.reduceat(slowest, places)
            if not np.isfinite(best).any():  # No stage can begin anywhere, so the later ones are not priced.
                return float(np.inf)
        return float(best[self.units])

    def cut(self, stages: int, price: Prices, limit: float, traffic: Index) -> tuple[int, ...]:
        """Returns, of the cuts with no stage above the limit (there is one), the earliest with least traffic.

        `traffic` is that of each run; the result is the first unit of each stage, then n.
        """
        firsts, places = np.unique(self.first, return_index=True)
        later_traffic = np.full(self.units + 1, np.inf)
        later_traffic[self.units] = 0.0
        choices: list[Index] = []
        for stage in reversed(range(stages)):
            total = np.where(price(stage) <= limit, traffic + later_traffic[self.end], np.inf)
            later_traffic = np.full(self.units + 1, np.inf)
            later_traffic[firsts] = np.minimum.reduceat(total, places)
            choices.append(self._earliest(total <= later_traffic[self.first]))
        return self._followed(choices[::-1])

    def _earliest(self, best: NDArray[np.bool_]) -> Index:
        """Returns for each first unit the first end that is as good as the best."""
        chosen = np.zeros(self.units + 1, np.int64)
        places = np.flatnonzero(best)[::-1]
        chosen[self.first[places]] = self.end[places]
        return chosen

    def _followed(self, choices: list[Index]) -> tuple[int, ...]:
        bounds = [0]
        for choice in choices:
            bounds.append(int(choice[bounds[-1]]))
        return tuple(bounds)
