"""Problem: how many bytes does each stage need at the worst moment of a step? The only owner of bytes.

    weights      parameters the stage owns, its buffers, replicas of parameters owned by earlier stages
    gradients    one per trainable parameter owned; none before the first backward of a step
    optimizer    state and master copies of those, see optimizer_states.py
    inputs       the batch, of which every device holds a whole copy; in inference also outputs and caches,
                 in a loop of the user's own the outputs of the batch (ModelGraph.of_loop)
    activations  per microbatch in flight: what autograd saves, and the received values; once, until the
                 optimizer's step: copies of weights in autocast's dtype
    boundary     per microbatch in flight: the values sent on (roots of the backward); receives posted
                 ahead and not yet used; gradients on their way in or out
    workspace    what the microbatch being computed holds beyond that, see activations.py, or the
                 temporaries of the optimizer's step

The number of microbatches in flight never comes from a formula: the schedule's own actions are executed. On
the stage that computes, a microbatch is

    posted         from its RECV_F (the buffer exists) until its F begins
    in flight      from its F                          until its B (or W) has run
    between_halves from its I                          until its W has run
    gradient_in    from its RECV_B                     until its B (or W) has run
    gradient_out   from the end of its B               until the next compute action has run

Sent values live as long as saved ones, because a stage needs its output as the root of the backward. Memory
that autograd saves too is counted once. A stage that runs forwards alone (inference) holds what it received
and sends of a microbatch until the next one's forward is over, since a send may last so long. The outputs of
all microbatches count from the first one on, which is too much by one where the peak is not at the end.

A backward in two halves (I, W) frees what autograd saved at the end of W. Between the halves the gradients
that W needs wait (run/stage/split_backward.py). A received gradient that waits unchanged counts twice.

In a stage whose activations are offloaded to the host (run/moves/activations.py), one waiting microbatch is
being copied: it holds on the device what the others hold on the host (`on_host`).

Closed forms are used in tests only: microbatches in flight are m under GPipe (arXiv 1811.06965) and min(p -
s, m) under 1F1B (arXiv 2104.04473, sec. 2.2). Complexity: O(actions) per schedule.
Oracle: tests/unit/planner/memory/test_memory_account.py; benchmarks/memory compares with real steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import pairwise, starmap
from typing import Final, Generic, NamedTuple, Self, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.graph import PIECE, ModelGraph, Unit
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.planner.memory.range_tables import Bytes, RangeTables

LARGEST = 3


@final
class Phase(IntEnum):
    """Names what a stage computes at a moment; HALF is one half of a split backward."""

    WAIT = 0
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3
    HALF = 4


# The bytes of so many runs in all states stay in a processor's cache while the largest is sought.
IN_CACHE: Final = 4096
_BACKWARDS = (Phase.BACKWARD, Phase.HALF)


@final
@dataclass(frozen=True, slots=True, order=True)
class InFlightState:
    """Counts how many microbatches a stage holds in each state at one moment, and names what it computes.

    `graded`: an earlier backward of the step has made gradients of the weights. `batch`: the number of
    microbatches whose inputs the device holds.
    """

    in_flight: int
    posted: int
    gradient_in: int
    gradient_out: int
    phase: Phase = Phase.BACKWARD
    graded: bool = True
    batch: int = 1
    between_halves: int = 0

    def covers(self, other: InFlightState) -> bool:
        """Returns whether this state needs at least as many bytes as the other, whatever the sizes are."""
        return (
            (self.phase is other.phase or (self.phase in _BACKWARDS and other.phase is Phase.WAIT))
            and self.graded >= other.graded
            and self.in_flight >= other.in_flight
            and self.posted >= other.posted
            and self.gradient_in >= other.gradient_in
            and self.gradient_out >= other.gradient_out
            and self.between_halves >= other.between_halves
        )


@final
@dataclass(frozen=True, eq=False)
class JointStates:
    """Holds the joint states of the stages of one device, of which one computes at a time.

    `distinct` are the states that any of the stages is in; `moments[moment, stage]`, of shape (moments,
    stages), is the place among them of the state of that stage. Moments are distinct unless states are equal.
    """

    distinct: tuple[InFlightState, ...]
    moments: NDArray[np.int64]

    def __iter__(self) -> Iterator[tuple[InFlightState, ...]]:
        """Yields the states of all stages at each moment."""
        return map(self.at, range(len(self.moments)))

    def at(self, moment: int) -> tuple[InFlightState, ...]:
        """Returns the states of all stages at one moment."""
        return tuple(self.distinct[place] for place in self.moments[moment])

    def changed(self, change: Callable[[InFlightState], InFlightState]) -> JointStates:
        """Returns the same moments with other states."""
        return JointStates(tuple(map(change, self.distinct)), self.moments)

    def with_batch(self, microbatches: int) -> JointStates:
        """Returns the joint states where the first stage counts the inputs of so many microbatches."""
        first = tuple(replace(state, batch=microbatches) for state in self.distinct)
        of_first = np.arange(self.moments.shape[1]) == 0
        return JointStates(self.distinct + first, self.moments + len(self.distinct) * of_first)

    def bytes_at(self, components: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the bytes of all stages together at each moment, of shape (moments,).

        `components` are the sizes of each stage, of shape (stages, components); whole numbers below 2^53 are
        added without error.
        """
        of_states = self._counts @ components.T
        return of_states[self.moments, np.arange(len(components))].sum(axis=1)

    @cached_property
    def _counts(self) -> NDArray[np.float64]:
        """Returns the component counts of each distinct state, of shape (states, components)."""
        return np.array([component_counts(state) for state in self.distinct], np.float64)


@final
@dataclass(frozen=True, slots=True)
class StageMemory:
    """Holds the bytes of one stage at its peak, which occurs in `phase`; `phases` has the peak of each phase.

    `in_flight` is the largest number of microbatches in flight; `largest` lists the largest units as (name,
    bytes). `optimizer_bytes` includes the master copies (`master_bytes`). `activations_bytes` includes the
    batch and the temporaries (`workspace_bytes`) of the unit being computed or of the optimizer's step.
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
        """Returns the sum of all causes."""
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.activations_bytes + self.boundary_bytes


def account_stages(
    ranges: RangeTables, graph: ModelGraph, bounds: Sequence[int], schedule: Schedule
) -> tuple[StageMemory, ...]:
    """Returns the memory of each stage; `schedule` is lowered, `bounds` are as in `Plan.bounds`."""
    runs = enumerate(pairwise(bounds))
    return tuple(account_stage(ranges, graph, run, peak_states(schedule, stage)) for stage, run in runs)


def joint_states(schedule: Schedule, rank: int) -> JointStates:
    """Returns each distinct joint state of a rank's stages (in ascending order), of which one computes.

    Only the first stage counts the batch, which a rank holds once.
    """
    row = schedule.actions[rank]
    counters = {stage: _Held.of(row, stage) for stage in sorted({action.stage for action in row})}
    column = {stage: place for place, stage in enumerate(counters)}
    batch = dict.fromkeys(counters, 0) | dict.fromkeys([min(counters)], schedule.microbatches)
    distinct: dict[_Fields, int] = {}

    def place_of(state: _Fields) -> int:
        return distinct.setdefault(state, len(distinct))

    # An action changes the state of its own stage alone.
    waiting = [place_of(held.fields_in(Phase.WAIT, batch[stage])) for stage, held in counters.items()]
    moments: dict[tuple[int, ...], None] = {}
    for action in row:
        stage, held = action.stage, counters[action.stage]
        held.begin(action)
        now = waiting.copy()
        now[column[stage]] = place_of(held.fields_during(action, batch[stage]))
        moments[tuple(now)] = None
        held.end(action)
        waiting[column[stage]] = place_of(held.fields_in(Phase.WAIT, batch[stage]))
    updating = (held.fields_in(Phase.UPDATE, batch[stage]) for stage, held in counters.items())
    moments[tuple(map(place_of, updating))] = None
    return JointStates(tuple(starmap(InFlightState, distinct)), np.array([*moments]))


def bytes_in_state(here: RangeTables, state: InFlightState) -> int:
    """Returns all bytes of a stage in one state; `here` holds the tables of its run alone
    (`RangeTables.of_run`).
    """
    return int(_lasting_bytes(here, state.batch) + _variable_bytes(here, state))


def account_stage(
    ranges: RangeTables, graph: ModelGraph, run: tuple[int, int], states: Sequence[InFlightState]
) -> StageMemory:
    """Returns the memory of one stage that computes the units `run`, from its `peak_states`."""
    return _stage_memory(ranges, graph.units, run, states)


def peak_table(ranges: RangeTables, states: Sequence[InFlightState]) -> Bytes:
    """Returns the peak bytes of a stage for every run of units `[first, end]`, from its peak states."""
    variable = (_variable_bytes(ranges, state) for state in states)
    peak = next(variable)
    for other in variable:
        np.maximum(peak, other, out=peak)
    return np.add(_lasting_bytes(ranges, states[0].batch), peak, out=peak)


def component_table(ranges: RangeTables, batch: int) -> NDArray[np.float64]:
    """Returns the components of a stage's bytes, of shape (components, runs) for tables of one dim."""
    sizes = (_lasting_bytes(ranges, batch), *_sizes(ranges))
    table = np.empty((len(sizes), *np.shape(sizes[0])), np.float64)
    for row, size in enumerate(sizes):
        table[row] = size
    return table


def peaks_of_components(sizes: NDArray[np.float64], states: Sequence[InFlightState]) -> NDArray[np.float64]:
    """Returns the peak bytes of each run in these states; exact, because whole numbers below 2^53 are."""
    peaks = np.empty(sizes.shape[1])
    _peaks_into(peaks, np.array([component_counts(state) for state in states], np.float64), sizes)
    return peaks


@final
@dataclass(frozen=True, slots=True)
class InFlightCounts:
    """Counts the components of a stage's peak states as `most` microbatches that wait for their backward, and
    what each state holds besides as many; states of `resting` are those in which none waits.

    Neighbouring stages mostly differ in `most` alone (under 1f1b by one), so the peak of a run as one of them
    follows from that as another: each of `most` adds the same bytes to the peak of the others.
    """

    most: int
    waiting: tuple[tuple[int, ...], ...]
    resting: tuple[tuple[int, ...], ...]

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, states: tuple[InFlightState, ...]) -> Self:
        """Counts the components of some states."""
        counts = [component_counts(state) for state in states]
        most = max(row[_WAITING] for row in counts)
        waiting = [
            (*row[:_WAITING], row[_WAITING] - most, *row[_WAITING + 1 :]) for row in counts if row[_WAITING]
        ]
        return cls(most, tuple(waiting), tuple(row for row in counts if not row[_WAITING]))

    def base_bytes(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the peak bytes of each run while none waits, and of the other states with `most` fewer,
        of shape (2, runs); exact.
        """
        bases = np.full((2, sizes.shape[1]), -np.inf)
        for base, rows in zip(bases, (self.resting, self.waiting), strict=True):
            if rows:
                _peaks_into(base, np.array(rows, np.float64), sizes)
        return bases

    def peaks(self, bases: NDArray[np.float64], sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the peak bytes of runs from their `base_bytes`; both are of the same runs."""
        return np.maximum(bases[0], bases[1] + self.most * sizes[_WAITING])


def _peaks_into(peaks: NDArray[np.float64], counts: NDArray[np.float64], sizes: NDArray[np.float64]) -> None:
    """Writes the largest bytes of each run among these counts of its components."""
    held = np.flatnonzero(counts.any(axis=0))
    counts = counts[:, held]
    for start in range(0, sizes.shape[1], IN_CACHE):
        some = slice(start, start + IN_CACHE)
        np.max(counts @ sizes[held, some], axis=0, out=peaks[some])


def component_counts(state: InFlightState) -> tuple[int, ...]:
    """Returns how often a stage in this state holds each row of `component_table`."""
    return 1, *_counts(state)


def peak_states(schedule: Schedule, stage: int) -> tuple[InFlightState, ...]:
    """Returns the states of `stage` that no other state covers: its peak occurs in one of them."""
    peak: list[InFlightState] = []
    row, batch = schedule.actions[schedule.rank_of[stage]], schedule.microbatches
    updating: _Fields = (0, 0, 0, 0, Phase.UPDATE, True, batch, 0)
    fields: set[_Fields] = {*_execute(row, stage, batch), updating}
    # Of many states few are distinct, and tuples are compared faster than states.
    ordered = sorted(fields, key=lambda each: (each[4], each), reverse=True)
    for state in starmap(InFlightState, ordered):
        if not any(other.covers(state) for other in peak):
            peak.append(state)
    return tuple(peak)


_Fields = tuple[int, int, int, int, Phase, bool, int, int]
"""Holds the fields of an InFlightState in their order."""


def _execute(row: Sequence[Action], stage: int, batch: int) -> Iterator[_Fields]:
    """Yields the state of the stage during each of its actions."""
    counter = _Held.of(row, stage)
    for action in row:
        if action.stage == stage:
            counter.begin(action)
            yield counter.fields_during(action, batch)
            counter.end(action)


_PHASE = {Kind.F: Phase.FORWARD, Kind.B: Phase.BACKWARD, Kind.I: Phase.HALF, Kind.W: Phase.HALF}


@final
@dataclass(slots=True)
class _Held:
    """Holds the microbatches of one stage by state while the schedule's actions are executed."""

    in_flight: set[int] = field(default_factory=set[int])
    posted: set[int] = field(default_factory=set[int])
    gradient_in: set[int] = field(default_factory=set[int])
    gradient_out: set[int] = field(default_factory=set[int])
    between_halves: set[int] = field(default_factory=set[int])
    graded: bool = False
    trains: bool = True

    @classmethod
    def of(cls, row: Sequence[Action], stage: int) -> Self:
        """Returns the empty state of a stage, which holds no microbatch for a backward where it has none."""
        return cls(trains=any(a.stage == stage and a.kind in _PHASE and a.kind is not Kind.F for a in row))

    def fields_during(self, action: Action, batch: int) -> _Fields:
        """Returns the state while `action` runs on this stage."""
        # The W half makes the gradients, and frees nothing until it ends.
        return self.fields_in(
            _PHASE.get(action.kind, Phase.WAIT), batch, self.graded or action.kind is Kind.W
        )

    def fields_in(self, phase: Phase, batch: int, graded: bool | None = None) -> _Fields:
        """Returns the present counts as a state; `graded` is as it is now unless it is given."""
        counts = len(self.in_flight), len(self.posted), len(self.gradient_in), len(self.gradient_out)
        return *counts, phase, self.graded if graded is None else graded, batch, len(self.between_halves)

    def begin(self, action: Action) -> None:
        if action.kind is Kind.RECV_F:
            self.posted.add(action.microbatch)
        elif action.kind is Kind.RECV_B:
            self.gradient_in.add(action.microbatch)
        elif action.kind is Kind.F:
            self.posted.discard(action.microbatch)
            self.in_flight.add(action.microbatch)
        elif action.kind is Kind.I:
            self.between_halves.add(action.microbatch)

    def end(self, action: Action) -> None:
        if action.kind in COMPUTE:
            self.gradient_out.clear()
            if not self.trains:
                self.in_flight.intersection_update([action.microbatch])
        if action.kind in (Kind.B, Kind.I):
            self.gradient_out.add(action.microbatch)
        if action.kind in (Kind.B, Kind.W):
            self.graded = True
            self.in_flight.discard(action.microbatch)
            self.gradient_in.discard(action.microbatch)
            self.between_halves.discard(action.microbatch)


def _lasting_bytes(ranges: RangeTables, batch: int) -> Bytes:
    """Returns the bytes that are present in every phase."""
    return ranges.weights + ranges.replicas + ranges.optimizer + batch * ranges.inputs


def _variable_bytes(ranges: RangeTables, state: InFlightState) -> Bytes:
    """Returns the bytes that depend on the state."""
    pairs = zip(_counts(state), _sizes(ranges), strict=True)
    return sum((count * size for count, size in pairs if count), np.zeros_like(ranges.sent))


Amount = TypeVar("Amount", int, Bytes)


@final
class Components(NamedTuple, Generic[Amount]):
    """Holds, for each component of the variable bytes, its size for every run or how many a stage holds.

    `awaiting_backward`: what a microbatch that waits for its backward saved and sent. `received`, `sent`,
    `gradient_in`, `gradient_out`: boundary buffers. `forward`, `backward`, `first_backward`: what the
    microbatch being computed holds. `gradients` are those of weights, `update` are the optimizer's
    temporaries, less the copies of weights in autocast's dtype, which are gone by then. `between_halves`:
    gradients that wait for the second half of a backward. `split_backward`: what one half holds. `copied`:
    activations being copied to or from the host.
    """

    awaiting_backward: Amount
    received: Amount
    sent: Amount
    gradient_in: Amount
    gradient_out: Amount
    forward: Amount
    backward: Amount
    first_backward: Amount
    gradients: Amount
    update: Amount
    between_halves: Amount
    split_backward: Amount
    copied: Amount


# The row of `component_table` with what a microbatch that waits holds; the first row has what lasts.
_WAITING: Final = 1 + Components._fields.index("awaiting_backward")


def _sizes(ranges: RangeTables) -> Components[Bytes]:
    """Returns the bytes of one of each component, for every run."""
    return Components(
        awaiting_backward=_waiting_bytes(ranges) + ranges.sent,
        received=ranges.received,
        sent=ranges.sent,
        gradient_in=ranges.gradient_in,
        gradient_out=ranges.gradient_out,
        forward=ranges.forward,
        backward=ranges.backward,
        first_backward=ranges.first_backward,
        gradients=ranges.gradients,
        update=ranges.update - ranges.casts,
        between_halves=ranges.between_halves,
        split_backward=ranges.split_backward,
        copied=ranges.on_host,
    )


def _counts(state: InFlightState) -> Components[int]:
    """Returns how many of each component a stage holds; `backward` includes the weights' gradients."""
    forward, backward = state.phase is Phase.FORWARD, state.phase is Phase.BACKWARD
    computing, half = forward or backward, state.phase is Phase.HALF
    return Components(
        awaiting_backward=state.in_flight - computing,
        received=state.posted + computing,
        sent=int(backward),
        gradient_in=state.gradient_in,
        gradient_out=state.gradient_out,
        forward=int(forward),
        backward=int(backward and state.graded),
        first_backward=int(backward and not state.graded),
        gradients=int(state.graded and not backward),
        update=int(state.phase is Phase.UPDATE),
        between_halves=state.between_halves,
        split_backward=int(half),
        copied=min(1, max(0, state.in_flight - (computing or half))),
    )


def _waiting_bytes(ranges: RangeTables) -> Bytes:
    """Returns the activation bytes of a microbatch that waits for its backward."""
    return ranges.saved + ranges.received - ranges.saved_boundary


def _gradients(ranges: RangeTables, state: InFlightState) -> Bytes:
    """Returns the bytes of activation gradients that are being passed between stages."""
    return state.gradient_in * ranges.gradient_in + state.gradient_out * ranges.gradient_out


def _stage_memory(
    ranges: RangeTables, units: Sequence[Unit], run: tuple[int, int], states: Sequence[InFlightState]
) -> StageMemory:
    here = ranges.of_run(*run)
    peak = max(states, key=lambda a: (int(_variable_bytes(here, a)), a.phase, a))
    total = int(_lasting_bytes(here, peak.batch) + _variable_bytes(here, peak))
    gradients = int(peak.graded * here.gradients)
    weights, optimizer = int(here.weights - here.casts + here.replicas), int(here.optimizer)
    boundary = int(peak.in_flight * here.sent + peak.posted * here.received + _gradients(here, peak))
    activations = total - weights - gradients - optimizer - boundary
    waiting = int(
        peak.in_flight * _waiting_bytes(here)
        + peak.between_halves * here.between_halves
        + peak.batch * here.inputs
        + (peak.phase is not Phase.UPDATE) * here.casts
    )
    waiting += int(min(peak.in_flight, 2) * here.on_host)
    return StageMemory(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        boundary_bytes=boundary,
        in_flight=max(a.in_flight for a in states),
        largest=_largest(ranges, units, run, peak),
        workspace_bytes=max(activations - waiting, 0),
        master_bytes=int(here.master),
        phase=_phase_name(peak.phase),
        phases=_phases(here, states),
    )


def _phase_name(phase: Phase) -> str:
    return "backward" if phase in _BACKWARDS else phase.name.lower()


def _phases(here: RangeTables, states: Sequence[InFlightState]) -> tuple[tuple[str, int], ...]:
    """Returns the peak bytes of each phase; `load` is before the first step."""
    peaks = {"load": int(here.weights - here.casts + here.replicas + here.optimizer)}
    lasting = int(_lasting_bytes(here, states[0].batch))
    for state in sorted(states, key=lambda a: a.phase):
        name = _phase_name(state.phase)
        peaks[name] = max(peaks.get(name, 0), lasting + int(_variable_bytes(here, state)))
    return tuple(peaks.items())


def _largest(
    ranges: RangeTables, units: Sequence[Unit], run: tuple[int, int], state: InFlightState
) -> tuple[tuple[str, int], ...]:
    """Returns the units that hold the most bytes: weights, gradients, states, and saved activations."""
    weights, gradients, optimizer = (
        np.diagonal(table, offset=1)[run[0] : run[1]]
        for table in (ranges.weights, ranges.gradients, ranges.optimizer)
    )
    saved = state.in_flight * _saved_by_unit(ranges.saved, run)
    bytes_of = dict(zip(range(*run), (weights + gradients + optimizer + saved).tolist(), strict=True))
    ranked = sorted(bytes_of, key=lambda u: (-bytes_of[u], u))
    return tuple((_shown(units[u]), bytes_of[u]) for u in ranked[:LARGEST])


def _shown(unit: Unit) -> str:
    """Returns the name of a unit; of a piece of several (costs/coarsening.py) also the module of its last
    weight.
    """
    last = unit.parameters[-1].rpartition(".")[0] if unit.kind == PIECE and unit.parameters else unit.name
    return unit.name if last in ("", unit.name) else f"{unit.name} to {last}"


def _saved_by_unit(saved: Bytes, run: tuple[int, int]) -> Bytes:
    """Returns what each unit of a run adds to its saved bytes.

    A run of one unit may hold more than that: its block's inputs where blocks are recomputed, and what every
    run holds. The first unit adds what the run without it lacks.
    """
    first, end = run
    if end - first == 1:
        return saved[first, end:][:1]
    added = np.diff(saved[first, first + 1 : end + 1])
    return np.maximum(0, np.append(saved[first, end] - saved[first + 1, end], added))
