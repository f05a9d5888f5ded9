"""Problem: list all downsets between two of them, and find the maximum of a function over those inside each.

The downsets D with least <= D <= most, both downsets of the graph, are closed under union and intersection.
Adding one unit at a time to `least` reaches each of them, and the maximum over all smaller downsets is passed
along the same steps:

    best(D) = max(own(D), max over the maximal members x of D of best(D - x))

Source: the order ideals of a poset (Birkhoff, "Rings of sets", 1937); dynamic programming over the ideals of
an operator graph is that of Tarnawski et al., NeurIPS 2020 (arXiv 2006.16423). Deviation: a maximum is passed
along the steps, so that pairs of downsets are never compared.
Complexity: O(N w) to build and O(N w) for each maximum, for N downsets with at most w steps each.
Oracle: tests/unit/planner/dag/test_dag_partition.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from outsize.planner.dag.dag import Dag, Units, members

Ticks = NDArray[np.int64]
NOTHING = -1


@final
@dataclass(frozen=True, eq=False)
class Lattice:
    """Holds downsets, smaller ones first, with their weights and what leaves them (`crossing`), and the steps
    between them.
    """

    downsets: list[Units]
    index: dict[Units, int]
    weight: Ticks
    crossing: Ticks
    levels: list[int]
    steps: NDArray[np.int64]
    starts: NDArray[np.int64]

    def best_inside(self, own: Ticks) -> Ticks:
        """Returns for each downset the maximum of `own` over all downsets of this lattice inside it."""
        best = own.copy()
        for first, end in zip(self.levels[1:], self.levels[2:], strict=False):
            begin, stop = self.starts[first - 1], self.starts[end - 1]
            inside = np.maximum.reduceat(
                best[self.steps[begin:stop]], self.starts[first - 1 : end - 1] - begin
            )
            np.maximum(best[first:end], inside, out=best[first:end])
        return best

    def witness(self, downset: Units, best: Ticks, own: Ticks) -> Units:
        """Returns a downset inside `downset` whose own value is its best."""
        position = self.index[downset]
        while own[position] != best[position]:
            begin, stop = self.starts[position - 1], self.starts[position]
            position = next(int(s) for s in self.steps[begin:stop] if best[s] == best[position])
        return self.downsets[position]


@final
class _Walk:
    """Lists downsets level after level: each level has one unit more."""

    def __init__(self, dag: Dag, flow: Dag, crossing: Sequence[int], least: Units, most: Units) -> None:
        self._dag, self._flow, self._most, self._out = dag, flow, most, crossing
        self.downsets, self.index, self.levels = [least], {least: 0}, [0, 1]
        self.weight = [dag.weight(least)]
        leaving = members(least) if crossing else ()
        self.crossing = [sum(crossing[u] for u in leaving if flow.after[u] & ~least)]
        self.sources: list[list[int]] = [[]]
        self._ready = [_mask_ready(dag, least, most)]

    def level(self) -> None:
        """Adds one unit to each downset of the last level, in every way."""
        for here in range(self.levels[-2], self.levels[-1]):
            for unit in members(self._ready[here]):
                self._step(here, unit)
        self.levels.append(len(self.downsets))

    def _step(self, position: int, unit: int) -> None:
        bigger = self.downsets[position] | 1 << unit
        known = self.index.get(bigger)
        if known is not None:
            self.sources[known].append(position)
            return
        self.index[bigger] = len(self.downsets)
        self.downsets.append(bigger)
        self.sources.append([position])
        self.weight.append(self.weight[position] + self._dag.weights[unit])
        self.crossing.append(self.crossing[position] + self._more_crossing(bigger, unit))
        self._ready.append(self._more_ready(self._ready[position], bigger, unit))

    def _more_ready(self, ready: Units, downset: Units, unit: int) -> Units:
        ready ^= 1 << unit
        for follower in members(self._dag.after[unit] & self._most):
            if self._dag.before[follower] & ~downset == 0:
                ready |= 1 << follower
        return ready

    def _more_crossing(self, downset: Units, unit: int) -> int:
        """Returns how the crossing changes: the new unit's output leaves if a later unit needs it; outputs
        that it needed last do not.
        """
        if not self._out:
            return 0
        more = self._out[unit] if self._flow.after[unit] & ~downset else 0
        for source in members(self._flow.before[unit]):
            if self._flow.after[source] & ~downset == 0:
                more -= self._out[source]
        return more


def _mask_ready(dag: Dag, least: Units, most: Units) -> Units:
    ready = 0
    for unit in members(most & ~least):
        if dag.before[unit] & ~least == 0:
            ready |= 1 << unit
    return ready


def between(
    dag: Dag, flow: Dag, crossing: Sequence[int], least: Units, most: Units, limit: int
) -> Lattice | None:
    """Returns all downsets of `dag` from `least` to `most`; None when there are more than `limit`.

    `crossing[u]` ticks pass a boundary that lies between unit u and one of its followers in `flow`; it is
    empty when nothing does.
    """
    walk = _Walk(dag, flow, crossing, least, most)
    while walk.levels[-1] > walk.levels[-2]:
        if len(walk.downsets) > limit:
            return None
        walk.level()
    flat = [source for sources in walk.sources for source in sources]
    starts = np.cumsum([0] + [len(s) for s in walk.sources[1:]], dtype=np.int64)
    return Lattice(
        walk.downsets,
        walk.index,
        np.array(walk.weight, np.int64),
        np.array(walk.crossing, np.int64),
        walk.levels[:-1],
        np.array(flat, np.int64),
        starts,
    )
