"""Which cut is least full, whatever it costs: what fits if anything does."""

from __future__ import annotations

from functools import lru_cache, partial

from outsize.ir.cluster import Cluster
from outsize.ir.plan import ScheduleName
from outsize.planner.memory import Alive, peak_table
from outsize.planner.moments import moments_by_stage
from outsize.planner.partition import Price, bottleneck, partition
from outsize.planner.ranges import Bytes
from outsize.planner.split import Case


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
    peak = lru_cache(maxsize=8)(partial(_peak, case))
    return lambda stage: peak(worst[stage]) / cluster.devices[stage].memory_bytes


def _peak(case: Case, worst: tuple[Alive, ...]) -> Bytes:
    return peak_table(case.ranges, worst)


def _traffic(case: Case) -> Bytes:
    """Bytes that a run receives in a step."""
    ranges = case.ranges
    return case.microbatches * (ranges.received + ranges.gradient_in) + ranges.replicas
