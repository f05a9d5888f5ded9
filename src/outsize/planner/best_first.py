"""Problem: of many layouts, which to price, and how good may those be that were not?

Layouts wait in a queue by the least step that they can take (floor.py, reach.py), first a bound that needs no
more than a sum, then the sharp one. They are priced, best floor first: exact partition, memory account,
simulation. It ends when the next floor is above what was found, or enough was priced; the least of all
floors, of what was tried and what was not, is what no plan beats.

Best-first branch and bound: Land and Doig, Econometrica 28(3), 1960. Complexity: O(layouts x log layouts)
and the layouts that are tried. Oracle: tests/unit/planner/test_joint.py prices everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final, final

from outsize.ir.plan import Recompute
from outsize.planner.estimate import Estimate, estimate
from outsize.planner.layout import Layout
from outsize.planner.menu import Menu
from outsize.planner.rivals import CLOSE
from outsize.planner.split import Pipeline, Tables

# Layouts that are priced in one search; what is left then counts in the gap.
MOST_TRIED: Final = 24
FEW: Final = 24


@final
@dataclass(frozen=True, eq=False)
class Found:
    """What was priced, what does not fit, and the least step that anything that was allowed could take."""

    estimates: tuple[Estimate, ...]
    rejected: tuple[Pipeline, ...]
    floor_s: float


@final
class Hunt:
    """Layouts by ascending floor, priced until the next one cannot win."""

    def __init__(self, menu: Menu, recompute: Sequence[Recompute]) -> None:
        self._menu, self._recompute = menu, tuple(recompute)
        self._found: list[Estimate] = []
        self._rejected: list[Pipeline] = []
        self._floors: list[float] = []
        self._asked = 0

    def run(self, layouts: Sequence[Layout]) -> Found:
        """Price what may win, best floor first."""
        queue = [(self._least(layout), False, place) for place, layout in enumerate(layouts)]
        heapify(queue)
        self._asked += len(layouts)
        while queue and not self._over(queue[0][0]):
            floor_s, sharp, place = heappop(queue)
            if sharp:
                self._try(layouts[place], floor_s)
            else:
                heappush(queue, (max(floor_s, self._floor(layouts[place])), True, place))
        self._floors += [floor_s for floor_s, *_ in queue]
        return Found(tuple(self._found), tuple(self._rejected), min(self._floors, default=inf))

    def floor_s(self, layouts: Iterable[Layout]) -> float:
        """No cut of any of these makes a shorter step; they are not priced."""
        return min((max(self._least(layout), self._floor(layout)) for layout in layouts), default=inf)

    def _over(self, floor_s: float) -> bool:
        """A few are always priced, so that there is something to compare with."""
        if not self._found:
            return floor_s == inf
        enough = len(self._found) >= MOST_TRIED and not self._few()
        return enough or self._beaten(floor_s)

    def _beaten(self, floor_s: float) -> bool:
        """Whether nothing above this floor can win, and there is enough to compare with."""
        if not self._found or self._few():
            return False
        return floor_s > self._close_s()

    def _close_s(self) -> float:
        """Beyond it nothing wins."""
        return CLOSE * min((f.step_s for f in self._found), default=inf)

    def _few(self) -> bool:
        return self._asked <= FEW

    def _least(self, layout: Layout) -> float:
        if not self._menu.may_fit(layout, self._recompute):
            return inf
        return self._together(layout, self._menu.least_s(layout))

    def _floor(self, layout: Layout, most_s: float = inf) -> float:
        """Of an interleaved layout what its balanced cut takes: its floor would bring all of them first."""
        work, m = self._menu.work(layout), layout.microbatches
        if layout.chunks > 1:
            again_s = self._menu.twice_s(layout) * m / layout.axes.pp
            return work.balanced_s(layout.stages, layout.axes.pp, m) + again_s
        return self._together(layout, self._menu.floor_s(layout, self._recompute, most_s))

    def _together(self, layout: Layout, pipeline_s: float) -> float:
        """With the gradients of replicas, of which a microbatch hides some: one stage at least has its
        part of them, and no more than that of the pipeline's seconds.
        """
        share_s = pipeline_s / layout.microbatches
        return pipeline_s + max(0.0, self._menu.together_s(layout) - share_s)

    def _try(self, layout: Layout, floor_s: float) -> None:
        most_s = inf if self._few() else self._close_s()
        if self._menu.unequal:  # its orders are not all tried
            floor_s = max(floor_s, self._floor(layout, most_s))
            self._floors.append(floor_s)
            if self._beaten(floor_s):
                return
        tables = self._tables(layout, floor_s, most_s)
        if not tables:
            return
        known_s = max(floor_s, tables[0].floor_below(most_s)) if self._exact(layout) else floor_s
        if known_s < inf and self._beaten(known_s):
            self._floors.append(known_s)
            return
        tried = [self._priced(each, most_s) for each in tables]
        priced = [each for each in tried if isinstance(each, Estimate) and each.fits]
        slow_s = min((each for each in tried if isinstance(each, float)), default=inf)
        if priced:
            self._found.append(min(priced, key=lambda each: each.step_s))
        elif slow_s == inf:
            self._rejected.append(tables[0].pipeline)
            return
        # One stage has one cut, and interleaved cuts are balanced.
        only = layout.chunks > 1 or layout.stages == 1
        self._floors.append(min(slow_s, *(each.step_s for each in priced), inf) if only else known_s)

    def _tables(self, layout: Layout, floor_s: float, most_s: float) -> list[Tables]:
        """Block by block is looked at where it may help alone."""
        at_once: list[Recompute] = [again for again in self._recompute if again != "selective"]
        tables = [Tables(each, floor_s) for each in self._menu.pipelines(layout, at_once)]
        by_blocks = len(at_once) < len(self._recompute) and self._menu.by_blocks(layout)
        if not by_blocks or not all(each.may_gain(most_s) for each in tables):
            return tables
        return [Tables(each, floor_s) for each in self._menu.pipelines(layout, self._recompute)]

    def _priced(self, tables: Tables, most_s: float) -> Estimate | float:
        """With the best cut; or seconds that it takes at least, beyond the most: infinite where none fits."""
        pipeline, least_s = tables.pipeline, tables.least_busy_s()
        if pipeline.layout.chunks > 1 and least_s <= most_s < inf:
            least_s = tables.price_below(most_s)
        if least_s > most_s:
            return least_s
        if (cut := tables.split()) is None:
            return inf
        if (busy_s := pipeline.busy_s(cut.bounds, cut.ways)) > most_s:
            return busy_s
        known_s = cut.floor_s if self._exact(pipeline.layout) else 0.0
        return estimate(pipeline, cut.bounds, cut.ways, known_s)

    def _exact(self, layout: Layout) -> bool:
        """Whether its tables say what no cut of it beats."""
        return layout.chunks == 1 and self._menu.exact(layout) and not self._menu.unequal
