"""Finds the least full cut, whatever its time is: it fits if any cut does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from outsize.ir.cluster import Cluster
from outsize.ir.plan import ScheduleName
from outsize.planner.memory.account import InFlightCounts, component_table
from outsize.planner.memory.range_tables import Bytes, Seconds
from outsize.planner.partition.chain_dp import Price, partition
from outsize.planner.partition.stage_prices import PricedModel


def least_full_cut(
    case: PricedModel, schedule: ScheduleName, stages: int, cluster: Cluster
) -> tuple[int, ...]:
    """Returns the cut whose fullest device, relative to its memory, is least full: feasible if any cut is."""
    bounds = partition(stages, _fullness(case, schedule, stages, cluster), _traffic(case))
    assert bounds is not None, "every cut has a finite fullness; the caller ensures stages <= units"
    return bounds


def _fullness(case: PricedModel, schedule: ScheduleName, stages: int, cluster: Cluster) -> Price:
    """Returns the price of a stage: the share of its memory that each run takes."""
    in_flight = tuple(map(InFlightCounts.of, case.states(schedule, stages)))
    components = component_table(case.ranges, case.microbatches)

    @cache
    def base_bytes(alike: InFlightCounts) -> Seconds:
        flat = components.reshape(len(components), -1)
        return alike.base_bytes(flat).reshape(2, *components.shape[1:])

    def price(stage: int) -> Seconds:
        base = base_bytes(replace(in_flight[stage], most=0))
        return in_flight[stage].peaks(base, components) / cluster.devices[stage].memory_bytes

    return price


def _traffic(case: PricedModel) -> Bytes:
    """Returns the bytes that a run receives in a step."""
    ranges = case.ranges
    return case.microbatches * (ranges.received + ranges.gradient_in) + ranges.replicas
