"""Problem: how many bytes does each stage need at the worst moment of a step? The only owner of bytes.

    weights      parameters the stage owns, its buffers, replicas of parameters owned by earlier stages
    gradients    one per trainable parameter owned
    optimizer    state of those, see optimizer.py
    activations  per microbatch in flight: what autograd saves, and the received values; once: the
                 largest workspace of a unit
    boundary     per microbatch in flight: the values sent on (roots of the backward); receives posted
                 ahead and not yet used; gradients on their way in or out

How many microbatches are in flight is never a formula: the schedule's own actions are executed. On the
stage that acts, a microbatch is

    posted         from its RECV_F (the buffer exists) until its F begins
    in flight      from its F                          until its B has run
    gradient_in    from its RECV_B                     until its B has run
    gradient_out   from its B                          until the next compute action has run

Sent values live as long as saved ones since a stage needs its output as the root of the backward. That a
saved tensor can also be the received or the sent one is ignored: the account errs upwards, by one
boundary per microbatch. A gradient sent is taken to have left when the next compute action is over.

Closed forms are tests only: microbatches in flight are m under GPipe (arXiv 1811.06965) and min(p - s, m)
under 1F1B (arXiv 2104.04473, sec. 2.2). Complexity: O(actions) per schedule.
Oracle: tests/unit/planner/test_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

import numpy as np

from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.planner.optimizer import optimizer_bytes
from outsize.planner.ranges import Bytes, Ranges

LARGEST = 3


@final
@dataclass(frozen=True, slots=True, order=True)
class Alive:
    """How many microbatches a stage holds in each state at one moment."""

    in_flight: int
    posted: int
    gradient_in: int
    gradient_out: int

    def covers(self, other: Alive) -> bool:
        """At least as many in every state."""
        return (
            self.in_flight >= other.in_flight
            and self.posted >= other.posted
            and self.gradient_in >= other.gradient_in
            and self.gradient_out >= other.gradient_out
        )


@final
@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage at its peak. `in_flight` microbatches; `largest` units as (name, bytes)."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    boundary_bytes: int
    in_flight: int
    largest: tuple[tuple[str, int], ...]

    @property
    def peak_bytes(self) -> int:
        """All causes together."""
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.activations_bytes + self.boundary_bytes


def account(
    graph: ModelGraph, bounds: Sequence[int], schedule: Schedule, profile: Profile, optimizer: str
) -> tuple[StageMemory, ...]:
    """The account of each stage; `schedule` is lowered, `bounds` as in `Plan.bounds`.

    Raises BadOption for an unknown optimizer, ModelMismatch for a profile of another graph.
    """
    return account_ranges(Ranges.of(graph, profile, optimizer_bytes(optimizer)), graph, bounds, schedule)


def account_ranges(
    ranges: Ranges, graph: ModelGraph, bounds: Sequence[int], schedule: Schedule
) -> tuple[StageMemory, ...]:
    """`account` on tables that are there already."""
    names = [u.name for u in graph.units]
    return tuple(
        _stage_memory(ranges, names, run, moments(schedule, stage))
        for stage, run in enumerate(pairwise(bounds))
    )


def peak_table(ranges: Ranges, worst: Sequence[Alive]) -> Bytes:
    """Peak bytes of a stage for every run of units `[first, end]`, given its moments."""
    states = ranges.weights + ranges.replicas + ranges.gradients + ranges.optimizer + ranges.workspace
    moving = (_activations(ranges, a) + _boundary(ranges, a) for a in worst)
    peak = next(moving)
    for other in moving:
        np.maximum(peak, other, out=peak)
    return np.add(states, peak, out=peak)


def moments(schedule: Schedule, stage: int) -> tuple[Alive, ...]:
    """The moments of `stage` that no other one covers: one of them is the peak, whatever the bytes are."""
    worst: list[Alive] = []
    row = schedule.actions[schedule.rank_of[stage]]
    for alive in sorted(set(_execute(row, stage)), reverse=True):
        if not any(w.covers(alive) for w in worst):
            worst.append(alive)
    return tuple(worst)


def _execute(row: Sequence[Action], stage: int) -> Iterator[Alive]:
    """What is alive during each action of a stage."""
    held = _Held()
    for action in row:
        if action.stage == stage:
            held.begin(action)
            yield held.alive
            held.end(action)


@final
@dataclass(slots=True)
class _Held:
    """The microbatches of one stage by state, while its actions are executed."""

    in_flight: set[int] = field(default_factory=set[int])
    posted: set[int] = field(default_factory=set[int])
    gradient_in: set[int] = field(default_factory=set[int])
    gradient_out: set[int] = field(default_factory=set[int])

    @property
    def alive(self) -> Alive:
        return Alive(len(self.in_flight), len(self.posted), len(self.gradient_in), len(self.gradient_out))

    def begin(self, action: Action) -> None:
        if action.kind is Kind.RECV_F:
            self.posted.add(action.microbatch)
        elif action.kind is Kind.RECV_B:
            self.gradient_in.add(action.microbatch)
        elif action.kind is Kind.F:
            self.posted.discard(action.microbatch)
            self.in_flight.add(action.microbatch)
        elif action.kind in (Kind.B, Kind.I):
            self.gradient_out.add(action.microbatch)

    def end(self, action: Action) -> None:
        if action.kind in COMPUTE:
            self.gradient_out &= {action.microbatch}
        if action.kind in (Kind.B, Kind.W):
            self.in_flight.discard(action.microbatch)
            self.gradient_in.discard(action.microbatch)


def _activations(ranges: Ranges, alive: Alive) -> Bytes:
    return alive.in_flight * (ranges.saved + ranges.received)


def _boundary(ranges: Ranges, alive: Alive) -> Bytes:
    gradients = alive.gradient_in * ranges.gradient_in + alive.gradient_out * ranges.gradient_out
    return alive.in_flight * ranges.sent + alive.posted * ranges.received + gradients


def _stage_memory(
    ranges: Ranges, names: Sequence[str], run: tuple[int, int], worst: Sequence[Alive]
) -> StageMemory:
    here = ranges.only(*run)
    peak = max(worst, key=lambda a: (int((_activations(here, a) + _boundary(here, a)).item()), a))
    return StageMemory(
        weights_bytes=int((here.weights + here.replicas).item()),
        gradients_bytes=int(here.gradients.item()),
        optimizer_bytes=int(here.optimizer.item()),
        activations_bytes=int((_activations(here, peak) + here.workspace).item()),
        boundary_bytes=int(_boundary(here, peak).item()),
        in_flight=max(a.in_flight for a in worst),
        largest=_largest(ranges, names, run, peak),
    )


def _largest(
    ranges: Ranges, names: Sequence[str], run: tuple[int, int], alive: Alive
) -> tuple[tuple[str, int], ...]:
    """The units that hold most: their weights, states and what the microbatches in flight save in them."""
    units = range(*run)
    each = ranges.weights + ranges.gradients + ranges.optimizer + alive.in_flight * ranges.saved
    ranked = sorted(units, key=lambda u: (-int(each[u, u + 1]), u))
    return tuple((names[u], int(each[u, u + 1])) for u in ranked[:LARGEST])
