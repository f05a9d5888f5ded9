"""What a stage of each schedule holds at its moments, in a chain; counted once for each schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Final

from outsize.ir.plan import ScheduleName
from outsize.ir.schedule import Schedule
from outsize.planner.layout import How
from outsize.planner.memory import Alive, joint_moments, moments
from outsize.schedules.builders import build, row_of
from outsize.schedules.lower import in_chain, lower
from outsize.schedules.planned import planned

Along = frozenset[tuple[int, int]]

# Schedules that do the same over and over once they have had so many microbatches for each stage.
# Of these what a stage holds depends on the stages behind it alone, but for what the first one lacks.
FROM_BEHIND: Final = frozenset({"naive", "gpipe", "1f1b"})
# Microbatches of a turn that are played: in a longer one more come and go as the third does.
TURN: Final = 5
ENOUGH: Final[dict[str, int]] = {"naive": 1, "1f1b": 1, "zero-bubble": 2, "interleaved": 3}


@lru_cache(maxsize=256)
def moments_by_stage(
    schedule: ScheduleName, stages: int, microbatches: int, ranks: int
) -> tuple[tuple[Alive, ...], ...]:
    """Moments of each stage in a chain: receives sit at the same places whatever the real edges are."""
    if schedule in FROM_BEHIND:
        found = tuple(_from_behind(schedule, stages, stage, microbatches) for stage in range(stages))
    else:
        found = _by_stage(schedule, stages, held_in(schedule, stages, microbatches, ranks), ranks)
    return tuple(_of_batch(moment, microbatches) for moment in found)


def _from_behind(schedule: ScheduleName, stages: int, stage: int, microbatches: int) -> tuple[Alive, ...]:
    """Of a stage that does what another one does with as many behind it: the first, or the one after it."""
    here = min(stage, 1)
    behind = stages - stage + here
    return _alone(schedule, behind, here, held_in(schedule, behind, microbatches, behind))


@lru_cache(maxsize=4096)
def _alone(schedule: ScheduleName, stages: int, stage: int, played: int) -> tuple[Alive, ...]:
    """Of one stage, by its own row."""
    row = in_chain(row_of(schedule, stage, stages, played), stages)
    return moments(Schedule(schedule, played, (row,)), stage)


@lru_cache(maxsize=64)
def moments_by_rank(
    schedule: ScheduleName, stages: int, microbatches: int, ranks: int
) -> tuple[tuple[tuple[Alive, ...], ...], ...]:
    """For each rank the joint moments of its stages in a chain."""
    played = held_in(schedule, stages, microbatches, ranks)
    if schedule == "gpipe":  # stages take turns: when one ends, it has all that were played
        played = min(microbatches, TURN)
    found = _by_rank(schedule, stages, played, ranks)
    if schedule == "gpipe":
        found = tuple(tuple(_more(moment, microbatches - played) for moment in rank) for rank in found)
    return tuple(
        tuple((*_of_batch(moment[:1], microbatches), *moment[1:]) for moment in rank) for rank in found
    )


def _more(moment: tuple[Alive, ...], microbatches: int) -> tuple[Alive, ...]:
    """With so many more in flight where there are more than the first or the last ones of a turn."""
    return tuple(
        replace(alive, in_flight=alive.in_flight + microbatches * (alive.in_flight > TURN // 2))
        for alive in moment
    )


@lru_cache(maxsize=64)
def moments_along(how: How, along: tuple[Along, Along]) -> tuple[tuple[tuple[Alive, ...], ...], ...]:
    """The same where the plan has the actions, over its own edges: values and weights, and gradients."""
    lowered = lower(planned(*how), *along)
    return tuple(joint_moments(lowered, rank) for rank in range(lowered.ranks))


@lru_cache(maxsize=64)
def _by_stage(schedule: ScheduleName, stages: int, played: int, ranks: int) -> tuple[tuple[Alive, ...], ...]:
    lowered = _in_a_chain(schedule, stages, played, ranks)
    return tuple(moments(lowered, stage) for stage in range(stages))


@lru_cache(maxsize=64)
def _by_rank(
    schedule: ScheduleName, stages: int, played: int, ranks: int
) -> tuple[tuple[tuple[Alive, ...], ...], ...]:
    lowered = _in_a_chain(schedule, stages, played, ranks)
    return tuple(joint_moments(lowered, rank) for rank in range(ranks))


def _of_batch(moment: tuple[Alive, ...], microbatches: int) -> tuple[Alive, ...]:
    return tuple(replace(alive, batch=microbatches) for alive in moment)


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
