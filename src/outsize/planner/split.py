"""Where to cut for one layout: the partition's price, from tables, a schedule and a cluster.

What a run of units on stage s adds to the step is floor.py's critical path through that stage, and on top for
each of the m microbatches the transfers it waits for:

    link(s - 1, s): latency + received bytes / bandwidth       (step edges: a share of 1 / m)
    link(s + 1, s): latency + gradient bytes / bandwidth

It is infinite where the stage's peak (memory.py) is more than its device has. A stage may run in several
ways (as it is, or recomputed): each run takes the first one that fits. The cut of the least largest price
is exact (partition.py), and so is `floor_s`, the same without links: no cut that fits makes a shorter step.
Each message is priced once, where it is awaited: a skip edge with the neighbour's link (the same one unless
the edge leaves the node), and messages to one stage as one. The simulator, which ranks what comes out of
here, knows every edge. Under interleaved the price is that of one chunk, and its device's memory is shared
out evenly to its chunks.

Complexity: O(p n^2). Oracle: tests/unit/planner/test_split.py and test_search.py price every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Final, Self, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster, Device, Link
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Recompute, ScheduleName
from outsize.ir.profile import Profile
from outsize.ir.schedule import Schedule
from outsize.planner.floor import Work
from outsize.planner.layout import Layout
from outsize.planner.memory import Alive, joint_moments, moments, peak_table
from outsize.planner.optimizer import optimizer_bytes
from outsize.planner.partition import Price, bottleneck, partition
from outsize.planner.ranges import Bytes, Ranges, Seconds
from outsize.planner.seconds import UnitSeconds, fastest
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

Wire = tuple[float, float]
"""A link's (latency_s, bytes_per_s)."""
Key = TypeVar("Key")
Table = TypeVar("Table", Bytes, Seconds)
# Schedules that do the same over and over once they have had so many microbatches for each stage.
ENOUGH: Final[dict[str, int]] = {"naive": 1, "1f1b": 1, "zero-bubble": 2, "interleaved": 3}
# Of one kind of table, kept at a time.
TABLES_BYTES: Final = 200_000_000
# Under these the best balance is as good a cut as any other: no critical path tells them apart.
EVEN: Final = frozenset({"naive", "interleaved"})


@final
@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model at one microbatch size, with its tables; `microbatches` of them make a batch.

    `base` names the units and says what they save; the seconds are those of a layout. `after_s`: of all runs,
    what a stage does once its last backward is over; None where only replicas wait for each other.
    """

    graph: ModelGraph
    base: Profile
    seconds: UnitSeconds
    ranges: Ranges
    microbatches: int
    recompute: Recompute = "none"
    after_s: Seconds | None = None

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
        kept = cls(graph, profile, UnitSeconds.of(profile), ranges, microbatches)
        return kept if recompute == "none" else kept.anew()

    def lasting(self, seconds: UnitSeconds) -> Self:
        """The same at other costs."""
        ranges = replace(self.ranges, compute_s=_compute_s(seconds))
        return replace(self, seconds=seconds, ranges=ranges)

    def anew(self) -> Self:
        """The same when everything is recomputed in the backward."""
        again = replace(self, ranges=self.ranges.recomputed(), recompute="full")
        return again.lasting(self.seconds.recomputed())

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

    `whole` is the cluster as it is; `room` has a device for each group of the layout, with the memory that
    a peak may take. `even`: stages of one device have equal shares of it; or else each may take it all, and
    the account of the whole device decides. A cut is looked for from `first_way` on.
    """

    layout: Layout
    whole: Cluster
    room: Cluster
    ranks: tuple[int, ...]
    ways: tuple[tuple[Case, ...], ...]
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
        return self.whole.devices[self.ranks[stage] * self.layout.group]

    def room_bytes(self, stage: int) -> int:
        """What the peak of this stage may take of its device."""
        return self.room.devices[self.ranks[stage]].memory_bytes // (self.layout.chunks if self.even else 1)

    def link(self, source: int, destination: int) -> Link:
        """Between the devices of two stages."""
        return self.room.link(self.ranks[source], self.ranks[destination])


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
    tables = _Tables(pipeline)
    bounds = partition(pipeline.stages, tables.price, _traffic(pipeline.case))
    if bounds is None:
        return None
    ways = tuple(tables.way(stage, *run) for stage, run in enumerate(pairwise(bounds)))
    return Split(bounds, ways, tables.floor_s())


def leanest(case: Case, schedule: ScheduleName, stages: int, cluster: Cluster) -> tuple[int, ...]:
    """The cut whose fullest device, relative to its memory, is least full: feasible if any cut is."""
    bounds = partition(stages, _fullness(case, schedule, stages, cluster), _traffic(case))
    assert bounds is not None, "every cut has a finite fullness; the caller sees to stages <= units"
    return bounds


def fits(case: Case, schedule: ScheduleName, stages: int, cluster: Cluster) -> bool:
    """Whether any cut does."""
    return bottleneck(stages, _fullness(case, schedule, stages, cluster), case.units) <= 1


def _fullness(case: Case, schedule: ScheduleName, stages: int, cluster: Cluster) -> Price:
    worst = moments_by_stage(schedule, stages, case.microbatches, stages)
    peak = _shared(_peak_of(case), case.units)
    return lambda stage: peak(worst[stage]) / cluster.devices[stage].memory_bytes


@final
class _Tables:
    """Prices of all runs for each stage of a pipeline; stages in the same situation share them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._m = pipeline, pipeline.case.microbatches
        layout = pipeline.layout
        self._worst = moments_by_stage(layout.schedule, layout.stages, self._m, layout.axes.pp)
        cases = {id(case): case for ways in pipeline.ways for case in ways}
        chain = Work.of(pipeline.case.graph, fastest([case.seconds for case in cases.values()]))
        self._works = {key: chain.costing(case.seconds) for key, case in cases.items()}
        self._peaks = {key: _shared(_peak_of(case), case.units) for key, case in cases.items()}
        self._waits = {key: _shared(_wait_of(case), case.units) for key, case in cases.items()}

    def price(self, stage: int) -> Seconds:
        """Seconds of a step through this stage, with the transfers it waits for."""
        return self._first_fitting(stage, [self._with_links(case, stage) for case in self._ways(stage)])

    def floor_s(self) -> float:
        """The least step of all cuts that fit, if links cost nothing."""
        if self._pipeline.layout.chunks > 1:
            return 0.0
        return bottleneck(self._pipeline.stages, self._floor, self._pipeline.case.units)

    def way(self, stage: int, first: int, end: int) -> int:
        """The first way that fits this run."""
        room, worst = self._pipeline.room_bytes(stage), self._worst[stage]
        peaks = (self._peaks[id(case)](worst)[first, end] for case in self._ways(stage))
        return next(w for w, peak in enumerate(peaks, self._pipeline.first_way) if peak <= room)

    def _floor(self, stage: int) -> Seconds:
        return self._first_fitting(stage, [self._compute(case, stage) for case in self._ways(stage)])

    def _ways(self, stage: int) -> Sequence[Case]:
        return self._pipeline.ways[stage][self._pipeline.first_way :]

    def _first_fitting(self, stage: int, prices: Sequence[Seconds]) -> Seconds:
        pairs = zip(reversed(self._fitting(stage)), reversed(prices), strict=True)
        found = np.full_like(prices[0], np.inf)
        for fit, price in pairs:
            found = np.where(fit, price, found)
        return found

    def _fitting(self, stage: int) -> list[NDArray[np.bool_]]:
        room, worst = self._pipeline.room_bytes(stage), self._worst[stage]
        return [self._peaks[id(case)](worst) <= room for case in self._ways(stage)]

    def _with_links(self, case: Case, stage: int) -> Seconds:
        wires = self._wire(stage - 1, stage), self._wire(stage + 1, stage)
        waits = self._m * self._waits[id(case)](wires)
        if self._pipeline.layout.schedule in EVEN:
            return self._m * case.ranges.compute_s + waits
        return self._compute(case, stage) + waits

    def _compute(self, case: Case, stage: int) -> Seconds:
        cuts = np.arange(case.units + 1)
        place = stage, self._pipeline.stages - 1 - stage
        work, schedule = self._works[id(case)], self._pipeline.layout.schedule
        return work.stage_s(schedule, cuts[:, None], cuts[None, :], place, self._m)

    def _wire(self, source: int, stage: int) -> Wire | None:
        if not 0 <= source < self._pipeline.stages:
            return None
        link = self._pipeline.link(source, stage)
        return link.latency_s, link.bytes_per_s


@lru_cache(maxsize=256)
def moments_by_stage(
    schedule: ScheduleName, stages: int, microbatches: int, ranks: int
) -> tuple[tuple[Alive, ...], ...]:
    """Moments of each stage in a chain: receives sit at the same places whatever the real edges are."""
    lowered = _in_a_chain(schedule, stages, held_in(schedule, stages, microbatches, ranks), ranks)
    found = (moments(lowered, stage) for stage in range(stages))
    return tuple(tuple(replace(alive, batch=microbatches) for alive in worst) for worst in found)


@lru_cache(maxsize=64)
def moments_by_rank(
    schedule: ScheduleName, stages: int, microbatches: int, ranks: int
) -> tuple[tuple[tuple[Alive, ...], ...], ...]:
    """For each rank the joint moments of its stages in a chain."""
    lowered = _in_a_chain(schedule, stages, held_in(schedule, stages, microbatches, ranks), ranks)
    found = (joint_moments(lowered, rank) for rank in range(ranks))
    return tuple(
        tuple(tuple(replace(alive, batch=microbatches) for alive in moment) for moment in moments)
        for moments in found
    )


def held_in(schedule: ScheduleName, stages: int, microbatches: int, ranks: int) -> int:
    """Microbatches that have to be played to see all that is held: behind the first few nothing new is."""
    if schedule not in ENOUGH or (schedule == "interleaved" and microbatches % ranks):
        return microbatches  # groups have other sizes when p does not divide m
    enough = -(-(ENOUGH[schedule] * stages + 2) // ranks) * ranks
    return min(microbatches, enough)


def _in_a_chain(schedule: ScheduleName, stages: int, microbatches: int, ranks: int) -> Schedule:
    chain = range(stages)
    forward, backward = frozenset(pairwise(chain)), frozenset(pairwise(reversed(chain)))
    return lower(build(schedule, stages, microbatches, ranks), forward, backward)


def _peak_of(case: Case) -> Callable[[tuple[Alive, ...]], Bytes]:
    """The moments of a stage -> peak bytes of each run."""

    def table(worst: tuple[Alive, ...]) -> Bytes:
        return peak_table(case.ranges, worst)

    return table


def _wait_of(case: Case) -> Callable[[tuple[Wire | None, Wire | None]], Seconds]:
    """(wire before, wire behind) -> seconds a run waits for the messages of one microbatch."""

    def table(wires: tuple[Wire | None, Wire | None]) -> Seconds:
        (before, behind), ranges = wires, case.ranges
        seconds = np.zeros_like(ranges.compute_s)
        if before is not None:
            seconds += _transfer(before, ranges.received)
            seconds += _transfer(before, ranges.replicas) / case.microbatches
        if behind is not None:
            seconds += _transfer(behind, ranges.gradient_in)
        return seconds

    return table


def _shared(table: Callable[[Key], Table], units: int) -> Callable[[Key], Table]:
    """Each is built once, as long as there is memory for so many."""
    return lru_cache(maxsize=max(3, TABLES_BYTES // (8 * (units + 1) ** 2)))(table)


def _compute_s(seconds: UnitSeconds) -> Seconds:
    prefix = np.concatenate(([0.0], np.cumsum(seconds.total)))
    return np.subtract(prefix, prefix[:, None])


def _transfer(wire: Wire, size: Bytes) -> Seconds:
    """`Link.seconds` for a table of sizes."""
    latency_s, bytes_per_s = wire
    return np.where(size > 0, latency_s + size / bytes_per_s, 0.0)


def _traffic(case: Case) -> Bytes:
    """Bytes that a run receives in a step."""
    ranges = case.ranges
    return case.microbatches * (ranges.received + ranges.gradient_in) + ranges.replicas
