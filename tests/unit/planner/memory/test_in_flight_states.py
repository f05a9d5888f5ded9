"""States of stages that follow from those of neighbours are those of a simulation of each stage."""

from __future__ import annotations

from itertools import product

import pytest

from outsize.ir.schedule import Schedule
from outsize.planner.memory.account import peak_states
from outsize.planner.memory.in_flight_states import States, microbatches_to_simulate, states_by_stage
from outsize.schedules.builders import row_of
from outsize.schedules.families import families
from outsize.schedules.lower import in_chain

ALIKE = [family.name for family in families() if family.like_last_stages]


@pytest.mark.parametrize("schedule", ALIKE)
def test_stages_that_are_not_simulated_hold_what_a_simulation_says(schedule: str) -> None:
    for stages, microbatches in product((1, 2, 3, 5, 8, 17), (1, 2, 3, 4, 7, 8, 9, 16, 40)):
        found = states_by_stage(schedule, stages, microbatches, stages)
        for stage in range(stages):
            assert _alike(found[stage]) == _alike(_simulated(schedule, stages, stage, microbatches))


def _simulated(schedule: str, stages: int, stage: int, microbatches: int) -> States:
    simulated = microbatches_to_simulate(schedule, stages, microbatches, stages)
    row = in_chain(row_of(schedule, stage, stages, simulated), stages)
    return peak_states(Schedule(schedule, simulated, (row,)), stage)


def _alike(states: States) -> set[tuple[object, ...]]:
    """Returns the fields but the batch, which counts what was simulated."""
    return {
        (s.in_flight, s.posted, s.gradient_in, s.gradient_out, s.phase, s.graded, s.between_halves)
        for s in states
    }
