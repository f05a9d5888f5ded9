"""Interpreter: run one rank's row of a lowered schedule.

    action      handler          waits for
    0F1         forward          the values posted by 0RECV_F1
    0B1         backward         the gradients posted by 0RECV_B1
    0SEND_F1    send values      nothing
    0RECV_F1    post receives    nothing
    ...

Each action of the row is bound to its handler once, when the interpreter is built: which boundaries it moves,
on which channels, and the cells in which they wait between two actions of the rank. A step walks the list.
Microbatches of other shapes have other programs with the same wiring (edges, tied weights), so one schedule
runs them all. New behaviour is a new action or a lowering pass, never an `if` here. In one process several
interpreters take turns (run/turns.py): each runs until its next compute action lacks a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

from torch import Tensor

from outsize.ir.schedule import COMPUTE, NO_MICROBATCH, Action, Kind, Schedule
from outsize.ir.timeline import Lane
from outsize.run.boundary import Boundary
from outsize.run.cells import MISSING, Cell, ready, take
from outsize.run.clock import HOST, Clock
from outsize.run.marks import Marks
from outsize.run.moves import Moves, Resident
from outsize.run.rng import Seed
from outsize.run.stage import Gradients, Stage
from outsize.run.transport import Pending, Transport
from outsize.run.values import Values

Message = tuple[int, int, int]  # boundary key, consuming stage, microbatch


@final
@dataclass(frozen=True, slots=True)
class Programs:
    """What runs a step: `stage(number, microbatch)` of so many stages; channels; what moves weights, and what
    stages of one rank hand to each other.
    """

    stages: int
    stage: Callable[[int, int], Stage]
    channels: Sequence[int]  # by microbatch
    moves: Moves = field(default_factory=Resident)
    values: Values = field(default_factory=Values)


@final
@dataclass
class StepInputs:
    """One step's data: `inputs[mb]` are all input tensors, `weights[mb]` the share of the loss."""

    inputs: Sequence[Sequence[Tensor]]
    weights: Sequence[float]
    seeds: Sequence[Seed]


@final
@dataclass
class StepOutputs:
    """What a rank has at the end of a step."""

    marks: Marks
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, tuple[Any, ...]] = field(default_factory=dict)


@final
@dataclass(slots=True)
class _Op:
    """A bound action: `gather` waits for its messages, `run` acts on them; None: it has none to wait for."""

    text: str
    lane: Lane
    run: Callable[[Any], None]
    gather: Callable[[], Any] | None = None
    ready: Callable[[], bool] | None = None
    at: int = 0  # of its marks


@final
class Interpreter:
    """One rank. `begin(inputs)`, then `run()`; or `advance()` until it returns None."""

    def __init__(
        self, rank: int, schedule: Schedule, programs: Programs, transport: Transport, clock: Clock = HOST
    ) -> None:
        self.rank, self.schedule = rank, schedule
        self._transport, self._clock, self._mark = transport, clock, clock.mark
        self._handlers = _Handlers(rank, schedule, programs, transport)
        self._ops = [self._handlers.bind(at) for at in range(len(schedule.actions[rank]))]
        for number, op in enumerate(self._ops):
            op.at = 3 * number
        self._names: list[tuple[str, Lane]] = [(op.text, op.lane) for op in self._ops]
        self._times: list[Any] = []
        self._at = 0

    @property
    def outputs(self) -> StepOutputs:
        """What the step has given so far."""
        return self._handlers.outputs

    def begin(self, step: StepInputs) -> None:
        """Set the data of a step."""
        self._at = 0
        marks = Marks(self._names, clock=self._clock)
        self._times = marks.times
        self._handlers.begin(step, StepOutputs(marks))

    def run(self) -> StepOutputs:
        """All actions, blocking on receives."""
        for op in self._ops:
            self._execute(op)
        self._transport.flush()
        return self.outputs

    def advance(self) -> bool | None:
        """One action if it can run: True; False when it lacks a message; None at the end of the row."""
        if self._at == len(self._ops):
            return None
        op = self._ops[self._at]
        if op.ready is not None and not op.ready():
            return False
        self._execute(op)
        self._at += 1
        return True

    def computes(self) -> bool:
        """Is the next action one of compute?"""
        return self._at < len(self._ops) and self._ops[self._at].lane == "compute"

    def current(self) -> str:
        """The action that `advance` would run next."""
        return self._ops[min(self._at, len(self._ops) - 1)].text

    def reset(self) -> None:
        """Forget an unfinished step."""
        self._handlers.reset()

    def _execute(self, op: _Op) -> None:
        times, at, mark, messages = self._times, op.at, self._mark, None
        times[at] = mark()
        if op.gather is not None:
            messages = op.gather()
            times[at + 1] = mark()
        op.run(messages)
        times[at + 2] = mark()


@final
class _Handlers:
    """The table {action -> handler} of one rank, and the cells between them.

    It does not hold the ops that it binds: an engine that is dropped is freed at once, not when Python's
    collector next runs.
    """

    def __init__(self, rank: int, schedule: Schedule, programs: Programs, transport: Transport) -> None:
        self._rank, self._rank_of = rank, schedule.rank_of
        self._row = schedule.actions[rank]
        self._programs, self._transport = programs, transport
        self._lends = programs.values.lends
        self._stages: dict[int, Stage] = {}
        # Whoever takes a message, a compute action or a send, takes it out of its cell. A tied weight comes
        # with microbatch 0 and stays for the step.
        self._values: dict[Message, Cell] = {}
        self._gradients: dict[Message, Cell] = {}
        self._tied: dict[tuple[str, int], Cell] = {}
        self._held: dict[tuple[int, int], list[Pending]] = {}
        self._trains = any(a.kind in (Kind.B, Kind.I) for a in schedule.actions[rank])
        self._step = StepInputs((), (), ())
        self.outputs = StepOutputs(Marks(()))

    def begin(self, step: StepInputs, outputs: StepOutputs) -> None:
        """A new step's data."""
        self._step, self.outputs = step, outputs
        for cell in self._tied.values():
            cell[0] = MISSING
        for stage in self._stages.values():
            stage.begin()

    def reset(self) -> None:
        """Forget an unfinished step."""
        for stage in self._stages.values():
            stage.forget()
        for cell in (*self._values.values(), *self._tied.values(), *self._gradients.values()):
            cell[0] = MISSING
        for held in self._held.values():
            held.clear()

    def bind(self, at: int) -> _Op:
        """The action at this place of the row with its handler."""
        action, moves = self._row[at], self._programs.moves
        if action.kind in NO_MICROBATCH:
            move = moves.action(self._row, at)
            return _Op(str(action), "load", lambda _: move())
        op = self._table()[action.kind](action)
        arrival = moves.arrival(self._row, at) if action.kind in COMPUTE else None
        return op if arrival is None else replace(op, gather=_behind(arrival, op.gather))

    def _table(self) -> dict[Kind, Callable[[Action], _Op]]:
        return {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward_input,
            Kind.W: self._backward_weight,
            Kind.SEND_F: self._send_values,
            Kind.RECV_F: self._receive_values,
            Kind.SEND_B: self._send_gradients,
            Kind.RECV_B: self._receive_gradients,
        }

    def _stage(self, action: Action) -> Stage:
        found = self._programs.stage(action.stage, action.microbatch)
        self._stages[id(found)] = found
        return found

    def _down(self, boundary: Boundary, stage: int, mb: int) -> int:
        """One channel per program, boundary value, consuming stage and direction: this is the value's."""
        return self._programs.channels[mb] + (boundary.key * self._programs.stages + stage) * 2

    def _up(self, boundary: Boundary, stage: int, mb: int) -> int:
        """The gradient's."""
        return self._down(boundary, stage, mb) + 1

    # -- compute -------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> _Op:
        stage, mb = self._stage(action), action.microbatch
        wanted = [self._wanted(b, action.stage, mb) for b in stage.program.received]
        held, release = self._held_of(action), self._release(action) if not self._trains else None
        pairs = [(b, c) for b in stage.program.sent for c in b.consumers]
        values = [(b, c) for b, c in pairs if b.weight is None]
        leaving = [(self._value(b, c, mb), b.key, self._lender(b.key, c, mb)) for b, c in values]
        lent = [(self._value(b, c, mb), b.key) for b, c in pairs if b.weight is not None and mb == 0]

        def run(received: list[Tensor] | None) -> None:
            step = self._step
            result = stage.forward(mb, step.inputs[mb], received or (), step.seeds[mb])
            if result.loss is not None:
                self.outputs.losses[mb] = result.loss.detach()
            if result.outputs:
                self.outputs.outputs[mb] = result.outputs
            for cell, key, lend in leaving:
                cell[0] = lend(result.sent[key].detach())
            for cell, key in lent:
                cell[0] = stage.own(key).detach()
            if release is not None:
                release()

        def gather() -> list[Tensor]:
            return [take(cell, remote, keep, held) for cell, remote, keep in wanted]

        op = _Op(str(action), "compute", run)
        return replace(op, gather=gather, ready=ready([w[:2] for w in wanted])) if wanted else op

    def _backward(self, action: Action) -> _Op:
        return self._gradients_through(action, self._stage(action).backward, self._release(action))

    def _backward_input(self, action: Action) -> _Op:
        return self._gradients_through(action, self._stage(action).backward_input, lambda: None)

    def _backward_weight(self, action: Action) -> _Op:
        stage, mb, release = self._stage(action), action.microbatch, self._release(action)

        def run(_: None) -> None:
            stage.backward_weight(mb)
            release()

        return _Op(str(action), "compute", run)

    def _gradients_through(
        self, action: Action, backward: Callable[[int, float, Gradients], Gradients], end: Callable[[], None]
    ) -> _Op:
        """Gradients of what the stage sent, and the last stage's loss, become those of what it received."""
        number, mb, held = action.stage, action.microbatch, self._held_of(action)
        program = self._stage(action).program
        ours = [(b, b.following(number)) for b in (*program.sent, *program.received) if b.requires_grad]
        incoming = [(b.key, self._gradient(b.key, number, mb), far) for b, far in ours if far is not None]
        incoming = [(key, cell, self._pends(far)) for key, cell, far in incoming]
        back = [b for b in program.received if b.requires_grad]
        onward = [(b.key, b.previous(number)) for b in back]
        returned = [(self._gradient(k, to, mb), k, self._lender(k, to, mb, back=True)) for k, to in onward]

        def run(gradients: Gradients | None) -> None:
            sink = backward(mb, self._step.weights[mb], gradients or {})
            for cell, key, lend in returned:
                cell[0] = lend(sink.get(key))
            end()

        def gather() -> Gradients:
            return {key: take(cell, remote, False, held) for key, cell, remote in incoming}

        op = _Op(str(action), "compute", run)
        return replace(op, gather=gather, ready=ready([i[1:] for i in incoming])) if incoming else op

    # -- transfers -----------------------------------------------------------------------------------

    def _send_values(self, action: Action) -> _Op:
        mb, peer = action.microbatch, action.peer
        sent = self._stage(action).program.sent
        leaving = [b for b in sent if peer in b.consumers and (b.weight is None or mb == 0)]
        return self._send(action, [(self._value(b, peer, mb), self._down(b, peer, mb)) for b in leaving])

    def _receive_values(self, action: Action) -> _Op:
        mb, here = action.microbatch, action.stage
        received = self._stage(action).program.received
        coming = [b for b in received if b.producer == action.peer and (b.weight is None or mb == 0)]
        return self._receive(action, [(self._value(b, here, mb), self._down(b, here, mb)) for b in coming])

    def _send_gradients(self, action: Action) -> _Op:
        mb, here, peer = action.microbatch, action.stage, action.peer
        received = self._stage(action).program.received
        back = [b for b in received if b.requires_grad and b.previous(here) == peer]
        return self._send(action, [(self._gradient(b.key, peer, mb), self._up(b, here, mb)) for b in back])

    def _receive_gradients(self, action: Action) -> _Op:
        mb, here, peer = action.microbatch, action.stage, action.peer
        program = self._stage(action).program
        # In the order of their keys, in which the peer sends what it received: NCCL has no tags.
        ours = sorted((*program.sent, *program.received), key=lambda b: b.key)
        coming = [b for b in ours if b.requires_grad and b.following(here) == peer]
        return self._receive(
            action, [(self._gradient(b.key, here, mb), self._up(b, peer, mb)) for b in coming]
        )

    def _send(self, action: Action, leaving: list[tuple[Cell, int]]) -> _Op:
        rank, mb, send = self._rank_of[action.peer], action.microbatch, self._transport.send

        def run(_: None) -> None:
            for cell, channel in leaving:
                tensor, cell[0] = cell[0], MISSING
                send(rank, channel, mb, tensor)

        return _Op(str(action), "send", run)

    def _receive(self, action: Action, coming: list[tuple[Cell, int]]) -> _Op:
        rank, mb, post = self._rank_of[action.peer], action.microbatch, self._transport.post

        def run(_: None) -> None:
            for cell, channel in coming:
                cell[0] = post(rank, channel, mb)

        return _Op(str(action), "recv", run)

    # -- cells ---------------------------------------------------------------------------------------

    def _value(self, boundary: Boundary, stage: int, mb: int) -> Cell:
        if boundary.weight is not None:
            return self._tied.setdefault((boundary.weight, stage), [MISSING])
        return self._values.setdefault((boundary.key, stage, mb), [MISSING])

    def _gradient(self, key: int, stage: int, mb: int) -> Cell:
        return self._gradients.setdefault((key, stage, mb), [MISSING])

    def _wanted(self, boundary: Boundary, stage: int, mb: int) -> tuple[Cell, bool, bool]:
        """The cell of a received value; is it waited for, does it stay for the step?"""
        cell, tied = self._value(boundary, stage, mb), boundary.weight is not None
        remote = self._rank_of[boundary.producer] != self._rank
        return cell, (remote and mb == 0) if tied else self._pends(boundary.producer), tied

    def _pends(self, producer: int) -> bool:
        """Does a cell of what that stage makes hold a Pending?"""
        return self._lends or self._rank_of[producer] != self._rank

    def _lender(self, key: int, taker: int, mb: int, *, back: bool = False) -> Callable[[Any], Any]:
        """What puts a tensor into its cell, for a stage of this rank or to be sent."""
        lends, values = self._lends and self._rank_of[taker] == self._rank, self._programs.values
        return partial(values.lend, (key, taker, mb, back)) if lends else values.apart

    def _held_of(self, action: Action) -> list[Pending]:
        return self._held.setdefault((action.stage, action.microbatch), [])

    def _release(self, action: Action) -> Callable[[], None]:
        """Memory of what the microbatch received may be used anew."""
        held = self._held_of(action)

        def release() -> None:
            for pending in held:
                pending.release()
            held.clear()

        return release


def _behind(arrival: Callable[[], None], gather: Callable[[], Any] | None) -> Callable[[], Any]:
    """Wait for both."""

    def both() -> Any:
        arrival()
        return gather() if gather is not None else None

    return both
