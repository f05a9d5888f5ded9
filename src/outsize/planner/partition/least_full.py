"""Finds the least full cut, whatever its time is: it fits if any cut does."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Final

import numpy as np

from outsize.ir.cluster import Cluster
from outsize.ir.plan import ScheduleName
from outsize.planner.memory.account import InFlightState, component_table, peaks_of_components
from outsize.planner.memory.in_flight_states import states_by_stage
from outsize.planner.memory.range_tables import Bytes, Seconds
from outsize.planner.partition.chain_dp import Price, partition
from outsize.planner.partition.stage_prices import PricedModel

# The peaks of so many different states of a stage are kept.
FEW: Final = 8


def least_full_cut(
    case: PricedModel, schedule: ScheduleName, stages: int, cluster: Cluster
) -> tuple[int, ...]:
    """Returns the cut whose fullest device, relative to its memory, is least full: feasible if any cut is."""
    bounds = partition(stages, _fullness(case, schedule, stages, cluster), _traffic(case))
    assert bounds is not None, "every cut has a finite fullness; the caller ensures stages <= units"
    return bounds


def _fullness(case: PricedModel, schedule: ScheduleName, stages: int, cluster: Cluster) -> Price:
    """Returns the price of a stage: the share of its memory that each run takes, infinite for runs that leave
    another stage without a unit.
    """
    states = states_by_stage(schedule, stages, case.microbatches, stages)
    components = component_table(case.ranges, case.microbatches)
    windows = list[slice]()
    if len(set(states)) > FEW:  # Otherwise stages share their peaks.
        shorter = case.units - stages + 1
        windows = [slice(stage, stage + shorter + 1) for stage in range(stages)]
    peaks = lru_cache(maxsize=FEW)(partial(_peaks, components))

    def price(stage: int) -> Seconds:
        room_bytes = cluster.devices[stage].memory_bytes
        if not windows:
            return peaks(states[stage]) / room_bytes
        window, full = windows[stage], np.full(components.shape[1:], np.inf)
        full[window, window] = _peaks(components[:, window, window], states[stage]) / room_bytes
        return full

    return price


def _peaks(components: Seconds, states: tuple[InFlightState, ...]) -> Seconds:
    """Returns the peak bytes of runs from their components, of shape (components, firsts, ends)."""
    flat = components.reshape(len(components), -1)
    return peaks_of_components(flat, states).reshape(components.shape[1:])


def _traffic(case: PricedModel) -> Bytes:
    """Returns the bytes that a run receives in a step."""
    ranges = case.ranges
    return case.microbatches * (ranges.received + ranges.gradient_in) + ranges.replicas
