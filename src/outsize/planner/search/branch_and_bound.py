"""Problem: which of many layouts should be priced, and how good can the others be at most?

Layouts wait in a queue (bounds/best_first.py) by a lower bound of their step (bounds/step_time.py,
bounds/chain.py), first a bound that needs only sums. The layout with the least bound has it sharpened until
another one's is less; a layout whose bound is sharp and still the least is priced: exact partition, memory
account, simulation. The best cut is moved (evaluate/local_search.py) before layouts are priced whose bound is
near its step. The loop ends when the next bound exceeds the best step, enough layouts were priced, or the
time that was asked for is over (incumbents.py); no plan beats the least of all bounds, of layouts that were
priced and that were not.

Source: best-first branch and bound, Land and Doig, Econometrica 28(3), 1960. Complexity: O(layouts x log
layouts) and the layouts that are priced. Oracle: tests/unit/planner/search/test_joint.py prices all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from operator import itemgetter
from typing import Final, final

from outsize.planner.bounds.best_first import BestFirst, Bounded
from outsize.planner.bounds.step_time import StepBound
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.local_search import polish
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import CLOSE
from outsize.planner.layout.layout import Layout
from outsize.planner.partition.stage_prices import Pipeline, StagePrices
from outsize.planner.partition.stage_weights import Demand
from outsize.planner.search.incumbents import Incumbents
from outsize.planner.search.step_floors import StepFloors
from outsize.policies.activations import Recompute

# One search prices at most this many layouts; the gap accounts for the others.
MOST_PRICED: Final = 24
# Of at most this many all are priced, none is pruned, so that a plan has alternatives to compare with.
MOST_COMPARED: Final = 24
# The best cut is moved when the next bound has this share of its step: moves seldom bring more.
SOON: Final = 0.95
# A bound this much above what has to be beaten is above it whatever the rounding of sums is.
SURELY: Final = 1 + 1e-6
# Stages that only hold frozen weights are chosen where the step of others takes this many times as long.
DEARER: Final = 1.25


@final
@dataclass(frozen=True, eq=False)
class SearchResult:
    """Holds what was priced, what does not fit, and a lower bound over everything that was allowed.

    `slower` are layouts that were not priced because they cannot win, the least bound first; only of a few.
    """

    candidates: tuple[Candidate, ...]
    rejected: tuple[Pipeline, ...]
    floor_s: float
    slower: tuple[Layout, ...] = ()

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Returns the layouts that fit or may fit, the fastest first."""
        priced = sorted(self.candidates, key=lambda candidate: candidate.step_s)
        return tuple(dict.fromkeys((*(candidate.layout for candidate in priced), *self.slower)))


def polished(candidate: Candidate, pricing: Pricing) -> Candidate:
    """Returns the candidate with its cut moved to the shortest step that is near; it is moved once."""
    moved = pricing.once(("polished", candidate), lambda: polish(candidate))
    return pricing.once(("polished", moved), lambda: moved)


@final
class BranchAndBound:
    """Prices layouts by ascending lower bound until the next one cannot win.

    Of a few layouts all are priced, so that a plan can be compared with them, where it `compares` and their
    cuts need not be arranged by kinds; those in pairs are priced where they may win. Nothing that takes
    longer than `most_s` is priced then. Where all are known to lose to another plan, `any_fits` ends with the
    first that fits. `incumbents` are told of each candidate that is better, and end the search when its time
    is over.
    """

    def __init__(
        self,
        pricing: Pricing,
        recompute: Sequence[Recompute],
        *,
        compares: bool = True,
        most_s: float = inf,
        any_fits: bool = False,
        incumbents: Incumbents | None = None,
    ) -> None:
        self._pricing, self._recompute = pricing, tuple(recompute)
        self.floors = StepFloors(pricing, self._recompute)
        self._compares, self._most_s = compares, most_s
        self._most_priced = 1 if any_fits else MOST_PRICED
        self._incumbents = incumbents or Incumbents()
        self._candidates: list[Candidate] = []
        self._rejected: list[Pipeline] = []
        self._slower: list[tuple[float, Layout]] = []
        self._floors: list[float] = []
        self._asked = 0

    def run(self, layouts: Sequence[Layout]) -> SearchResult:
        """Prices what may win, by ascending lower bound."""
        queue, self._asked = self._queue(layouts), sum(not layout.pairs for layout in layouts)
        self._compares &= not any(map(self._pricing.is_arranged, layouts))
        while not queue.is_empty and not self._is_finished(queue.least_s):
            if self._polishes(queue.least_s):
                continue
            if (least := queue.pop()) is None:
                continue
            layout, floor_s = layouts[least.number], least.least_s
            beaten = layout.pairs and bool(self._candidates) and floor_s > self._cutoff_s()
            if beaten or not self._pricing.has_pieces(layout):
                self._floors.append(floor_s)  # The bound holds, but none of its cuts can win, or be priced.
            elif not self._price_or_reject(layout, floor_s):
                self._slower.append((floor_s, layout))
        return self._result([(self._waits_s(each, layouts), layouts[each.number]) for each in queue.waiting])

    def _queue(self, layouts: Sequence[Layout]) -> BestFirst:
        """Returns the layouts by their lower bounds, which are sharpened as far as they are needed."""
        bounds = dict[int, StepBound]()

        def sharpened(choice: Bounded, next_s: float) -> Bounded:
            layout, floor_s = layouts[choice.number], choice.least_s
            if layout.chunks > 1:
                return Bounded(self._waits_s(choice, layouts), True, choice.number)
            if choice.number not in bounds:
                bounds[choice.number] = self.floors.bound(layout)
            bound = bounds[choice.number]
            bound.exceeds(self.most_pipeline_s(layout))
            sharper_s = max(floor_s, self.floors.together_s(layout, bound.low_s))
            while not bound.sharp and sharper_s <= next_s:
                bound.sharpen()
                sharper_s = max(floor_s, self.floors.together_s(layout, bound.low_s))
            return Bounded(sharper_s, bound.sharp, choice.number)

        return BestFirst([self.floors.least_s(layout) for layout in layouts], sharpened)

    def _waits_s(self, choice: Bounded, layouts: Sequence[Layout]) -> float:
        """Returns the bound of a layout that waits; an interleaved one has that of its balanced cut."""
        layout = layouts[choice.number]
        if choice.is_sharp or layout.chunks == 1:
            return choice.least_s
        return max(choice.least_s, self.floors.likely_s(layout))

    def _polishes(self, floor_s: float) -> bool:
        """Moves the cut of the best layout, as the search does in its end, where that may show that nothing
        from this bound on can win; returns whether its step became shorter.
        """
        if not self._candidates or self._prices_all or self._most_priced == 1:
            return False
        at = min(range(len(self._candidates)), key=lambda place: self._candidates[place].step_s)
        best = self._candidates[at]
        if floor_s < SOON * best.step_s:
            return False
        self._candidates[at] = moved = polished(best, self._pricing)
        self._tell(moved, floor_s)
        return self._candidates[at] is not best

    def _tell(self, found: Candidate, floor_s: float) -> None:
        """Tells of a candidate; the layouts that wait have this lower bound at least."""
        least_s = min(found.step_s, floor_s, *self._floors)
        self._incumbents.found(found.layout.axes, found.step_s, least_s)

    def _result(self, waiting: Sequence[tuple[float, Layout]]) -> SearchResult:
        floors = (*self._floors, *(floor_s for floor_s, _ in waiting))
        few = (*self._slower, *waiting) if self._asked <= MOST_COMPARED else ()
        return SearchResult(
            tuple(self._candidates),
            tuple(self._rejected),
            min(floors, default=inf),
            tuple(layout for floor_s, layout in sorted(few, key=itemgetter(0)) if floor_s < inf),
        )

    def floor_s(self, layouts: Iterable[Layout]) -> float:
        """Returns a lower bound over all cuts of these layouts, without pricing them."""
        queue, least = self._queue(tuple(layouts)), None
        while least is None and not queue.is_empty:
            least = queue.pop()
        return inf if least is None else least.least_s

    def _is_finished(self, floor_s: float) -> bool:
        """Returns whether the search ends with the layouts that wait; a few are always priced."""
        if not self._candidates:
            finished = floor_s == inf or self._is_pruned(floor_s)
        else:
            enough = len(self._candidates) >= self._most_priced and not self._prices_all
            finished = enough or self._is_pruned(floor_s)
        return finished or self._incumbents.end_search()

    def _is_pruned(self, floor_s: float) -> bool:
        """Returns whether a layout with this lower bound is pruned, because it cannot win."""
        return not self._prices_all and floor_s > self._cutoff_s()

    def most_pipeline_s(self, layout: Layout) -> float:
        """Returns the seconds of a pipeline beyond which its layout cannot win."""
        beyond_s = inf if self._prices_all else self._cutoff_s()
        return beyond_s if beyond_s == inf else SURELY * beyond_s - self._pricing.bounds.update_s(layout)

    def _cutoff_s(self) -> float:
        """Returns the seconds beyond which a layout is pruned: it would not be close to the best one yet."""
        return min(self._most_s, CLOSE * min((f.step_s for f in self._candidates), default=inf))

    @property
    def _prices_all(self) -> bool:
        """Returns whether the layouts are so few that all are priced for comparison, none is pruned."""
        return self._compares and self._asked <= MOST_COMPARED

    def _price_or_reject(self, layout: Layout, floor_s: float) -> bool:
        """Prices or rejects a layout; returns False where it was given up because it cannot win."""
        most_s = inf if self._prices_all else self._cutoff_s()
        if not self._pricing.may_be_arranged(layout):
            self._floors.append(floor_s)
            return True
        if self._pricing.unequal:  # Not all orders of unequal devices are tried.
            floor_s = max(floor_s, self.floors.below_s(layout, most_s))
            self._floors.append(floor_s)
            if self._is_pruned(floor_s):
                return False
        return self._reject(layout) if self.floors.refuted(layout) else self._cut(layout, floor_s, most_s)

    def _reject(self, layout: Layout) -> bool:
        self._rejected.extend(islice(self._pricing.pipelines(layout, self._recompute), 1))
        return True

    def _cut(self, layout: Layout, floor_s: float, most_s: float) -> bool:
        """Prices the best cut of a layout; returns as `_price_or_reject`."""
        best, least_s, pipeline = None, inf, None
        for demand in self._pricing.demands(layout):
            if demand is None and (best is not None or least_s < inf):
                break
            tables = self._tables(layout, floor_s, most_s, demand)
            if not tables:
                return True
            candidate, candidate_floor_s = self._best_of(tables, floor_s, most_s)
            if best is None or (candidate is not None and best.step_s > DEARER * candidate.step_s):
                best = candidate or best
            least_s, pipeline = min(least_s, candidate_floor_s), tables[0].pipeline
        if best is not None:
            self._candidates.append(best)
            self._tell(best, floor_s)
        if least_s < inf:
            self._floors.append(least_s)
        elif pipeline is not None:
            self._rejected.append(pipeline)
        return best is not None or least_s == inf

    def _best_of(
        self, tables: Sequence[StagePrices], floor_s: float, most_s: float
    ) -> tuple[Candidate | None, float]:
        """Returns the best cut of a layout, and a lower bound of all its cuts: infinite where none fits."""
        layout = tables[0].pipeline.layout
        known_s = max(floor_s, tables[0].floor_below(most_s)) if self.floors.is_sharp(layout) else floor_s
        if known_s < inf and self._is_pruned(known_s):
            return None, known_s
        tried = [self._priced(candidate, most_s) for candidate in tables]
        priced = [
            candidate for candidate in tried if isinstance(candidate, Candidate) and candidate.may_be_chosen
        ]
        slow_s = min((candidate for candidate in tried if isinstance(candidate, float)), default=inf)
        if not priced and slow_s == inf:
            return None, inf
        # One stage has one cut, and interleaved cuts are balanced.
        single_cut = layout.chunks > 1 or layout.stages == 1
        best = min(priced, key=lambda candidate: candidate.step_s, default=None)
        least_s = min(slow_s, inf if best is None else best.step_s)
        return best, least_s if single_cut else known_s

    def _tables(
        self, layout: Layout, floor_s: float, most_s: float, demand: Demand | None
    ) -> list[StagePrices]:
        """Returns the tables; block by block recompute is tried where only it may help."""
        by_blocks = self.floors.by_blocks(layout)
        if not by_blocks or not self._pricing.bounds.refuted(layout, self.floors.unselective):
            tables = self._stage_prices(layout, self.floors.unselective, floor_s, demand)
            if not by_blocks or not all(each.may_gain(most_s) for each in tables):
                return tables
        return self._stage_prices(layout, self._recompute, floor_s, demand)

    def _stage_prices(
        self, layout: Layout, recompute: Sequence[Recompute], floor_s: float, demand: Demand | None
    ) -> list[StagePrices]:
        """Returns the tables of a layout's pipelines that may use these ways to recompute."""
        pipelines = self._pricing.pipelines(layout, recompute)
        return [
            self._pricing.stage_prices(replace(pipeline, demand=demand), floor_s) for pipeline in pipelines
        ]

    def _priced(self, tables: StagePrices, most_s: float) -> Candidate | float:
        """Prices the best cut, or returns a lower bound of its seconds beyond `most_s`: infinite where none
        fits.
        """
        pipeline, least_s = tables.pipeline, tables.least_busy_s()
        if pipeline.layout.chunks > 1 and least_s <= most_s < inf:
            least_s = tables.price_below(most_s)
        if least_s > most_s:
            return least_s
        if (cut := tables.split()) is None:
            return inf
        if (busy_s := pipeline.busy_s(cut)) > most_s:
            return busy_s
        known_s = tables.floor_s if self.floors.is_sharp(pipeline.layout) else 0.0
        candidate = Candidate.of(pipeline, cut.bounds, cut.choices, known_s)
        return candidate.least_s if most_s < inf and candidate.least_s > most_s else candidate
