"""Cuts one layout: prices of all runs, from tables, a schedule and a cluster.

The price of a run of units on stage s is bounds/step_time.py's critical path through that stage, plus the
transfers that it waits for, for each of the m microbatches:

    link(s - 1, s): latency + received bytes / bandwidth       (step edges: a share of 1 / m)
    link(s + 1, s): latency + gradient bytes / bandwidth

It is infinite where the stage's peak (memory/account.py) exceeds its device's memory. A stage may have
several options (without recompute, or with): each run takes the first one that fits. The cut with the least
maximum price is exact (sparse_chain_dp.py), and so is `floor_s`, the same without links: no cut that fits
makes a shorter step. Each message is priced once, where it is awaited: a skip edge with the neighbour's link
(the same one unless the edge leaves the node), and messages to one stage as one. The simulator, which ranks
the results, knows every edge. Under interleaved the price is that of one chunk, and its device's memory is
divided evenly over its chunks.

Only runs that a stage can be are tried (sparse_chain_dp.py), and whether they fit only until one does not.
Complexity: O(p n^2) at worst. Oracle: tests/unit/planner/partition/test_stage_prices.py and test_search.py
price every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster, Device, Link
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import host_link
from outsize.ir.plan import ScheduleName
from outsize.ir.profile import Profile
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.collectives import messages_s
from outsize.planner.costs.parallel_times import WeightCollectives
from outsize.planner.costs.stage_edges import Flow, flows
from outsize.planner.costs.unit_times import UnitSeconds, fastest
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.account import InFlightCounts, InFlightState, component_table, peaks_of_components
from outsize.planner.memory.in_flight_states import states_by_stage
from outsize.planner.memory.optimizer_states import optimizer_bytes, style_of
from outsize.planner.memory.range_tables import Bytes, RangeTables, Seconds
from outsize.planner.memory.update_work import UpdateWork
from outsize.planner.partition.chain_dp import SAME
from outsize.planner.partition.sparse_chain_dp import Runs
from outsize.planner.partition.stage_weights import Demand
from outsize.policies.activations import KEEP, RECOMPUTE, ActivationPolicy, Recompute, activation_policy
from outsize.schedules.families import family_of

Table = TypeVar("Table", Bytes, Seconds)
# A stage of the first list of runs may be this much longer than the least step; each further list is longer
# by GROWTH where some cut fits, and by FAR where none does.
START: Final = 1.05
GROWTH: Final = 1.25
FAR: Final = 2.0
# A limit this much above another one is above it whatever the rounding of sums is.
SURELY: Final = 1 + 1e-6


@final
@dataclass(frozen=True, slots=True, eq=False)
class PricedModel:
    """Holds a model at one microbatch size, with its tables; `microbatches` of them make a batch.

    `base` names the units and says what they save; `seconds` are those of a layout. `after_s`: seconds that a
    stage needs after its last backward, for all runs; None where only replicas wait for each other.
    `update` is the work of the optimizer's step.
    `split_units`: how many units with a gradient of weights each has; None where each is one unit.
    `copies`: the link over which activations go to the host; `seconds` do not include it.
    `pairs`: backwards run together with forwards, so that what ranks exchange may hide. `late`: by how
    much the forward and the backward of each unit are longer in the last slice of a sequence than in a
    mean one, where microbatches are `slices` of whole ones.
    """

    graph: ModelGraph
    base: Profile
    flows: tuple[Flow, ...]
    seconds: UnitSeconds
    ranges: RangeTables
    microbatches: int
    recompute: Recompute = KEEP.name
    after_s: Seconds | None = None
    copies: Link | None = None
    update: UpdateWork | None = None
    split_units: Bytes | None = None
    pairs: bool = False
    late: tuple[Seconds, Seconds] | None = None
    slices: int = 1

    @classmethod
    def of(
        cls,
        graph: ModelGraph,
        profile: Profile,
        microbatches: int,
        optimizer: str,
        recompute: Recompute = KEEP.name,
    ) -> Self:
        """Builds the tables; raises BadOption for an unknown optimizer, ModelMismatch for a foreign
        profile.
        """
        kind, states = profile.device, optimizer_bytes(optimizer)
        ranges = RangeTables.of(graph, profile, states)
        case = cls(graph, profile, flows(graph), UnitSeconds.of(profile), ranges, microbatches)
        update = UpdateWork.of(graph, states, style_of(kind))
        return replace(case, update=update).with_recompute(recompute)

    def with_seconds(self, seconds: UnitSeconds) -> Self:
        """Returns the case with other seconds."""
        made = replace(self, seconds=seconds)
        return replace(made, ranges=replace(self.ranges, compute_s=_compute_s(made.least)))

    def in_pairs(self) -> Self:
        """Returns the case where forwards run together with backwards of other microbatches."""
        return replace(self, pairs=True).with_seconds(self.seconds)

    def fully_recomputed(self) -> Self:
        """Returns the case when everything is recomputed in the backward."""
        recomputed = replace(self, ranges=self.ranges.recomputed(), recompute=RECOMPUTE.name)
        return recomputed.with_seconds(self.seconds.recomputed())

    def with_recompute(self, recompute: Recompute, device: Device | None = None) -> Self:
        """Returns the case without recompute, with all units recomputed, or with activations on the host of
        `device`.
        """
        policy = activation_policy(recompute)
        if not policy.offloads:
            return self.fully_recomputed() if policy.recomputes else self
        copies = device and copy_link(device)
        return replace(self, ranges=self.ranges.offloaded(), recompute=recompute, copies=copies)

    @property
    def activation_policy(self) -> ActivationPolicy:
        """Returns what units do with their activations."""
        return activation_policy(self.recompute)

    @property
    def hides(self) -> bool:
        """Returns whether what ranks exchange may hide; a stage that computes a second forward counts as one
        that hides nothing.
        """
        return self.pairs and self.activation_policy.keeps_all

    @property
    def least(self) -> UnitSeconds:
        """Returns the seconds below which the units of a stage never are."""
        return self.seconds.paired() if self.hides else self.seconds

    def states(self, schedule: ScheduleName, stages: int) -> tuple[tuple[InFlightState, ...], ...]:
        """Returns what each stage of a pipeline holds at its worst moments, where each is on a rank of its
        own.
        """
        whole = self.microbatches // self.slices
        return states_by_stage(schedule, stages, whole, stages, self.slices)

    def late_s(self, run: tuple[int, int]) -> float:
        """Returns by how much the last slice of a sequence takes longer in a stage than a mean one, forward
        and back.
        """
        if self.late is None:
            return 0.0
        forward_s, backward_s = (float(each[slice(*run)].sum()) for each in self.late)
        return backward_s + forward_s * (1 if self.activation_policy.keeps_all else 2)

    @property
    def profile(self) -> Profile:
        """Returns the profile with the seconds of this case."""
        return self.seconds.written(self.base)

    @property
    def units(self) -> int:
        """Returns the number of units."""
        return len(self.graph.units)


@final
class ChainCut(NamedTuple):
    """Holds the first unit of each stage, then n, and the option of each stage."""

    bounds: tuple[int, ...]
    choices: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """Holds a layout on devices without the cuts: stage s is on `ranks[s]` of `room`, in one of the options
    `options[s]`.

    `groups` has the first device of each group of the layout; `room` has the same with the memory that a peak
    may take. `collectives[stage]` prices those among the stage's replicas. `ends` has the first unit of each
    piece, then their number: bounds of cuts count pieces. `even`: the stages of one device have equal shares
    of it; otherwise each may take it all, and the account of the whole device decides. Options before
    `first_option` are not tried. `demand` says which weights every stage needs.
    """

    layout: Layout
    groups: Cluster
    room: Cluster
    ranks: tuple[int, ...]
    options: tuple[tuple[PricedModel, ...], ...]
    collectives: tuple[WeightCollectives, ...]
    ends: tuple[int, ...]
    even: bool = True
    first_option: int = 0
    demand: Demand | None = None

    @property
    def stages(self) -> int:
        """Returns the number of stages."""
        return len(self.ranks)

    @property
    def case(self) -> PricedModel:
        """Returns the first option of the first stage."""
        return self.options[0][0]

    def device(self, stage: int) -> Device:
        """Returns the first device of the stage's group, with all its memory."""
        return self.groups.devices[self.ranks[stage]]

    def room_bytes(self, stage: int) -> int:
        """Returns the bytes that the peak of this stage may take of its device."""
        return self.room.devices[self.ranks[stage]].memory_bytes // (self.layout.chunks if self.even else 1)

    def link(self, source: int, destination: int) -> Link:
        """Returns the link between the devices of two stages."""
        return self.room.link(self.ranks[source], self.ranks[destination])

    def allows(self, first: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether runs may be a stage; where a rank has several, the account of the whole decides."""
        if self.demand is None or self.layout.chunks > 1:
            return np.ones(len(first), np.bool_)
        return self.demand.met(first, end)

    def busy_s(self, cut: ChainCut) -> float:
        """Returns the compute seconds of the busiest device in a step: no step of this cut is shorter."""
        busy_s, m = dict.fromkeys(self.ranks, 0.0), self.layout.microbatches
        for stage, (choice, run) in enumerate(zip(cut.choices, pairwise(cut.bounds), strict=True)):
            busy_s[self.ranks[stage]] += m * float(self.options[stage][choice].ranges.compute_s[run])
        return max(busy_s.values())


def copy_link(device: Device) -> Link:
    """Returns the device's link to its host; a CPU reads and writes its own memory."""
    own = Link(name="memory", latency_s=0.0, bytes_per_s=device.bytes_per_s / 2)
    return host_link(device) or own


@final
class StagePrices:
    """Computes the prices of runs for each stage of a pipeline; `least_s` is a known lower bound of
    the step, and where it `fits_nowhere` no run is priced.
    """

    def __init__(self, pipeline: Pipeline, least_s: float = 0.0, *, fits_nowhere: bool = False) -> None:
        self._fits_nowhere = fits_nowhere
        self.pipeline, self._m = pipeline, pipeline.case.microbatches
        self._cases = {id(case): case for options in pipeline.options for case in options}
        least = {key: case.least for key, case in self._cases.items()}
        chain = PrefixTimes.of(pipeline.case.graph, fastest(list(least.values())))
        self.works = {key: chain.costing(seconds) for key, seconds in least.items()}
        self._total = self._m * (chain.forward + chain.backward)
        least_s = max(least_s / pipeline.layout.chunks, float(self._total[-1]) / pipeline.stages)
        self._start_s = START * least_s
        self._last: _Listing | None = None

    @cached_property
    def floor_s(self) -> float:
        """Returns the least step of all cuts that fit, if links cost nothing; infinite when none fits.

        It is 0 where stages share a device.
        """
        return self.floor_below(np.inf)

    def floor_below(self, most_s: float) -> float:
        """Returns `floor_s` if it is below `most_s`, and otherwise a value between the two."""
        if self.pipeline.layout.chunks > 1:
            return 0.0
        return self._least(_Listing.floor, self._start_s, most_s)[0]

    def price_below(self, most_s: float) -> float:
        """Returns the least maximum price if it is below `most_s`, and otherwise a value between the two."""
        if self._fits_nowhere:  # That it is too slow is all that is asked.
            return most_s * SURELY
        return self._least(_Listing.price, self._start_s, most_s)[0]

    def split(self) -> ChainCut | None:
        """Returns the cut with the least maximum price that fits; None when none fits."""
        if self._fits_nowhere or self.floor_s == np.inf:
            return None
        limit_s, listing = self._least(_Listing.price, max(self._start_s, self.floor_s))
        if limit_s == np.inf:
            return None
        bounds = listing.runs.cut(self.pipeline.stages, listing.price, limit_s * SAME, listing.traffic())
        return ChainCut(bounds, tuple(map(listing.option, range(self.pipeline.stages), pairwise(bounds))))

    def least_busy_s(self) -> float:
        """Returns the least compute seconds of the busiest device in a step, in any option that is tried."""
        pipeline = self.pipeline
        cases = {id(case): case for options in pipeline.options for case in options[pipeline.first_option :]}
        whole_s = float(fastest([case.least for case in cases.values()]).total.sum())
        return self._m * whole_s / pipeline.layout.axes.pp

    def may_gain(self, most_s: float) -> bool:
        """Returns whether more memory saving may pay: a run no longer than the best cut's (or than `most_s`)
        fits in no option that was tried, and would fit if a microbatch kept only what a stage receives and
        sends.

        Where stages share a device, it returns whether nothing fits.
        """
        if self.pipeline.layout.chunks > 1:
            return self.price_below(most_s) == np.inf
        self.floor_below(most_s)
        return self._last is not None and any(map(self._last.may_fit, range(self.pipeline.stages)))

    def reach(self, stage: int, limit_s: float) -> tuple[int, int]:
        """Returns the first and last unit that a stage can begin with, if no stage takes longer than the
        limit.
        """
        last = np.searchsorted(self._total, stage * limit_s * SAME, side="right") - 1
        later_s = (self.pipeline.stages - stage) * limit_s * SAME
        first = np.searchsorted(self._total, self._total[-1] - later_s, side="left")
        return int(first), int(last)

    def _least(
        self, price: Callable[[_Listing, int], Seconds], start_s: float, most_s: float = np.inf
    ) -> tuple[float, _Listing]:
        """Returns the least bottleneck, and a list of runs that contains its cut; or a limit above
        `most_s`.
        """
        limit_s, total_s = start_s, float(self._total[-1])
        while True:
            listing = self._listing(limit_s)
            least_s = listing.runs.bottleneck(self.pipeline.stages, partial(price, listing))
            if least_s <= listing.limit_s or listing.limit_s >= total_s:
                return least_s, listing
            if listing.limit_s > most_s:
                return listing.limit_s, listing
            growth = GROWTH if least_s < np.inf else FAR
            # A list just above `most_s` tells as much as a longer one.
            limit_s = min(least_s, listing.limit_s * growth, total_s, max(most_s, start_s) * SURELY)

    def _listing(self, limit_s: float) -> _Listing:
        """Returns the last list of runs if it reaches the limit, and otherwise a new one."""
        if self._last is None or self._last.limit_s < limit_s:
            windows = [self.reach(stage, limit_s) for stage in range(self.pipeline.stages)]
            runs = Runs.within(self._total, limit_s).between(windows)
            self._last = _Listing(self.pipeline, self.works, limit_s, runs)
        return self._last


@final
class _Listing:
    """Holds the runs within a limit, with what they cost and hold as each stage; each value is
    computed once.

    Values of a stage are those of its window of runs. It does not know the tables that hold it: a cycle of
    them would keep its arrays until Python looks for cycles.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        works: Mapping[int, PrefixTimes],
        limit_s: float,
        runs: Runs,
    ) -> None:
        self._pipeline, self._works = pipeline, works
        self.limit_s, self.runs = limit_s, runs
        layout, self._m = self._pipeline.layout, self._pipeline.case.microbatches
        self._worst = states_by_stage(*layout.schedule_key().of_single_stages)
        self._in_flight = tuple(map(InFlightCounts.of, self._worst))
        self._places = runs.first * (runs.units + 1) + runs.end
        self._taken: dict[int, Any] = {}
        self._columns: dict[int, Seconds] = {}
        self._bases: dict[tuple[int, InFlightCounts], tuple[slice, Seconds]] = {}
        self._first_option_of: dict[int, NDArray[np.int8]] = {}
        self._prices: dict[int, Seconds] = {}

    def floor(self, stage: int) -> Seconds:
        """Returns the seconds of a step through this stage, if links cost nothing; infinite where it does not
        fit.
        """
        return self._by_option(stage, self._compute)

    def price(self, stage: int) -> Seconds:
        """Returns the seconds with the transfers that the stage waits for."""
        if stage not in self._prices:
            self._prices[stage] = self._by_option(stage, self._with_links)
        return self._prices[stage]

    def may_fit(self, stage: int) -> bool:
        """Returns whether a run that does not fit could, if only boundary values were kept."""
        window = self.runs.window(stage)
        first, end = self.runs.first[window], self.runs.end[window]
        unfit = (self._first_options(stage) < 0) & self._pipeline.allows(first, end)
        places = first[unfit], end[unfit]
        parts = component_table(self._cases(stage)[0].ranges.at(places).without_activations(), self._m)
        return bool(
            (peaks_of_components(parts, self._worst[stage]) <= self._pipeline.room_bytes(stage)).any()
        )

    def option(self, stage: int, run: tuple[int, int]) -> int:
        """Returns the first option that fits this run."""
        window = self.runs.window(stage)
        first, end = self.runs.first[window], self.runs.end[window]
        place = np.flatnonzero((first == run[0]) & (end == run[1]))[0]
        return self._pipeline.first_option + int(self._first_options(stage)[place])

    def traffic(self) -> NDArray[np.int64]:
        """Returns the bytes that each run receives in a step."""
        ranges = self._pipeline.case.ranges
        received, gradient_in = self._of(ranges.received), self._of(ranges.gradient_in)
        return self._m * (received + gradient_in) + self._of(ranges.replicas)

    def _by_option(self, stage: int, seconds: Callable[[PricedModel, int, slice], Seconds]) -> Seconds:
        window, first_options = self.runs.window(stage), self._first_options(stage)
        seconds_of = np.full(len(first_options), np.inf)
        for option, case in enumerate(self._cases(stage)):
            chosen = first_options == option
            if chosen.any():
                np.copyto(seconds_of, seconds(case, stage, window), where=chosen)
        return seconds_of

    def _cases(self, stage: int) -> Sequence[PricedModel]:
        return self._pipeline.options[stage][self._pipeline.first_option :]

    def _first_options(self, stage: int) -> NDArray[np.int8]:
        """Returns, for each run of the stage's window, the first option that fits; -1 where none does."""
        if stage not in self._first_option_of:
            room, window = self._pipeline.room_bytes(stage), self.runs.window(stage)
            first_options = np.full(window.stop - window.start, -1, np.int8)
            for option, case in reversed(tuple(enumerate(self._cases(stage)))):
                first_options[self._peaks(case, stage) <= room] = option
            allowed = self._pipeline.allows(self.runs.first[window], self.runs.end[window])
            self._first_option_of[stage] = np.where(allowed, first_options, -1)
        return self._first_option_of[stage]

    def _peaks(self, case: PricedModel, stage: int) -> Seconds:
        """Returns the peak bytes of the stage's runs in a case: those of its neighbours with more or fewer
        microbatches that wait.
        """
        parts, counts, window = self._parts(case), self._in_flight[stage], self.runs.window(stage)
        alike, base = self._base(case, stage)
        here = slice(window.start - alike.start, window.stop - alike.start)
        return counts.peaks(base[:, here], parts[:, window])

    def _base(self, case: PricedModel, stage: int) -> tuple[slice, Seconds]:
        """Returns the window of all stages whose peaks differ by what waits alone, and what they share."""
        alike = replace(self._in_flight[stage], most=0)
        if (id(case), alike) not in self._bases:
            windows = [
                self.runs.window(other)
                for other, counts in enumerate(self._in_flight)
                if (counts.waiting, counts.resting) == (alike.waiting, alike.resting)
            ]
            window = slice(min(w.start for w in windows), max(w.stop for w in windows))
            self._bases[id(case), alike] = window, alike.base_bytes(self._parts(case)[:, window])
        return self._bases[id(case), alike]

    def _parts(self, case: PricedModel) -> Seconds:
        if id(case) not in self._columns:
            tables = {f.name: self._of(getattr(case.ranges, f.name)) for f in fields(case.ranges)}
            self._columns[id(case)] = component_table(replace(case.ranges, **tables), self._m)
        return self._columns[id(case)]

    def _of(self, table: Table) -> Table:
        """Returns a table's entries of the runs; cases share tables."""
        if id(table) not in self._taken:
            self._taken[id(table)] = table.ravel()[self._places]
        return self._taken[id(table)]

    def _with_links(self, case: PricedModel, stage: int, window: slice) -> Seconds:
        waits = self._m * self._waits(case, stage, window)
        if family_of(self._pipeline.layout.schedule).even_cut_is_best:
            return self._m * self._of(case.ranges.compute_s)[window] + waits
        return self._compute(case, stage, window) + waits

    def _compute(self, case: PricedModel, stage: int, window: slice) -> Seconds:
        place, schedule = (stage, self._pipeline.stages - 1 - stage), self._pipeline.layout.schedule
        first, end = self.runs.first[window], self.runs.end[window]
        return self._works[id(case)].stage_s(schedule, first, end, place, self._m)

    def _waits(self, case: PricedModel, stage: int, window: slice) -> Seconds:
        """Returns the seconds a run waits for the messages of one microbatch."""
        before, after = self._link(stage - 1, stage), self._link(stage + 1, stage)
        ranges, seconds = case.ranges, np.zeros(window.stop - window.start)
        if before is not None:
            seconds += messages_s(before, self._of(ranges.received)[window])
            seconds += messages_s(before, self._of(ranges.replicas)[window]) / self._m
        if after is not None:
            seconds += messages_s(after, self._of(ranges.gradient_in)[window])
        return seconds

    def _link(self, source: int, stage: int) -> Link | None:
        return self._pipeline.link(source, stage) if 0 <= source < self._pipeline.stages else None


def _compute_s(seconds: UnitSeconds) -> Seconds:
    prefix = np.concatenate(([0.0], np.cumsum(seconds.total)))
    return np.subtract(prefix, prefix[:, None])
