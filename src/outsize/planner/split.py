"""Where to cut for one layout: the partition's price, from tables, a schedule and a cluster.

What a run of units on stage s adds to the step is floor.py's critical path through that stage, and on top for
each of the m microbatches the transfers it waits for:

    link(s - 1, s): latency + received bytes / bandwidth       (step edges: a share of 1 / m)
    link(s + 1, s): latency + gradient bytes / bandwidth

It is infinite where the stage's peak (memory.py) is more than its device has. A stage may run in several
ways (as it is, or recomputed): each run takes the first one that fits. The cut of the least largest price
is exact (runs.py), and so is `floor_s`, the same without links: no cut that fits makes a shorter step.
Each message is priced once, where it is awaited: a skip edge with the neighbour's link (the same one unless
the edge leaves the node), and messages to one stage as one. The simulator, which ranks what comes out of
here, knows every edge. Under interleaved the price is that of one chunk, and its device's memory is shared
out evenly to its chunks.

Only runs that a stage can be at all are looked at (runs.py), and whether they fit only until one is too much.
Complexity: O(p n^2) at worst. Oracle: tests/unit/planner/test_split.py and test_search.py price every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Final, Self, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster, Device, Link
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Recompute
from outsize.ir.profile import Profile
from outsize.planner.edges import Flow, flows
from outsize.planner.floor import Work
from outsize.planner.layout import Layout
from outsize.planner.memory import columns, peaks
from outsize.planner.moments import moments_by_stage
from outsize.planner.optimizer import optimizer_bytes
from outsize.planner.partition import SAME
from outsize.planner.ranges import Bytes, Ranges, Seconds
from outsize.planner.runs import Runs
from outsize.planner.seconds import Aside, UnitSeconds, fastest

Table = TypeVar("Table", Bytes, Seconds)
Wire = tuple[float, float]
"""A link's (latency_s, bytes_per_s)."""
# So much longer than the least step a stage may be in the first list of runs; and each further list, where
# some cut fits, and where none does.
START: Final = 1.05
GROWTH: Final = 1.25
FAR: Final = 2.0
# Under these the best balance is as good a cut as any other: no critical path tells them apart.
EVEN: Final = frozenset({"naive", "interleaved", "zero-bubble-v"})


@final
@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model at one microbatch size, with its tables; `microbatches` of them make a batch.

    `base` names the units and says what they save; the seconds are those of a layout. `after_s`: of all runs,
    what a stage does once its last backward is over; None where only replicas wait for each other. `aside`:
    how activations go to the host; `seconds` are without that.
    """

    graph: ModelGraph
    base: Profile
    flows: tuple[Flow, ...]
    seconds: UnitSeconds
    ranges: Ranges
    microbatches: int
    recompute: Recompute = "none"
    after_s: Seconds | None = None
    aside: Aside | None = None

    @classmethod
    def of(
        cls,
        graph: ModelGraph,
        profile: Profile,
        microbatches: int,
        optimizer: str,
        recompute: Recompute = "none",
    ) -> Self:
        """Build the tables; BadOption for an unknown optimizer, ModelMismatch for a foreign profile."""
        ranges = Ranges.of(graph, profile, optimizer_bytes(optimizer))
        kept = cls(graph, profile, flows(graph), UnitSeconds.of(profile), ranges, microbatches)
        return kept.otherwise(recompute)

    def lasting(self, seconds: UnitSeconds) -> Self:
        """The same at other costs."""
        return replace(self, seconds=seconds, ranges=replace(self.ranges, compute_s=_compute_s(seconds)))

    def anew(self) -> Self:
        """The same when everything is recomputed in the backward."""
        again = replace(self, ranges=self.ranges.recomputed(), recompute="full")
        return again.lasting(self.seconds.recomputed())

    def otherwise(self, recompute: Recompute, device: Device | None = None) -> Self:
        """As it is, all recomputed, or with what waits on the host of such a device."""
        if recompute != "offload":
            return self if recompute == "none" else self.anew()
        aside = device and Aside.of(device)
        return replace(self, ranges=self.ranges.offloaded(), recompute=recompute, aside=aside)

    @property
    def profile(self) -> Profile:
        """With the seconds of this case."""
        return self.seconds.written(self.base)

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.graph.units)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A layout on devices, all but the cuts: stage s is on `ranks[s]` of `room`, in one of `ways[s]`.

    `groups` has the first device of each group of the layout, `room` the same with the memory that a peak may
    take; `alike[stage]` are all devices like the stage's, of which any so many neighbours are such a group.
    `even`: stages of one device have equal shares of it; or else each may take it all, and the account of the
    whole device decides. A cut is looked for from `first_way` on.
    """

    layout: Layout
    groups: Cluster
    room: Cluster
    ranks: tuple[int, ...]
    ways: tuple[tuple[Case, ...], ...]
    alike: tuple[Cluster, ...]
    even: bool = True
    first_way: int = 0

    @property
    def stages(self) -> int:
        """In all."""
        return len(self.ranks)

    @property
    def case(self) -> Case:
        """The first way of the first stage."""
        return self.ways[0][0]

    def device(self, stage: int) -> Device:
        """The first device of the stage's group, as it is."""
        return self.groups.devices[self.ranks[stage]]

    def room_bytes(self, stage: int) -> int:
        """What the peak of this stage may take of its device."""
        return self.room.devices[self.ranks[stage]].memory_bytes // (self.layout.chunks if self.even else 1)

    def link(self, source: int, destination: int) -> Link:
        """Between the devices of two stages."""
        return self.room.link(self.ranks[source], self.ranks[destination])

    def busy_s(self, bounds: Sequence[int], ways: Sequence[int]) -> float:
        """Seconds of a step that the busiest device computes for: no step of this cut is shorter."""
        busy_s, m = dict.fromkeys(self.ranks, 0.0), self.layout.microbatches
        for stage, (way, run) in enumerate(zip(ways, pairwise(bounds), strict=True)):
            busy_s[self.ranks[stage]] += m * float(self.ways[stage][way].ranges.compute_s[run])
        return max(busy_s.values())


@final
@dataclass(frozen=True, slots=True)
class Split:
    """First unit of each stage, then n; the way of each stage; no cut that fits makes a shorter step.

    `floor_s` is 0 where stages share a device: their cuts are balanced, and nobody knows the best.
    """

    bounds: tuple[int, ...]
    ways: tuple[int, ...]
    floor_s: float


def split(pipeline: Pipeline) -> Split | None:
    """The cut with the least largest price that fits; None when none fits."""
    return Tables(pipeline).split()


@final
class Tables:
    """Prices of runs for each stage of a pipeline; `least_s`: a step is known to take at least as long."""

    def __init__(self, pipeline: Pipeline, least_s: float = 0.0) -> None:
        self.pipeline, self._m = pipeline, pipeline.case.microbatches
        self._cases = {id(case): case for ways in pipeline.ways for case in ways}
        fastest_s = fastest([case.seconds for case in self._cases.values()])
        chain = Work.of(pipeline.case.graph, fastest_s)
        self.works = {key: chain.costing(case.seconds) for key, case in self._cases.items()}
        self._total = self._m * (chain.forward + chain.backward)
        least_s = max(least_s / pipeline.layout.chunks, float(self._total[-1]) / pipeline.stages)
        self._start_s = START * least_s
        self._last: _Listing | None = None

    @cached_property
    def floor_s(self) -> float:
        """The least step of all cuts that fit, if links cost nothing; infinite when none fits.

        0 where stages share a device.
        """
        return self.floor_below(np.inf)

    def floor_below(self, most_s: float) -> float:
        """The same, if it is below `most_s`; or else something between the two."""
        if self.pipeline.layout.chunks > 1:
            return 0.0
        return self._least(_Listing.floor, self._start_s, most_s)[0]

    def price_below(self, most_s: float) -> float:
        """The least largest price, if it is below `most_s`; or else something between the two."""
        return self._least(_Listing.price, self._start_s, most_s)[0]

    def split(self) -> Split | None:
        """The cut with the least largest price that fits; None when none fits."""
        if self.floor_s == np.inf:
            return None
        limit_s, found = self._least(_Listing.price, max(self._start_s, self.floor_s))
        if limit_s == np.inf:
            return None
        bounds = found.runs.cut(self.pipeline.stages, found.price, limit_s * SAME, found.traffic())
        return Split(
            bounds, tuple(map(found.way, range(self.pipeline.stages), pairwise(bounds))), self.floor_s
        )

    def least_busy_s(self) -> float:
        """Seconds of a step that the busiest device computes for at least, in any way that is looked for."""
        pipeline = self.pipeline
        cases = {id(case): case for ways in pipeline.ways for case in ways[pipeline.first_way :]}
        whole_s = float(fastest([case.seconds for case in cases.values()]).total.sum())
        return self._m * whole_s / pipeline.layout.axes.pp

    def may_gain(self, most_s: float) -> bool:
        """Whether a run no longer than the best cut's, or than the most, fits in no way that was looked for,
        and would if a microbatch kept no more than what a stage receives and sends. Where stages share a
        device: whether nothing fits.
        """
        if self.pipeline.layout.chunks > 1:
            return self.price_below(most_s) == np.inf
        self.floor_below(most_s)
        return self._last is not None and any(map(self._last.may_fit, range(self.pipeline.stages)))

    def reach(self, stage: int, limit_s: float) -> tuple[int, int]:
        """The first and last unit that a stage can begin with, if no stage takes longer than the limit."""
        last = np.searchsorted(self._total, stage * limit_s * SAME, side="right") - 1
        later_s = (self.pipeline.stages - stage) * limit_s * SAME
        first = np.searchsorted(self._total, self._total[-1] - later_s, side="left")
        return int(first), int(last)

    def _least(
        self, price: Callable[[_Listing, int], Seconds], start_s: float, most_s: float = np.inf
    ) -> tuple[float, _Listing]:
        """The least bottleneck, and a list of runs that has all it takes; or a limit above `most_s`."""
        limit_s, everything_s = start_s, float(self._total[-1])
        while True:
            found = self._listing(limit_s)
            least_s = found.runs.bottleneck(self.pipeline.stages, partial(price, found))
            if least_s <= found.limit_s or found.limit_s >= everything_s:
                return least_s, found
            if found.limit_s > most_s:
                return found.limit_s, found
            growth = GROWTH if least_s < np.inf else FAR
            limit_s = min(least_s, found.limit_s * growth, everything_s)

    def _listing(self, limit_s: float) -> _Listing:
        """The one before, if it has what is asked for."""
        if self._last is None or self._last.limit_s < limit_s:
            self._last = _Listing(self, limit_s, Runs.within(self._total, limit_s))
        return self._last


@final
class _Listing:
    """The runs within a limit, with what they cost and hold as each stage; each is computed once."""

    def __init__(self, tables: Tables, limit_s: float, runs: Runs) -> None:
        self._tables, self._pipeline = tables, tables.pipeline
        self.limit_s, self.runs = limit_s, runs
        layout, self._m = self._pipeline.layout, self._pipeline.case.microbatches
        self._worst = moments_by_stage(layout.schedule, layout.stages, self._m, layout.axes.pp)
        self._places = runs.first * (runs.units + 1) + runs.end
        self._taken: dict[int, Any] = {}
        self._columns: dict[int, Seconds] = {}
        self._ways: dict[int, NDArray[np.int8]] = {}
        self._prices: dict[int, Seconds] = {}

    def floor(self, stage: int) -> Seconds:
        """Seconds of a step through this stage, if links cost nothing; infinite where it does not fit."""
        return self._by_way(stage, self._compute)

    def price(self, stage: int) -> Seconds:
        """With the transfers that it waits for."""
        if stage not in self._prices:
            self._prices[stage] = self._by_way(stage, self._with_links)
        return self._prices[stage]

    def may_fit(self, stage: int) -> bool:
        """Whether a run that does not fit could, if nothing were kept but what comes and goes."""
        window = self._window(stage)
        unfit = self._first_ways(stage) < 0
        places = self.runs.first[window][unfit], self.runs.end[window][unfit]
        parts = columns(self._cases(stage)[0].ranges.at(places).hollow(), self._m)
        return bool((peaks(parts, self._worst[stage]) <= self._pipeline.room_bytes(stage)).any())

    def way(self, stage: int, run: tuple[int, int]) -> int:
        """The first way that fits this run."""
        window = self._window(stage)
        first, end = self.runs.first[window], self.runs.end[window]
        place = np.flatnonzero((first == run[0]) & (end == run[1]))[0]
        return self._pipeline.first_way + int(self._first_ways(stage)[place])

    def traffic(self) -> NDArray[np.int64]:
        """Bytes that each run receives in a step."""
        ranges = self._pipeline.case.ranges
        received, gradient_in = self._of(ranges.received), self._of(ranges.gradient_in)
        return self._m * (received + gradient_in) + self._of(ranges.replicas)

    def _by_way(self, stage: int, seconds: Callable[[Case, int, slice], Seconds]) -> Seconds:
        window, ways = self._window(stage), self._first_ways(stage)
        found = np.full(len(self.runs.first), np.inf)
        for way, case in enumerate(self._cases(stage)):
            here = ways == way
            if here.any():
                np.copyto(found[window], seconds(case, stage, window), where=here)
        return found

    def _window(self, stage: int) -> slice:
        """Runs that begin where the stages before can have come to, and those behind can go on from."""
        return self.runs.beginning(*self._tables.reach(stage, self.limit_s))

    def _cases(self, stage: int) -> Sequence[Case]:
        return self._pipeline.ways[stage][self._pipeline.first_way :]

    def _first_ways(self, stage: int) -> NDArray[np.int8]:
        """Of each run of the stage's window the first way that fits; -1 where none does."""
        if stage not in self._ways:
            room, window = self._pipeline.room_bytes(stage), self._window(stage)
            found = np.full(window.stop - window.start, -1, np.int8)
            for way, case in reversed(tuple(enumerate(self._cases(stage)))):
                found[peaks(self._parts(case)[:, window], self._worst[stage]) <= room] = way
            self._ways[stage] = found
        return self._ways[stage]

    def _parts(self, case: Case) -> Seconds:
        if id(case) not in self._columns:
            tables = {f.name: self._of(getattr(case.ranges, f.name)) for f in fields(case.ranges)}
            self._columns[id(case)] = columns(replace(case.ranges, **tables), self._m)
        return self._columns[id(case)]

    def _of(self, table: Table) -> Table:
        """Of the runs; cases share tables."""
        if id(table) not in self._taken:
            self._taken[id(table)] = table.ravel()[self._places]
        return self._taken[id(table)]

    def _with_links(self, case: Case, stage: int, window: slice) -> Seconds:
        waits = self._m * self._waits(case, stage, window)
        if self._pipeline.layout.schedule in EVEN:
            return self._m * self._of(case.ranges.compute_s)[window] + waits
        return self._compute(case, stage, window) + waits

    def _compute(self, case: Case, stage: int, window: slice) -> Seconds:
        place, schedule = (stage, self._pipeline.stages - 1 - stage), self._pipeline.layout.schedule
        first, end = self.runs.first[window], self.runs.end[window]
        return self._tables.works[id(case)].stage_s(schedule, first, end, place, self._m)

    def _waits(self, case: Case, stage: int, window: slice) -> Seconds:
        """Seconds a run waits for the messages of one microbatch."""
        before, behind = self._wire(stage - 1, stage), self._wire(stage + 1, stage)
        ranges, seconds = case.ranges, np.zeros(window.stop - window.start)
        if before is not None:
            seconds += _transfer(before, self._of(ranges.received)[window])
            seconds += _transfer(before, self._of(ranges.replicas)[window]) / self._m
        if behind is not None:
            seconds += _transfer(behind, self._of(ranges.gradient_in)[window])
        return seconds

    def _wire(self, source: int, stage: int) -> Wire | None:
        if not 0 <= source < self._pipeline.stages:
            return None
        link = self._pipeline.link(source, stage)
        return link.latency_s, link.bytes_per_s


def _compute_s(seconds: UnitSeconds) -> Seconds:
    prefix = np.concatenate(([0.0], np.cumsum(seconds.total)))
    return np.subtract(prefix, prefix[:, None])


def _transfer(wire: Wire, size: Bytes) -> Seconds:
    """`Link.seconds` for a table of sizes."""
    latency_s, bytes_per_s = wire
    return np.where(size > 0, latency_s + size / bytes_per_s, 0.0)
