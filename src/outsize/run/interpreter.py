"""Interpreter: run one rank's row of a lowered schedule.

    action      handler          waits for
    0F1         forward          the values posted by 0RECV_F1
    0B1         backward         the gradients posted by 0RECV_B1
    0SEND_F1    send values      nothing
    0RECV_F1    post receives    nothing
    ...

Each action of the row is bound to its handler once, when the interpreter is built; a step walks the list.
New behaviour is a new action or a lowering pass, never an `if` here. In one process several interpreters
take turns (`run_together`): each runs until its next compute action lacks a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import Tensor

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.ir.timeline import Lane
from outsize.run.boundary import Boundary
from outsize.run.cut import Cut, StageProgram
from outsize.run.rng import Seed
from outsize.run.stage import Gradients, Stage
from outsize.run.transport import Pending, Transport

MakeStage = Callable[[StageProgram], Stage]
Message = tuple[int, int, int]  # boundary key, consuming stage, microbatch


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

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    spans: list[tuple[str, Lane, float, float]] = field(default_factory=list)  # action, lane, start, end


@final
@dataclass(slots=True)
class _Op:
    """A bound action: `gather` waits for its messages, `run` acts on them."""

    text: str
    lane: Lane
    run: Callable[[Any], None]
    gather: Callable[[], Any] = lambda: None
    ready: Callable[[], bool] = lambda: True


@final
class Interpreter:
    """One rank. `begin(inputs)`, then `run()`; or `advance()` until it returns None."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        cut: Cut,
        make_stage: MakeStage,
        transport: Transport,
        channel_base: int = 0,
    ) -> None:
        self.rank, self.schedule, self.cut = rank, schedule, cut
        self._transport = transport
        self._handlers = _Handlers(rank, schedule, cut, make_stage, transport, channel_base)
        self._ops = [self._handlers.bind(action) for action in schedule.actions[rank]]
        self._at = 0

    @property
    def outputs(self) -> StepOutputs:
        """What the step has given so far."""
        return self._handlers.outputs

    def begin(self, step: StepInputs) -> None:
        """Set the data of a step."""
        self._at = 0
        self._handlers.begin(step)

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
        if not op.ready():
            return False
        self._execute(op)
        self._at += 1
        return True

    def current(self) -> str:
        """The action that `advance` would run next."""
        return self._ops[min(self._at, len(self._ops) - 1)].text

    def reset(self) -> None:
        """Forget an unfinished step."""
        self._handlers.reset()

    def _execute(self, op: _Op) -> None:
        asked = time.perf_counter()
        messages = op.gather()
        start = time.perf_counter()
        op.run(messages)
        spans = self.outputs.spans
        if messages:
            spans.append((op.text, "wait", asked, start))
        spans.append((op.text, op.lane, start, time.perf_counter()))


@final
class _Handlers:
    """The table {action -> handler} of one rank, and the messages between them.

    It does not hold the ops that it binds: an engine that is dropped is freed at once, not when Python's
    collector next runs.
    """

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        cut: Cut,
        make_stage: MakeStage,
        transport: Transport,
        channel_base: int,
    ) -> None:
        self._rank_of = schedule.rank_of
        self._count = len(cut.programs)
        self._transport, self._base = transport, channel_base
        own = {a.stage for a in schedule.actions[rank]}
        self._stages = {s: make_stage(cut.programs[s]) for s in sorted(own)}
        # What came in or is about to leave: whoever takes it, a compute action or a send, takes it out.
        self._values: dict[Message, Pending | Tensor] = {}
        self._gradients: dict[Message, Pending | Tensor | None] = {}
        self._held: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        self._trains = any(a.kind in (Kind.B, Kind.I) for a in schedule.actions[rank])
        self._weights: dict[tuple[int, int], Tensor] = {}
        self._step = StepInputs((), (), ())
        self.outputs = StepOutputs()

    def begin(self, step: StepInputs) -> None:
        """A new step's data."""
        self._step, self.outputs = step, StepOutputs()
        self._weights.clear()

    def reset(self) -> None:
        """Forget an unfinished step."""
        for stage in self._stages.values():
            stage.forget()
        for table in (self._values, self._gradients, self._held, self._weights):
            table.clear()

    def bind(self, action: Action) -> _Op:
        """The action with its handler."""
        table = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward_input,
            Kind.W: self._backward_weight,
            Kind.SEND_F: self._send_values,
            Kind.RECV_F: self._receive_values,
            Kind.SEND_B: self._send_gradients,
            Kind.RECV_B: self._receive_gradients,
        }
        return table[action.kind](action)

    def _channel(self, boundary: Boundary, stage: int, backward: bool) -> int:
        """One channel per boundary value, far stage and direction."""
        return self._base + (boundary.key * self._count + stage) * 2 + backward

    def _forward(self, action: Action) -> _Op:
        stage, mb = self._stages[action.stage], action.microbatch
        wanted = [(b, (b.key, action.stage, mb)) for b in stage.program.received]
        leaving = [(b, c) for b in stage.program.sent for c in b.consumers if b.weight is None or mb == 0]

        def gather() -> list[Tensor]:
            return [self._value(b, message) for b, message in wanted]

        def run(received: list[Tensor]) -> None:
            step = self._step
            result = stage.forward(mb, step.inputs[mb], received, step.seeds[mb])
            if result.loss is not None:
                self.outputs.losses[mb] = result.loss.detach()
            if result.outputs:
                self.outputs.outputs[mb] = result.outputs
            for boundary, consumer in leaving:
                value = stage.own(boundary.key) if boundary.weight is not None else result.sent[boundary.key]
                self._values[boundary.key, consumer, mb] = value.detach()

        def ready() -> bool:
            return all(self._is_ready(self._values, m) or self._is_kept(b, m) for b, m in wanted)

        return _Op(str(action), "compute", run, gather, ready)

    def _backward(self, action: Action) -> _Op:
        stage, mb = self._stages[action.stage], action.microbatch
        gradients = self._gradients_through(action, stage.backward)

        def run(found: Gradients) -> None:
            gradients.run(found)
            self._release(stage, mb)

        return replace(gradients, run=run)

    def _backward_input(self, action: Action) -> _Op:
        return self._gradients_through(action, self._stages[action.stage].backward_input)

    def _backward_weight(self, action: Action) -> _Op:
        stage, mb = self._stages[action.stage], action.microbatch

        def run(_: None) -> None:
            stage.backward_weight(mb)
            self._release(stage, mb)

        return _Op(str(action), "compute", run)

    def _release(self, stage: Stage, mb: int) -> None:
        """Buffers of received values may be used anew."""
        for channel, buffer in self._held.pop((stage.program.stage, mb), ()):
            self._transport.release(channel, buffer)

    def _gradients_through(
        self, action: Action, backward: Callable[[int, float, Gradients], Gradients]
    ) -> _Op:
        """Gradients of what the stage sent, and the last stage's loss, become those of what it received."""
        stage, mb = self._stages[action.stage], action.microbatch
        incoming = self._incoming_gradients(stage, mb)
        returned = [b for b in stage.program.received if b.requires_grad]

        def gather() -> Gradients:
            return {key: self._gradient(message) for key, message in incoming}

        def run(gradients: Gradients) -> None:
            sink = backward(mb, self._step.weights[mb], gradients)
            for boundary in returned:
                self._gradients[boundary.key, boundary.previous(action.stage), mb] = sink.get(boundary.key)

        def ready() -> bool:
            return all(self._is_ready(self._gradients, m) for _, m in incoming)

        return _Op(str(action), "compute", run, gather, ready)

    def _incoming_gradients(self, stage: Stage, mb: int) -> list[tuple[int, Message]]:
        number = stage.program.stage
        ours = [b for b in (*stage.program.sent, *stage.program.received) if b.requires_grad]
        return [(b.key, (b.key, number, mb)) for b in ours if b.following(number) is not None]

    def _send_values(self, action: Action) -> _Op:
        stage, mb, peer = self._stages[action.stage], action.microbatch, action.peer
        leaving = [b for b in stage.program.sent if peer in b.consumers and (b.weight is None or mb == 0)]

        def run(_: None) -> None:
            for boundary in leaving:
                channel = self._channel(boundary, peer, False)
                value = self._values.pop((boundary.key, peer, mb))
                assert isinstance(value, Tensor)
                self._transport.send(self._rank_of[peer], channel, mb, value)

        return _Op(str(action), "send", run)

    def _receive_values(self, action: Action) -> _Op:
        mb, stage, peer = action.microbatch, self._stages[action.stage], action.peer
        coming = [b for b in stage.program.received if b.producer == peer and (b.weight is None or mb == 0)]

        def run(_: None) -> None:
            for boundary in coming:
                channel = self._channel(boundary, action.stage, False)
                pending = self._transport.post(self._rank_of[peer], channel, mb)
                self._values[boundary.key, action.stage, mb] = pending

        return _Op(str(action), "recv", run)

    def _send_gradients(self, action: Action) -> _Op:
        mb, stage, peer = action.microbatch, self._stages[action.stage], action.peer
        back = [b for b in stage.program.received if b.requires_grad and b.previous(action.stage) == peer]

        def run(_: None) -> None:
            for boundary in back:
                channel = self._channel(boundary, action.stage, True)
                gradient = self._gradient((boundary.key, peer, mb))
                self._transport.send(self._rank_of[peer], channel, mb, gradient)

        return _Op(str(action), "send", run)

    def _receive_gradients(self, action: Action) -> _Op:
        mb, stage, peer = action.microbatch, self._stages[action.stage], action.peer
        ours = [b for b in (*stage.program.sent, *stage.program.received) if b.requires_grad]
        coming = [b for b in ours if b.following(action.stage) == peer]

        def run(_: None) -> None:
            for boundary in coming:
                channel = self._channel(boundary, peer, True)
                pending = self._transport.post(self._rank_of[peer], channel, mb)
                self._gradients[boundary.key, action.stage, mb] = pending

        return _Op(str(action), "recv", run)

    # -- messages ------------------------------------------------------------------------------------

    def _value(self, boundary: Boundary, message: Message) -> Tensor:
        """Wait for a received value. A tied weight came with microbatch 0 and is kept for the step."""
        key, stage, mb = message
        if self._is_kept(boundary, message):
            return self._weights[key, stage]
        found = self._values.pop(message)
        value = found.wait() if isinstance(found, Pending) else found
        assert value is not None
        if boundary.weight is not None:
            self._weights[key, stage] = value
        elif isinstance(found, Pending) and self._trains:
            self._held.setdefault((stage, mb), []).append((self._channel(boundary, stage, False), value))
        return value

    def _is_kept(self, boundary: Boundary, message: Message) -> bool:
        return boundary.weight is not None and (message[0], message[1]) in self._weights

    def _gradient(self, message: Message) -> Tensor | None:
        found = self._gradients.pop(message)
        return found.wait() if isinstance(found, Pending) else found

    def _is_ready(self, table: dict[Message, Any], message: Message) -> bool:
        found = table.get(message, _MISSING)
        return found.ready() if isinstance(found, Pending) else found is not _MISSING


_MISSING = object()


def run_together(interpreters: Sequence[Interpreter]) -> list[StepOutputs]:
    """All ranks in one process, taking turns; InvalidSchedule when nobody can go on."""
    left = list(interpreters)
    while left:
        moved = False
        for interpreter in list(left):
            while (state := interpreter.advance()) is True:
                moved = True
            if state is None:
                left.remove(interpreter)
                moved = True
        if not moved:
            waiting = ", ".join(f"rank {i.rank} at {i.current()}" for i in left)
            raise InvalidSchedule(
                "no rank can go on", numbers=waiting, next_step="check the schedule: outsize plan"
            )
    return [i.outputs for i in interpreters]
