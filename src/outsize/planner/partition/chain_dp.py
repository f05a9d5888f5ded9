"""Problem: cut n units in a row into exactly p runs so that the slowest run is as fast as possible.

    minimise  max over stages s of  price[s][first_s, end_s]      runs contiguous, none empty, all units

This is the chain partitioning of PipeDream (arXiv 1806.03377, sec. 3.1) without replication; the min-max
dynamic program is Bokhari's (IEEE Trans. Computers 37(1), 1988). Symbols: n -> units, p -> stages,
`price(s)[first, end]` -> seconds of stage s with the units first..end-1, infinite where they do not fit.

    best_0[0] = 0
    best_s[end] = min over first of  max(best_{s-1}[first], price(s)[first, end])

It is exact for any price that depends on (first, end, s) alone: memory/range_tables.py says which do. Three
passes make the answer unique: the bottleneck T; among the cuts with no stage above T those with least
`traffic` (lexicographic minima of a max and a sum do not decompose, sums under a fixed T do); among those the
earliest cuts. Prices within a billionth of T count as equal: sums of equal units differ by rounding.
Deviation: no pruning; each step is one vectorised minimum over a matrix. Complexity: O(p n^2) time, O(n^2)
memory besides the prices; 1,000 units and 8 stages take less than a second. Oracle:
tests/unit/planner/partition/test_chain_dp.py compares with all cuts of small chains.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Price = Callable[[int], NDArray[np.float64]]
SAME = 1 + 1e-9


def partition(stages: int, price: Price, traffic: NDArray[np.int64]) -> tuple[int, ...] | None:
    """Returns the first unit of each stage, then the number of units; None when no cut has a finite price.

    `price(s)` and `traffic` have shape (n + 1, n + 1); only entries with first < end are read.
    """
    limit = bottleneck(stages, price, len(traffic) - 1)
    if not np.isfinite(limit):
        return None
    choices = _least_traffic(stages, price, limit * SAME, traffic)
    bounds = [0]
    for choice in choices:
        bounds.append(int(choice[bounds[-1]]))
    return tuple(bounds)


def bottleneck(stages: int, price: Price, units: int) -> float:
    """Returns the least possible maximum over stages; infinite when nothing is feasible."""
    best = np.full(units + 1, np.inf)
    best[0] = 0.0
    runs = _runs(units)
    for stage in range(stages):
        slowest = np.maximum(best[:, None], price(stage))
        best = np.min(slowest, axis=0, where=runs, initial=np.inf)
    return float(best[units])


def _least_traffic(
    stages: int, price: Price, limit: float, traffic: NDArray[np.int64]
) -> list[NDArray[np.intp]]:
    """Returns, for each stage and each first unit, the earliest end with least traffic in all later
    stages.
    """
    units = len(traffic) - 1
    runs = _runs(units)
    later_traffic = np.full(units + 1, np.inf)
    later_traffic[units] = 0.0
    choices: list[NDArray[np.intp]] = []
    for stage in reversed(range(stages)):
        total = np.where(runs & (price(stage) <= limit), traffic + later_traffic, np.inf)
        choices.append(np.argmin(total, axis=1))
        later_traffic = np.min(total, axis=1)
    return choices[::-1]


def _runs(units: int) -> NDArray[np.bool_]:
    """Returns a mask that is true where first < end."""
    return np.triu(np.ones((units + 1, units + 1), np.bool_), k=1)
