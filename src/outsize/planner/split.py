"""Where to cut for one schedule and one number of stages: the partition's price, from tables and a cluster.

The price of a run of units on stage s is the time for which the stage is taken by one microbatch:

    forward + backward of its units
    + link(s - 1, s): latency + received bytes / bandwidth       (step edges: a share of 1 / m)
    + link(s + 1, s): latency + gradient bytes / bandwidth

and infinite where the stage's peak (memory.py) is more than its device has. Each message is priced once,
where it is awaited. Exact as far as (first, end, s) can say it: a skip edge is priced with the neighbour's
link (the same one unless the edge leaves the node), and messages to one stage as one. The simulator, which
ranks what comes out of here, knows every edge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Self, final

import numpy as np

from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Recompute, ScheduleName
from outsize.ir.profile import Profile
from outsize.planner.memory import Alive, moments, peak_table
from outsize.planner.optimizer import optimizer_bytes
from outsize.planner.partition import Price, bottleneck, partition
from outsize.planner.ranges import Bytes, Ranges, Seconds
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

Wire = tuple[float, float]
"""A link's (latency_s, bytes_per_s)."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model at one microbatch size, with its tables; `microbatches` of them make a batch."""

    graph: ModelGraph
    profile: Profile
    ranges: Ranges
    microbatches: int
    recompute: Recompute = "none"

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
        if recompute == "none":
            return cls(graph, profile, Ranges.of(graph, profile, optimizer_bytes(optimizer)), microbatches)
        again = profile.recomputed()
        ranges = Ranges.of(graph, again, optimizer_bytes(optimizer)).recomputed()
        return cls(graph, again, ranges, microbatches, recompute)

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.graph.units)


def split(case: Case, schedule: ScheduleName, stages: int, cluster: Cluster) -> tuple[int, ...] | None:
    """The fastest cut into exactly `stages` that fits the cluster's first devices; None when none fits."""
    peak, taken = _peaks(case, schedule, stages), _taken(case, stages, cluster)

    def price(stage: int) -> Seconds:
        enough = peak(stage) <= cluster.devices[stage].memory_bytes
        return np.where(enough, taken(stage), np.inf)

    return partition(stages, price, _traffic(case))


def leanest(case: Case, schedule: ScheduleName, stages: int, cluster: Cluster) -> tuple[int, ...]:
    """The cut whose fullest device, relative to its memory, is least full: feasible if any cut is."""
    bounds = partition(stages, _fullness(case, schedule, stages, cluster), _traffic(case))
    assert bounds is not None, "every cut has a finite fullness; the caller sees to stages <= units"
    return bounds


def fits(case: Case, schedule: ScheduleName, stages: int, cluster: Cluster) -> bool:
    """Whether any cut does."""
    return bottleneck(stages, _fullness(case, schedule, stages, cluster), case.units) <= 1


def _fullness(case: Case, schedule: ScheduleName, stages: int, cluster: Cluster) -> Price:
    peak = _peaks(case, schedule, stages)
    return lambda stage: peak(stage) / cluster.devices[stage].memory_bytes


def _peaks(case: Case, schedule: ScheduleName, stages: int) -> Callable[[int], Bytes]:
    """Stage -> its peak table; stages in the same situation share one."""
    worst = _moments_by_stage(schedule, stages, case.microbatches)

    @lru_cache(maxsize=3)
    def table(moments: tuple[Alive, ...]) -> Bytes:
        return peak_table(case.ranges, moments)

    return lambda stage: table(worst[stage])


@lru_cache(maxsize=256)
def _moments_by_stage(
    schedule: ScheduleName, stages: int, microbatches: int
) -> tuple[tuple[Alive, ...], ...]:
    """Moments of each stage in a chain: receives sit at the same places whatever the real edges are."""
    chain = range(stages)
    forward, backward = frozenset(pairwise(chain)), frozenset(pairwise(reversed(chain)))
    lowered = lower(build(schedule, stages, microbatches), forward, backward)
    return tuple(moments(lowered, stage) for stage in chain)


def _taken(case: Case, stages: int, cluster: Cluster) -> Callable[[int], Seconds]:
    """Stage -> seconds for which a run is taken by one microbatch; stages with equal links share a table."""

    @lru_cache(maxsize=3)
    def table(before: Wire | None, behind: Wire | None) -> Seconds:
        seconds = case.ranges.compute_s.copy()
        if before is not None:
            seconds += _transfer(before, case.ranges.received)
            seconds += _transfer(before, case.ranges.replicas) / case.microbatches
        if behind is not None:
            seconds += _transfer(behind, case.ranges.gradient_in)
        return seconds

    def wire(source: int, stage: int) -> Wire | None:
        if not 0 <= source < stages:
            return None
        link = cluster.link(source, stage)
        return link.latency_s, link.bytes_per_s

    return lambda stage: table(wire(stage - 1, stage), wire(stage + 1, stage))


def _transfer(wire: Wire, size: Bytes) -> Seconds:
    """`Link.seconds` for a table of sizes."""
    latency_s, bytes_per_s = wire
    return np.where(size > 0, latency_s + size / bytes_per_s, 0.0)


def _traffic(case: Case) -> Bytes:
    """Bytes that a run receives in a step."""
    ranges = case.ranges
    return case.microbatches * (ranges.received + ranges.gradient_in) + ranges.replicas
