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

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster, Link
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import ScheduleName
from outsize.ir.profile import Profile
from outsize.planner.memory import Alive, moments, peak_table
from outsize.planner.optimizer import optimizer_bytes
from outsize.planner.partition import partition
from outsize.planner.ranges import Bytes, Ranges, Seconds
from outsize.schedules.builders import build
from outsize.schedules.lower import lower


@final
@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model at one microbatch size, with its tables; `microbatches` of them make a batch."""

    graph: ModelGraph
    profile: Profile
    ranges: Ranges
    microbatches: int

    @classmethod
    def of(cls, graph: ModelGraph, profile: Profile, microbatches: int, optimizer: str) -> Self:
        """Build the tables; BadOption for an unknown optimizer, ModelMismatch for a foreign profile."""
        return cls(graph, profile, Ranges.of(graph, profile, optimizer_bytes(optimizer)), microbatches)

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.graph.units)


def split(case: Case, schedule: ScheduleName, stages: int, cluster: Cluster) -> tuple[int, ...] | None:
    """The fastest cut into exactly `stages` that fits the cluster's first devices; None when none fits."""
    worst = _moments_by_stage(schedule, stages, case.microbatches)

    def price(stage: int) -> Seconds:
        fits = peak_table(case.ranges, worst[stage]) <= cluster.devices[stage].memory_bytes
        return np.where(fits, _seconds(case, stage, stages, cluster), np.inf)

    return partition(stages, price, _traffic(case))


def leanest(case: Case, schedule: ScheduleName, stages: int, cluster: Cluster) -> tuple[int, ...]:
    """The cut whose fullest device, relative to its memory, is least full: feasible if any cut is."""
    worst = _moments_by_stage(schedule, stages, case.microbatches)

    def fullness(stage: int) -> NDArray[np.float64]:
        return peak_table(case.ranges, worst[stage]) / cluster.devices[stage].memory_bytes

    bounds = partition(stages, fullness, _traffic(case))
    assert bounds is not None, "every cut has a finite fullness; the caller sees to stages <= units"
    return bounds


@lru_cache(maxsize=256)
def _moments_by_stage(
    schedule: ScheduleName, stages: int, microbatches: int
) -> tuple[tuple[Alive, ...], ...]:
    """Moments of each stage in a chain: receives sit at the same places whatever the real edges are."""
    chain = range(stages)
    forward, backward = frozenset(pairwise(chain)), frozenset(pairwise(reversed(chain)))
    lowered = lower(build(schedule, stages, microbatches), forward, backward)
    return tuple(moments(lowered, stage) for stage in chain)


def _seconds(case: Case, stage: int, stages: int, cluster: Cluster) -> Seconds:
    seconds = case.ranges.compute_s.copy()
    if stage > 0:
        link = cluster.link(stage - 1, stage)
        seconds += _transfer(link, case.ranges.received)
        seconds += _transfer(link, case.ranges.replicas) / case.microbatches
    if stage < stages - 1:
        seconds += _transfer(cluster.link(stage + 1, stage), case.ranges.gradient_in)
    return seconds


def _transfer(link: Link, size: Bytes) -> Seconds:
    """`Link.seconds` for a table of sizes."""
    return np.where(size > 0, link.latency_s + size / link.bytes_per_s, 0.0)


def _traffic(case: Case) -> Bytes:
    """Bytes that a run receives in a step."""
    ranges = case.ranges
    return case.microbatches * (ranges.received + ranges.gradient_in) + ranges.replicas
