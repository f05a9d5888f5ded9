"""Finds the least full cut, whatever its time is: it fits if any cut does."""

from __future__ import annotations

from functools import lru_cache, partial

from outsize.ir.cluster import Cluster
from outsize.ir.plan import ScheduleName
from outsize.planner.memory.account import InFlightState, peak_table
from outsize.planner.memory.in_flight_states import states_by_stage
from outsize.planner.memory.range_tables import Bytes
from outsize.planner.partition.chain_dp import Price, bottleneck, partition
from outsize.planner.partition.stage_prices import PricedModel


def least_full_cut(
    case: PricedModel, schedule: ScheduleName, stages: int, cluster: Cluster
) -> tuple[int, ...]:
    """Returns the cut whose fullest device, relative to its memory, is least full: feasible if any cut is."""
    bounds = partition(stages, _fullness(case, schedule, stages, cluster), _traffic(case))
    assert bounds is not None, "every cut has a finite fullness; the caller ensures stages <= units"
    return bounds


def fits(case: PricedModel, schedule: ScheduleName, stages: int, cluster: Cluster) -> bool:
    """Returns whether any cut fits."""
    return bottleneck(stages, _fullness(case, schedule, stages, cluster), case.units) <= 1


def _fullness(case: PricedModel, schedule: ScheduleName, stages: int, cluster: Cluster) -> Price:
    states = states_by_stage(schedule, stages, case.microbatches, stages)
    peak = lru_cache(maxsize=8)(partial(_peak, case))
    return lambda stage: peak(states[stage]) / cluster.devices[stage].memory_bytes


def _peak(case: PricedModel, states: tuple[InFlightState, ...]) -> Bytes:
    return peak_table(case.ranges, states)


def _traffic(case: PricedModel) -> Bytes:
    """Returns the bytes that a run receives in a step."""
    ranges = case.ranges
    return case.microbatches * (ranges.received + ranges.gradient_in) + ranges.replicas
