"""Counts how many microbatches a stage holds in each state (`account.InFlightState`), for a chain of stages.

Only non-dominated states are kept: those that no other state of the stage exceeds in every count, since the
peak is in one of them. Results are cached for each schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Final

from outsize.ir.plan import ScheduleName
from outsize.ir.schedule import Schedule
from outsize.planner.costs.stage_edges import Along
from outsize.planner.layout.layout import ScheduleKey
from outsize.planner.memory.account import InFlightState, JointStates, joint_states, peak_states
from outsize.schedules.builders import build, planned, row_of
from outsize.schedules.families import family_of
from outsize.schedules.lower import in_chain, lower

States = tuple[InFlightState, ...]
"""Holds the states of one stage that no other state of it covers."""
# Five microbatches of a turn are simulated; each further one behaves as the third.
SIMULATED_TURN: Final = 5
# So many microbatches are simulated in slices after those that fill a pipeline.
SLICED_TURN: Final = 3


@lru_cache(maxsize=256)
def states_by_stage(
    schedule: ScheduleName, stages: int, microbatches: int, ranks: int, slices: int = 1
) -> tuple[tuple[InFlightState, ...], ...]:
    """Returns the states of each stage in a chain; receives are at the same places for any real edges. Where
    microbatches go in `slices`, states count these.
    """
    if slices > 1:
        return _of_slices(schedule, stages, microbatches, slices)
    if family_of(schedule).like_last_stages:
        return _from_neighbours(partial(_as_shorter_pipeline, schedule, stages, microbatches), stages)
    simulated = microbatches_to_simulate(schedule, stages, microbatches, ranks)
    states = _by_stage(schedule, stages, simulated, ranks)
    return tuple(_with_batch(stage_states, microbatches) for stage_states in states)


def _of_slices(schedule: ScheduleName, stages: int, microbatches: int, slices: int) -> tuple[States, ...]:
    """Simulates the microbatches that fill a pipeline, and some more: where a schedule repeats itself, each
    further one behaves as these.
    """
    repeats = family_of(schedule).repeats_after is not None
    simulated = min(microbatches, -(-stages // slices) + SLICED_TURN) if repeats else microbatches
    rows = (row_of(schedule, stage, stages, simulated, slices) for stage in range(stages))
    chained = (in_chain(row, stages) for row in rows)
    count = simulated * slices
    states = (
        peak_states(Schedule(schedule, count, (row,), slices), stage) for stage, row in enumerate(chained)
    )
    return tuple(_with_batch(each, microbatches * slices) for each in states)


def _from_neighbours(simulated: Callable[[int], States], stages: int) -> tuple[States, ...]:
    """Returns the states of each stage; most stages hold as many microbatches as the next one, or one more,
    so few are simulated.

    Microbatches in flight never rise along a chain, and fall by at most one a stage. So between two stages
    that differ by none, or by one for each stage between them, and in nothing else, all stages follow; one in
    the middle is simulated to check it.
    """
    states = {stage: simulated(stage) for stage in {0, 1, stages - 1} & {*range(stages)}}
    spans = [(1, stages - 1)]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        middle = (first + last) // 2
        states[middle] = simulated(middle)
        fewer = (_most(states[first]) - _most(states[last])) // (last - first)
        between = {
            stage: _with_fewer(states[first], fewer * (stage - first)) for stage in range(first, last + 1)
        }
        if all(between[stage] == states[stage] for stage in (middle, last)):
            states |= between
        else:
            spans += [(first, middle), (middle, last)]
    return tuple(states[stage] for stage in range(stages))


def _most(states: States) -> int:
    return max(state.in_flight for state in states)


def _with_fewer(states: States, fewer: int) -> States:
    """Returns the states with fewer microbatches in flight, where any are."""
    return tuple(replace(s, in_flight=s.in_flight - fewer) if s.in_flight else s for s in states)


def _as_shorter_pipeline(schedule: ScheduleName, stages: int, microbatches: int, stage: int) -> States:
    """Simulates a stage as the first or second one of a shorter pipeline with as many stages after it."""
    position = min(stage, 1)
    length = stages - stage + position
    simulated = microbatches_to_simulate(schedule, length, microbatches, length)
    return _with_batch(_simulate_stage(schedule, length, position, simulated), microbatches)


@lru_cache(maxsize=4096)
def _simulate_stage(
    schedule: ScheduleName, stages: int, stage: int, simulated: int
) -> tuple[InFlightState, ...]:
    """Simulates one stage from its own row."""
    row = in_chain(row_of(schedule, stage, stages, simulated), stages)
    return peak_states(Schedule(schedule, simulated, (row,)), stage)


@lru_cache(maxsize=64)
def states_by_rank(
    schedule: ScheduleName, stages: int, microbatches: int, ranks: int
) -> tuple[JointStates, ...]:
    """Returns for each rank the joint states of its stages in a chain."""
    simulated = microbatches_to_simulate(schedule, stages, microbatches, ranks)
    layer_by_layer = family_of(schedule).layer_by_layer
    if layer_by_layer:  # At the end of a stage's turn it holds all microbatches that were simulated.
        simulated = min(microbatches, SIMULATED_TURN)
    states = _by_rank(schedule, stages, simulated, ranks)
    if layer_by_layer:
        more = partial(_with_more_in_flight, microbatches=microbatches - simulated)
        states = tuple(rank.changed(more) for rank in states)
    return tuple(rank.with_batch(microbatches) for rank in states)


def _with_more_in_flight(state: InFlightState, microbatches: int) -> InFlightState:
    """Adds microbatches in flight to a stage that is in the middle of a turn."""
    return replace(state, in_flight=state.in_flight + microbatches * (state.in_flight > SIMULATED_TURN // 2))


@lru_cache(maxsize=64)
def states_along_edges(schedule_key: ScheduleKey, along: Along) -> tuple[JointStates, ...]:
    """Returns the joint states where the plan has the actions, over its own edges."""
    lowered = lower(planned(*schedule_key), *along)
    return tuple(joint_states(lowered, rank) for rank in range(lowered.ranks))


@lru_cache(maxsize=64)
def _by_stage(
    schedule: ScheduleName, stages: int, simulated: int, ranks: int
) -> tuple[tuple[InFlightState, ...], ...]:
    lowered = _in_a_chain(schedule, stages, simulated, ranks)
    return tuple(peak_states(lowered, stage) for stage in range(stages))


@lru_cache(maxsize=64)
def _by_rank(schedule: ScheduleName, stages: int, simulated: int, ranks: int) -> tuple[JointStates, ...]:
    lowered = _in_a_chain(schedule, stages, simulated, ranks)
    return tuple(joint_states(lowered, rank) for rank in range(ranks))


def _with_batch(states: tuple[InFlightState, ...], microbatches: int) -> tuple[InFlightState, ...]:
    return tuple(replace(state, batch=microbatches) for state in states)


def microbatches_to_simulate(schedule: ScheduleName, stages: int, microbatches: int, ranks: int) -> int:
    """Returns the number of microbatches to simulate; those after them reach no new state."""
    return family_of(schedule).microbatches_to_play(stages, microbatches, ranks)


def _in_a_chain(schedule: ScheduleName, stages: int, microbatches: int, ranks: int) -> Schedule:
    chain = range(stages)
    forward, backward = frozenset(pairwise(chain)), frozenset(pairwise(reversed(chain)))
    return lower(build(schedule, stages, microbatches, ranks), forward, backward)
