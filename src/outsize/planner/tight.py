"""Problem: which cut makes the shortest step, when a stage that does not fit may recompute some of its units?

The price of a run of units as stage s is that of split.py without links: floor.py's critical path. Where the
run does not fit, each of m microbatches takes e seconds more, of the choice of units that fits and costs
least (recompute.py). e is not known for all runs; it is at least

    e >= (peak - room) / microbatches in flight x least seconds per byte of the run's units

for a unit that is recomputed frees no more than what it saves. So: take these bounds for prices, find the
best cut, compute e of its runs, until a best cut has no bound left in it. That cut is exact, as in a best
first search; after MOST choices (or MOST_UNITS) it is the best of those met. All cuts met and the one that
was given are simulated, links and all; the shortest step that fits is taken, never longer than the given one.

Where stages share a device the cut stays, and each stage that recomputes takes in turn what room the others
leave. Complexity: MOST choices and partitions. Oracle: tests/unit/planner/test_tight.py, all cuts and all
subsets of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from math import inf
from typing import Final, final

import numpy as np

from outsize.ir.segments import Run
from outsize.planner.estimate import Estimate
from outsize.planner.floor import Work
from outsize.planner.memory import peak_table
from outsize.planner.menu import Menu
from outsize.planner.moments import moments_by_stage
from outsize.planner.partition import bottleneck, partition
from outsize.planner.ranges import Bytes, Seconds
from outsize.planner.seconds import fastest
from outsize.planner.selective import Fine, Units, choice, kept_case, recomputing, shared_choice
from outsize.planner.split import Case

MOST: Final = 24
# Units of all stages for which something was chosen: no further cut is looked at then.
MOST_UNITS: Final = 1_500
# Stages that share devices with others and are looked at.
SHARING: Final = 12
# Less than this share of a step is no reason to look for another cut.
WORTH: Final = 1e-3


def selective(best: Estimate, menu: Menu, optimizer: str) -> tuple[Estimate, dict[int, Units]]:
    """The best cut and choices of units by stage; the estimate given, and none, where nothing is better."""
    layout, chosen = best.layout, dict[int, Units]()
    if layout.group > 1 or layout.hosted or len(best.pipeline.ways[0]) == 1:
        return best, chosen
    if layout.schedule.startswith("zero-bubble"):  # a stage that recomputes some units splits no backward
        return best, chosen
    if layout.chunks > 1:
        return _one_by_one(best, menu, optimizer)
    whole = any(case.recompute != "none" for case in best.cases)
    least_s = menu.work(layout).floor_s(layout.schedule, layout.stages, layout.axes.pp, layout.microbatches)
    if not whole and best.floor_s <= least_s * (1 + WORTH):
        return best, chosen
    tight = _Tight(best, menu, optimizer)
    for bounds in tight.cuts():
        found = tight.estimate(bounds)
        if found is not None and found[0].fits and found[0].step_s < best.step_s:
            best, chosen = found
    return replace(best, floor_s=min(best.step_s, tight.floor_s)), chosen


def _one_by_one(best: Estimate, menu: Menu, optimizer: str) -> tuple[Estimate, dict[int, Units]]:
    """The same cut where stages share devices: each that recomputes takes what room the others leave."""
    found, chosen = best, dict[int, Units]()
    whole = [stage for stage, case in enumerate(best.cases) if case.recompute != "none"]
    for stage in whole[:SHARING]:
        some = shared_choice(found, stage, Fine.of(menu, best.pipeline, stage, optimizer))
        if some is not None:
            more = chosen | {stage: some.units}
            tried = recomputing(best.pipeline, best.bounds, best.ways, more, menu, optimizer)
            if tried.fits and tried.step_s <= found.step_s:
                found, chosen = replace(tried, floor_s=best.floor_s), more
    return found, chosen


@final
class _Tight:
    """Prices of runs, sharpened where a cut wants them."""

    def __init__(self, given: Estimate, menu: Menu, optimizer: str) -> None:
        self._given, self._pipeline, self._menu, self._optimizer = given, given.pipeline, menu, optimizer
        layout, n = given.layout, given.pipeline.case.units
        how = layout.schedule, layout.stages, layout.microbatches, layout.axes.pp
        self._worst, self._m, self._stages = moments_by_stage(*how), layout.microbatches, range(layout.stages)
        self._kept = [kept_case(given.pipeline, stage) for stage in self._stages]
        self._over = [self._excess(stage) for stage in self._stages]
        self._inside = np.arange(n + 1)[:, None] < np.arange(n + 1)
        self._known: dict[tuple[int, Run], tuple[Units | None, float]] = {}
        self._extra = [self._least_extra_s(stage) for stage in self._stages]
        self._bound = [table.copy() for table in self._extra]
        self._fine = dict[str, Fine]()

    def cuts(self) -> list[tuple[int, ...]]:
        """The one that was given, and the best ones by what was known."""
        found = dict.fromkeys([self._given.bounds])
        self._learn(self._given.bounds)
        while len(self._known) < MOST and self._units_known() < MOST_UNITS:
            price = partial(self._price, self._extra)
            bounds = partition(len(self._stages), price, np.zeros_like(self._over[0]))
            if bounds is None:
                break
            found[bounds] = None
            if not self._learn(bounds):
                break
        return list(found)

    def _units_known(self) -> int:
        ends = self._menu.ends(self._given.layout)
        return sum(ends[end] - ends[first] for _, (first, end) in self._known)

    def estimate(self, bounds: tuple[int, ...]) -> tuple[Estimate, dict[int, Units]] | None:
        """With the stages that do not fit recomputed as they do best; None where one never fits."""
        chosen, ways = dict[int, Units](), [0] * len(self._stages)
        for stage, run in enumerate(pairwise(bounds)):
            if self._over[stage][run] > 0:
                units, extra_s = self._known.get((stage, run), (None, inf))
                if extra_s == inf:
                    return None
                ways[stage] = self._whole_way(stage, run) or 0 if units is None else 0
                chosen |= {} if units is None else {stage: units}
        found = recomputing(self._pipeline, bounds, ways, chosen, self._menu, self._optimizer)
        return found, chosen

    def _learn(self, bounds: tuple[int, ...]) -> bool:
        """What the runs of a cut take; whether that was not known."""
        new = [
            (stage, run)
            for stage, run in enumerate(pairwise(bounds))
            if self._over[stage][run] > 0 and (stage, run) not in self._known
        ]
        for stage, run in new:
            units, extra_s, least_s = self._choice(stage, run)
            self._known[stage, run] = units, extra_s
            self._extra[stage][run], self._bound[stage][run] = extra_s, max(least_s, self._bound[stage][run])
        return bool(new)

    def _choice(self, stage: int, run: Run) -> tuple[Units | None, float, float]:
        """Some units, or else all of them (None) where that fits; their seconds, and a bound of these."""
        kind = self._pipeline.device(stage).kind
        if kind not in self._fine:
            self._fine[kind] = Fine.of(self._menu, self._pipeline, stage, self._optimizer)
        found = choice(self._pipeline, stage, run, self._fine[kind])
        if found is not None:
            return found.units, found.extra_s, found.least_s
        fits = self._whole_way(stage, run) is not None
        extra_s = float(self._kept[stage].seconds.forward[slice(*run)].sum()) if fits else inf
        return None, extra_s, 0.0 if fits else inf

    def _whole_way(self, stage: int, run: Run) -> int | None:
        """The first way to recompute all of a run that fits."""
        room, ways = self._pipeline.room_bytes(stage), enumerate(self._pipeline.ways[stage])
        again = ((way, self._peak(stage, case)[run]) for way, case in ways if case.recompute != "none")
        return next((way for way, peak in again if peak <= room), None)

    @property
    def floor_s(self) -> float:
        """No cut with any choice of units makes a shorter step."""
        return bottleneck(len(self._stages), partial(self._price, self._bound), self._pipeline.case.units)

    def _price(self, extra: Sequence[Seconds], stage: int) -> Seconds:
        return np.where(self._inside, self._plain_s[stage] + self._m * extra[stage], np.inf)

    @cached_property
    def _plain_s(self) -> list[Seconds]:
        """Of a step through each stage that recomputes nothing."""
        pipeline, cuts = self._pipeline, np.arange(self._pipeline.case.units + 1)
        chain = Work.of(pipeline.case.graph, fastest([case.seconds for case in self._kept]))
        if pipeline.layout.schedule == "naive":  # no critical path tells its cuts apart
            return [self._m * case.ranges.compute_s for case in self._kept]
        return [
            chain.costing(case.seconds).stage_s(
                pipeline.layout.schedule,
                cuts[:, None],
                cuts[None, :],
                (s, len(self._stages) - 1 - s),
                self._m,
            )
            for s, case in enumerate(self._kept)
        ]

    def _peak(self, stage: int, case: Case) -> Bytes:
        return peak_table(case.ranges, self._worst[stage])

    def _excess(self, stage: int) -> Bytes:
        """Bytes of each run beyond the stage's room."""
        return self._peak(stage, self._kept[stage]) - self._pipeline.room_bytes(stage)

    def _least_extra_s(self, stage: int) -> Seconds:
        """A bound for every run: its cheapest unit by the byte, as often as the excess asks for."""
        case, held = self._kept[stage], max(alive.in_flight for alive in self._worst[stage])
        saved = np.array([unit.saved_bytes for unit in case.base.units], np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.where(saved > 0, case.seconds.forward / saved, np.inf)
        least = np.full(self._inside.shape, np.inf)
        least[:-1, 1:] = np.where(self._inside[:-1, 1:], rate, np.inf)
        least = np.minimum.accumulate(least, axis=1)
        over = self._over[stage] > 0
        return np.where(
            over, np.where(over, self._over[stage], 0) / max(held, 1) * np.where(over, least, 0.0), 0.0
        )
