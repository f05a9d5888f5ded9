"""Problem: which cut makes the shortest step, when a stage that does not fit may recompute some of its units?

The price of a run of units as stage s is that of partition/stage_prices.py without links:
bounds/step_time.py's critical path. Where the run does not fit, each of m microbatches takes e seconds more,
for the cheapest choice of units that fits (recompute_knapsack.py). e is not known for all runs; it is at
least

    e >= (peak - room) / microbatches in flight x least seconds per byte of the run's units

because a unit that is recomputed frees no more than what it saves. So these bounds are taken for prices, the
best cut is found, and e is computed for its runs, until a best cut contains no bound. That cut is exact, as
in a best-first search; after MOST choices (or MOST_UNITS) it is the best of those seen. All cuts seen and the
given one are simulated with links; the shortest step that fits is taken, never longer than the given one.

Where stages share a device the cut stays, and each stage that recomputes takes in turn the memory that the
others leave. Complexity: MOST choices and partitions. Oracle:
tests/unit/planner/strategies/test_recompute_and_cut.py, all cuts and all subsets of units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from math import inf
from typing import Final, final

import numpy as np

from outsize.ir.units.recompute_segments import Run
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.unit_times import fastest
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.local_search import keeping_all
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.memory.account import peak_table
from outsize.planner.memory.in_flight_states import states_by_stage
from outsize.planner.memory.range_tables import Bytes, Seconds
from outsize.planner.partition.chain_dp import bottleneck, partition
from outsize.planner.partition.stage_prices import PricedModel
from outsize.planner.strategies.selective_recompute import (
    UnitLevelModel,
    Units,
    choice,
    recomputing,
    saving_case,
    shared_choice,
)
from outsize.policies.activations import WHOLE_STAGE
from outsize.schedules.families import family_of

MOST: Final = 24
# No further cut is tried once units were chosen for stages with this many units.
MOST_UNITS: Final = 1_500
# This many of the stages that share devices with others are tried.
SHARING: Final = 12
# A smaller share of a step is no reason to try another cut.
WORTH: Final = 1e-3


def may_recompute_units(best: Candidate, pricing: Pricing) -> bool:
    """Returns whether stages of this layout may recompute some of their units: both to keep and to recompute
    all of them is open, and the bytes of each unit are known.
    """
    layout = best.layout
    open_options = {*WHOLE_STAGE} <= {case.recompute for case in best.pipeline.options[0]}
    # A stage that recomputes some units cannot split its backward.
    splits = family_of(layout.schedule).splits_backward
    return pricing.stages.whole_of_rank(layout) and not layout.hosted and open_options and not splits


def selective(best: Candidate, pricing: Pricing, optimizer: str) -> Candidate:
    """Returns the best cut in which stages may recompute some of their units; the given candidate where
    nothing is better.
    """
    layout = best.layout
    if not may_recompute_units(best, pricing):
        return best
    if layout.chunks > 1:
        return _one_by_one(best, pricing, optimizer)
    recomputes = any(case.activation_policy.recomputes for case in best.cases)
    least_s = pricing.bounds.floor_without_memory_s(layout)
    if not recomputes and best.floor_s <= least_s * (1 + WORTH):
        return best
    joint = _JointSearch(best, pricing, optimizer)
    for bounds in joint.cuts():
        candidate = joint.candidate(bounds)
        if candidate is not None and candidate.may_be_chosen and candidate.step_s < best.step_s:
            best = candidate
    floor_s = joint.floor_s + pricing.bounds.update_s(layout)
    if layout.stages == 1:  # The only cut: what it computes is slower beside its collectives.
        floor_s += _beside_collectives_s(keeping_all(best))
    return replace(best, floor_s=min(best.step_s, floor_s))


def _beside_collectives_s(kept: Candidate) -> float:
    """Returns by how much collectives slow the compute of a rank that recomputes nothing; those of one that
    does are beside at least as much.
    """
    alone, beside = (
        sum(cost.forward_s + cost.backward_s for cost in costs) for costs in (kept.costs, kept.step.costs)
    )
    return kept.layout.microbatches * max(0.0, beside - alone)


def _one_by_one(best: Candidate, pricing: Pricing, optimizer: str) -> Candidate:
    """Keeps the cut where stages share devices: each stage that recomputes takes the memory that the others
    leave.
    """
    improved = best
    recomputing_stages = [stage for stage, case in enumerate(best.cases) if case.activation_policy.recomputes]
    for stage in recomputing_stages[:SHARING]:
        units_choice = shared_choice(
            improved, stage, UnitLevelModel.of(pricing, best.pipeline, stage, optimizer)
        )
        if units_choice is not None:
            extended = {**improved.recomputed, stage: units_choice.units}
            tried = recomputing(best.pipeline, best.bounds, best.choices, extended, pricing, optimizer)
            if tried.may_be_chosen and tried.step_s <= improved.step_s:
                improved = replace(tried, floor_s=best.floor_s)
    return improved


@final
class _JointSearch:
    """Holds prices of runs, which are made exact where a cut needs them."""

    def __init__(self, start: Candidate, pricing: Pricing, optimizer: str) -> None:
        self._start, self._pipeline, self._pricing, self._optimizer = (
            start,
            start.pipeline,
            pricing,
            optimizer,
        )
        layout, n = start.layout, start.pipeline.case.units
        self._states = states_by_stage(*layout.schedule_key().of_single_stages)
        self._m, self._stages = layout.microbatches, range(layout.stages)
        self._saving_cases = [saving_case(start.pipeline, stage) for stage in self._stages]
        self._over = [self._excess(stage) for stage in self._stages]
        self._inside = np.arange(n + 1)[:, None] < np.arange(n + 1)
        self._allowed = self._inside.copy()
        self._allowed[self._inside] = self._pipeline.allows(*np.nonzero(self._inside))
        self._known: dict[tuple[int, Run], tuple[Units | None, float]] = {}
        self._extra = [self._least_extra_s(stage) for stage in self._stages]
        self._bound = [table.copy() for table in self._extra]
        self._fine = dict[str, UnitLevelModel]()

    def cuts(self) -> list[tuple[int, ...]]:
        """Returns the given cut, and the best ones by what was known."""
        cuts = dict.fromkeys([self._start.bounds])
        self._learn(self._start.bounds)
        while len(self._known) < MOST and self._units_known() < MOST_UNITS:
            price = partial(self._price, self._extra)
            bounds = partition(len(self._stages), price, np.zeros_like(self._over[0]))
            if bounds is None:
                break
            cuts[bounds] = None
            if not self._learn(bounds):
                break
        return list(cuts)

    def _units_known(self) -> int:
        ends = self._pricing.stages.ends(self._start.layout)
        return sum(ends[end] - ends[first] for _, (first, end) in self._known)

    def candidate(self, bounds: tuple[int, ...]) -> Candidate | None:
        """Prices a cut whose stages that do not fit recompute their best choice; None where one
        never fits.
        """
        chosen, choices = dict[int, Units](), [0] * len(self._stages)
        for stage, run in enumerate(pairwise(bounds)):
            if self._over[stage][run] > 0:
                units, extra_s = self._known.get((stage, run), (None, inf))
                if extra_s == inf:
                    return None
                choices[stage] = self._whole_option(stage, run) or 0 if units is None else 0
                chosen |= {} if units is None else {stage: units}
        return recomputing(self._pipeline, bounds, choices, chosen, self._pricing, self._optimizer)

    def _learn(self, bounds: tuple[int, ...]) -> bool:
        """Computes what the runs of a cut take, and returns whether any was unknown."""
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
        """Returns some units, or all of them (None) where only that fits; their seconds, and a lower bound of
        these.
        """
        kind = self._pipeline.device(stage).kind
        if kind not in self._fine:
            self._fine[kind] = UnitLevelModel.of(self._pricing, self._pipeline, stage, self._optimizer)
        cheapest = choice(self._pipeline, stage, run, self._fine[kind])
        if cheapest is not None:
            return cheapest.units, cheapest.extra_s, cheapest.least_s
        fits = self._whole_option(stage, run) is not None
        extra_s = float(self._saving_cases[stage].seconds.forward[slice(*run)].sum()) if fits else inf
        return None, extra_s, 0.0 if fits else inf

    def _whole_option(self, stage: int, run: Run) -> int | None:
        """Returns the first option that recomputes all of a run and fits."""
        room, options = self._pipeline.room_bytes(stage), enumerate(self._pipeline.options[stage])
        peaks = (
            (option, self._peak(stage, case)[run])
            for option, case in options
            if case.activation_policy.recomputes
        )
        return next((option for option, peak in peaks if peak <= room), None)

    @property
    def floor_s(self) -> float:
        """Returns a lower bound over every cut with any choice of units."""
        return bottleneck(len(self._stages), partial(self._price, self._bound), self._pipeline.case.units)

    def _price(self, extra: Sequence[Seconds], stage: int) -> Seconds:
        return np.where(self._allowed, self._plain_s[stage] + self._m * extra[stage], np.inf)

    @cached_property
    def _plain_s(self) -> list[Seconds]:
        """Returns the seconds of a step through each stage without recompute."""
        pipeline, cuts = self._pipeline, np.arange(self._pipeline.case.units + 1)
        least = [case.least for case in self._saving_cases]
        chain = PrefixTimes.of(pipeline.case.graph, fastest(least))
        if family_of(pipeline.layout.schedule).even_cut_is_best:
            return [self._m * case.ranges.compute_s for case in self._saving_cases]
        return [
            chain.costing(seconds).stage_s(
                pipeline.layout.schedule,
                cuts[:, None],
                cuts[None, :],
                (s, len(self._stages) - 1 - s),
                self._m,
            )
            for s, seconds in enumerate(least)
        ]

    def _peak(self, stage: int, case: PricedModel) -> Bytes:
        return peak_table(case.ranges, self._states[stage])

    def _excess(self, stage: int) -> Bytes:
        """Returns the bytes of each run beyond the stage's usable memory."""
        return self._peak(stage, self._saving_cases[stage]) - self._pipeline.room_bytes(stage)

    def _least_extra_s(self, stage: int) -> Seconds:
        """Returns a lower bound for every run: its cheapest unit per byte, times the excess."""
        case, held = self._saving_cases[stage], max(alive.in_flight for alive in self._states[stage])
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
