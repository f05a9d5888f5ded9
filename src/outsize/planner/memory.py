"""Problem: how many bytes does each stage need at the worst moment of a step? The only owner of bytes.

    weights      parameters the stage owns, its buffers, replicas of parameters owned by earlier stages
    gradients    one per trainable parameter owned; none before the first backward of a step
    optimizer    state and master copies of those, see optimizer.py; temporaries of the optimizer's step
    inputs       the batch, of which every device has all
    activations  per microbatch in flight: what autograd saves, and the received values
    boundary     per microbatch in flight: the values sent on (roots of the backward); receives posted
                 ahead and not yet used; gradients on their way in or out
    workspace    what the microbatch that acts holds beyond that, see walk.py

How many microbatches are in flight is never a formula: the schedule's own actions are executed. On the
stage that acts, a microbatch is

    posted         from its RECV_F (the buffer exists) until its F begins
    in flight      from its F                          until its B (or W) has run
    waiting        from its I                          until its W has run
    gradient_in    from its RECV_B                     until its B (or W) has run
    gradient_out   from the end of its B               until the next compute action has run

Sent values live as long as saved ones since a stage needs its output as the root of the backward; where
autograd keeps the same memory, it counts once.

A backward in two halves (I, W) frees what autograd saved at the end of W, and between them the gradients wait
that W will need (run/split_backward.py). A gradient that came in and waits as it is counts twice.

Of a stage whose activations go to the host (run/activations.py) one microbatch that waits is on its way: it
has what is `away` of the others.

Closed forms are tests only: microbatches in flight are m under GPipe (arXiv 1811.06965) and min(p - s, m)
under 1F1B (arXiv 2104.04473, sec. 2.2). Complexity: O(actions) per schedule.
Oracle: tests/unit/planner/test_memory.py; benchmarks/memory compares with real steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.planner.optimizer import optimizer_bytes
from outsize.planner.ranges import Bytes, Ranges

LARGEST = 3


@final
class Phase(IntEnum):
    """What a stage does at a moment."""

    WAIT = 0
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3
    HALF = 4


_BACKWARDS = (Phase.BACKWARD, Phase.HALF)


@final
@dataclass(frozen=True, slots=True, order=True)
class Alive:
    """How many microbatches a stage holds in each state at one moment, and what it does.

    `graded`: gradients of the weights are there from an earlier backward; `batch` microbatches are a batch.
    """

    in_flight: int
    posted: int
    gradient_in: int
    gradient_out: int
    phase: Phase = Phase.BACKWARD
    graded: bool = True
    batch: int = 1
    waiting: int = 0

    def covers(self, other: Alive) -> bool:
        """At least as much, whatever the bytes are."""
        return (
            (self.phase is other.phase or (self.phase in _BACKWARDS and other.phase is Phase.WAIT))
            and self.graded >= other.graded
            and self.in_flight >= other.in_flight
            and self.posted >= other.posted
            and self.gradient_in >= other.gradient_in
            and self.gradient_out >= other.gradient_out
            and self.waiting >= other.waiting
        )


@final
@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage at its peak, which is in `phase`; `phases` has the peaks of all.

    `in_flight` microbatches at most; `largest` units as (name, bytes). Among the optimizer's bytes are master
    copies (`master_bytes`); among the activations the batch, and as `workspace_bytes` temporaries: of the
    unit at work, or of the optimizer's step.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    boundary_bytes: int
    in_flight: int
    largest: tuple[tuple[str, int], ...]
    workspace_bytes: int = 0
    master_bytes: int = 0
    phase: str = "backward"
    phases: tuple[tuple[str, int], ...] = ()

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
    runs = enumerate(pairwise(bounds))
    return tuple(account_run(ranges, graph, run, moments(schedule, stage)) for stage, run in runs)


def joint_moments(schedule: Schedule, rank: int) -> tuple[tuple[Alive, ...], ...]:
    """What the stages of a rank hold at once, in ascending order, at each different moment; one acts.

    The first of them has the batch, which is there once.
    """
    row = schedule.actions[rank]
    held = {stage: _Held() for stage in sorted({action.stage for action in row})}
    batch = dict.fromkeys(held, 0) | dict.fromkeys([min(held)], schedule.microbatches)
    found: dict[tuple[Alive, ...], None] = {}
    for action in row:
        held[action.stage].begin(action)
        now = (h.alive(action if s == action.stage else None, batch[s]) for s, h in held.items())
        found[tuple(now)] = None
        held[action.stage].end(action)
    found[tuple(h.counts(Phase.UPDATE, batch[s]) for s, h in held.items())] = None
    return tuple(found)


def held_bytes(here: Ranges, alive: Alive) -> int:
    """All bytes of a stage at a moment; `here` has its run alone (`Ranges.only`)."""
    return int(_always(here, alive.batch) + _moving(here, alive))


def account_run(
    ranges: Ranges, graph: ModelGraph, run: tuple[int, int], worst: Sequence[Alive]
) -> StageMemory:
    """Of one stage with the units of a run, given its `moments`."""
    return _stage_memory(ranges, [u.name for u in graph.units], run, worst)


def peak_table(ranges: Ranges, worst: Sequence[Alive]) -> Bytes:
    """Peak bytes of a stage for every run of units `[first, end]`, given its moments."""
    moving = (_moving(ranges, alive) for alive in worst)
    peak = next(moving)
    for other in moving:
        np.maximum(peak, other, out=peak)
    return np.add(_always(ranges, worst[0].batch), peak, out=peak)


def columns(ranges: Ranges, batch: int) -> NDArray[np.float64]:
    """What a stage's bytes are sums of, of shape (parts, runs) for tables of one dim; see `peaks`."""
    return np.array([_always(ranges, batch), *_parts(ranges)], np.float64)


def peaks(parts: NDArray[np.float64], worst: Sequence[Alive]) -> NDArray[np.float64]:
    """Peak bytes of each run as a stage with these moments; exact, as whole numbers below 2^53 are."""
    return (np.array([counts(alive) for alive in worst], np.float64) @ parts).max(axis=0)


def counts(alive: Alive) -> tuple[int, ...]:
    """How many of each of the `columns` a stage holds at a moment."""
    return 1, *_counts(alive)


def moments(schedule: Schedule, stage: int) -> tuple[Alive, ...]:
    """The moments of `stage` that no other one covers: one of them is the peak, whatever the bytes are."""
    worst: list[Alive] = []
    row, batch = schedule.actions[schedule.rank_of[stage]], schedule.microbatches
    found = {*_execute(row, stage, batch), Alive(0, 0, 0, 0, Phase.UPDATE, batch=batch)}
    for alive in sorted(found, key=lambda a: (a.phase, a), reverse=True):
        if not any(w.covers(alive) for w in worst):
            worst.append(alive)
    return tuple(worst)


def _execute(row: Sequence[Action], stage: int, batch: int) -> Iterator[Alive]:
    """What is alive during each action of a stage."""
    held = _Held()
    for action in row:
        if action.stage == stage:
            held.begin(action)
            yield held.alive(action, batch)
            held.end(action)


_PHASE = {Kind.F: Phase.FORWARD, Kind.B: Phase.BACKWARD, Kind.I: Phase.HALF, Kind.W: Phase.HALF}


@final
@dataclass(slots=True)
class _Held:
    """The microbatches of one stage by state, while its actions are executed."""

    in_flight: set[int] = field(default_factory=set[int])
    posted: set[int] = field(default_factory=set[int])
    gradient_in: set[int] = field(default_factory=set[int])
    gradient_out: set[int] = field(default_factory=set[int])
    waiting: set[int] = field(default_factory=set[int])
    graded: bool = False

    def alive(self, action: Action | None, batch: int) -> Alive:
        """The counts while it acts, or others do."""
        if action is None:
            return self.counts(Phase.WAIT, batch)
        graded = self.graded or action.kind is Kind.W  # one half makes them, and frees nothing meanwhile
        return replace(self.counts(_PHASE.get(action.kind, Phase.WAIT), batch), graded=graded)

    def counts(self, phase: Phase, batch: int) -> Alive:
        """The counts now."""
        counts = len(self.in_flight), len(self.posted), len(self.gradient_in), len(self.gradient_out)
        return Alive(*counts, phase, self.graded, batch, len(self.waiting))

    def begin(self, action: Action) -> None:
        if action.kind is Kind.RECV_F:
            self.posted.add(action.microbatch)
        elif action.kind is Kind.RECV_B:
            self.gradient_in.add(action.microbatch)
        elif action.kind is Kind.F:
            self.posted.discard(action.microbatch)
            self.in_flight.add(action.microbatch)
        elif action.kind is Kind.I:
            self.waiting.add(action.microbatch)

    def end(self, action: Action) -> None:
        if action.kind in COMPUTE:
            self.gradient_out.clear()
        if action.kind in (Kind.B, Kind.I):
            self.gradient_out.add(action.microbatch)
        if action.kind in (Kind.B, Kind.W):
            self.graded = True
            self.in_flight.discard(action.microbatch)
            self.gradient_in.discard(action.microbatch)
            self.waiting.discard(action.microbatch)


def _always(ranges: Ranges, batch: int) -> Bytes:
    """What is there in every phase."""
    return ranges.weights + ranges.replicas + ranges.optimizer + batch * ranges.inputs


def _moving(ranges: Ranges, alive: Alive) -> Bytes:
    """What comes and goes."""
    pairs = zip(_counts(alive), _parts(ranges), strict=True)
    return sum((count * part for count, part in pairs if count), np.zeros_like(ranges.sent))


def _parts(ranges: Ranges) -> tuple[Bytes, ...]:
    """Of a microbatch that waits for its backward; received, sent; gradients on their way in and out; what
    the one that acts holds in a forward, backward, first backward; weights' gradients; the optimizer's step;
    what waits between the halves of a backward, and what one half holds; what is on its way to the host or
    from it.
    """
    return (
        _kept(ranges) + ranges.sent,
        *(ranges.received, ranges.sent, ranges.gradient_in, ranges.gradient_out),
        *(ranges.forward, ranges.backward, ranges.first_backward, ranges.gradients, ranges.update),
        *(ranges.waiting, ranges.halved, ranges.away),
    )


def _counts(alive: Alive) -> tuple[int, ...]:
    """How many there are of each of the `_parts`. The weights' gradients are in what a backward holds."""
    forward, backward = alive.phase is Phase.FORWARD, alive.phase is Phase.BACKWARD
    acting = forward or backward
    return (
        *(alive.in_flight - acting, alive.posted + acting, backward, alive.gradient_in, alive.gradient_out),
        *(forward, backward and alive.graded, backward and not alive.graded),
        *(alive.graded and not backward, alive.phase is Phase.UPDATE),
        *(alive.waiting, alive.phase is Phase.HALF),
        min(1, max(0, alive.in_flight - (acting or alive.phase is Phase.HALF))),
    )


def _kept(ranges: Ranges) -> Bytes:
    """Activations of a microbatch that waits for its backward."""
    return ranges.saved + ranges.received - ranges.twice


def _gradients(ranges: Ranges, alive: Alive) -> Bytes:
    """On their way from stage to stage."""
    return alive.gradient_in * ranges.gradient_in + alive.gradient_out * ranges.gradient_out


def _stage_memory(
    ranges: Ranges, names: Sequence[str], run: tuple[int, int], worst: Sequence[Alive]
) -> StageMemory:
    here = ranges.only(*run)
    peak = max(worst, key=lambda a: (int(_moving(here, a)), a.phase, a))
    total = int(_always(here, peak.batch) + _moving(here, peak))
    gradients = int(peak.graded * here.gradients)
    weights, optimizer = int(here.weights + here.replicas), int(here.optimizer)
    boundary = int(peak.in_flight * here.sent + peak.posted * here.received + _gradients(here, peak))
    activations = total - weights - gradients - optimizer - boundary
    waiting = int(peak.in_flight * _kept(here) + peak.waiting * here.waiting + peak.batch * here.inputs)
    waiting += int(min(peak.in_flight, 2) * here.away)
    return StageMemory(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        boundary_bytes=boundary,
        in_flight=max(a.in_flight for a in worst),
        largest=_largest(ranges, names, run, peak),
        workspace_bytes=max(activations - waiting, 0),
        master_bytes=int(here.master),
        phase=_name(peak.phase),
        phases=_phases(here, worst),
    )


def _name(phase: Phase) -> str:
    return "backward" if phase in _BACKWARDS else phase.name.lower()


def _phases(here: Ranges, worst: Sequence[Alive]) -> tuple[tuple[str, int], ...]:
    """The peak of each phase."""
    found = {"load": int(here.weights + here.replicas + here.optimizer)}
    always = int(_always(here, worst[0].batch))
    for alive in sorted(worst, key=lambda a: a.phase):
        name = _name(alive.phase)
        found[name] = max(found.get(name, 0), always + int(_moving(here, alive)))
    return tuple(found.items())


def _largest(
    ranges: Ranges, names: Sequence[str], run: tuple[int, int], alive: Alive
) -> tuple[tuple[str, int], ...]:
    """The units that hold most: their weights, states and what the microbatches in flight save in them."""
    units = range(*run)
    weights, gradients, optimizer, saved = (
        np.diagonal(table, offset=1)[run[0] : run[1]]
        for table in (ranges.weights, ranges.gradients, ranges.optimizer, ranges.saved)
    )
    each = dict(zip(units, (weights + gradients + optimizer + alive.in_flight * saved).tolist(), strict=True))
    ranked = sorted(units, key=lambda u: (-each[u], u))
    return tuple((names[u], each[u]) for u in ranked[:LARGEST])
