"""Runs one rank's row of a lowered schedule.

    action      handler          waits for
    0F1         forward          the values posted by 0RECV_F1
    0B1         backward         the gradients posted by 0RECV_B1
    0SEND_F1    send values      nothing
    0RECV_F1    post receives    nothing
    (0F1;0B0)   both, in turns   what both wait for (bound_action.py)
    ...

Each action of the row is bound to its handler once, when the interpreter is built: which boundaries it moves,
on which channels, and the slots in which they wait between two actions of the rank. A step walks the list.
Microbatches of other shapes have other programs with the same wiring (edges, tied weights), so one schedule
runs them all. New behaviour is a new action or a lowering pass, never an `if` here. In one process several
interpreters take turns (run/interpreter/in_process.py): each runs until its next compute action lacks a
message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor

from outsize.device.accelerators import all_devices, allocated_bytes
from outsize.device.alternation import Alternation
from outsize.device.clock import HOST, Clock
from outsize.device.profiler import in_range, is_profiled
from outsize.ir.schedule import (
    COMPUTE,
    FETCH,
    LEAVING,
    NO_MICROBATCH,
    OFFLOAD,
    VERIFICATION,
    Action,
    Kind,
    Schedule,
    together,
)
from outsize.ir.timeline import Lane
from outsize.run.interpreter.bound_action import ActionPair, BoundAction
from outsize.run.interpreter.ranges import range_name, wait_name
from outsize.run.interpreter.trace import Marks
from outsize.run.moves.base import Moves, PassedValues, Receiver, Resident, ValueKey
from outsize.run.moves.boundary_values import BoundaryValues
from outsize.run.stage.base import Gradients, RunnableStage
from outsize.run.stage.boundary import Boundary
from outsize.run.stage.rng import Seed
from outsize.run.stage.stage import identity
from outsize.run.transport.base import Pending, Transport

MISSING: Final = object()
Message = tuple[int, int, int]  # A message is keyed by (boundary key, consuming stage, microbatch).


@final
@dataclass(frozen=True, slots=True)
class Programs:
    """Holds what a step runs.

    `stage(number, microbatch)` returns the executor of a stage; `channels` gives each microbatch's first
    channel; `moves` moves weights, and `values` passes boundary values between stages of one rank.
    """

    stages: int
    stage: Callable[[int, int], RunnableStage]
    channels: Sequence[int]  # The index is the microbatch.
    moves: Moves = field(default_factory=Resident)
    values: PassedValues = field(default_factory=BoundaryValues)


@final
@dataclass
class StepInputs:
    """Holds the data of a step: `inputs[mb]` are all input tensors, `weights[mb]` is the share of
    the loss. `grad_scale` (0-dim) multiplies it, too, where a GradScaler keeps it on a device.
    """

    inputs: Sequence[Sequence[Tensor]]
    weights: Sequence[float]
    seeds: Sequence[Seed]
    grad_scale: Tensor | None = None


@final
@dataclass
class StepOutputs:
    """Holds what a rank has computed at the end of a step."""

    marks: Marks
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, tuple[Any, ...]] = field(default_factory=dict)


@final
class MessageSlot:
    """Holds one message between two actions of the rank: a tensor that came in or is about to leave, a
    Pending, or MISSING.
    """

    __slots__ = ("content",)

    def __init__(self) -> None:
        self.content: Any = MISSING


def take(slot: MessageSlot, pends: bool, keep: bool, pendings: list[Pending]) -> Any:
    """Returns the message; `pends` says that it must be waited for, and adds the receive to `pendings`.

    Unless the message is to stay (`keep`), the slot is emptied.
    """
    message = slot.content
    if pends:
        pending, message = message, message.wait()
        pendings.append(pending)
    slot.content = message if keep else MISSING
    return message


def ready(wanted: Sequence[tuple[MessageSlot, bool]]) -> Callable[[], bool]:
    """Returns a function that says whether all messages are present or can be waited for."""
    return lambda: all(s.content is not MISSING and (not pends or s.content.ready()) for s, pends in wanted)


@final
class Interpreter:
    """Runs one rank: call `begin(inputs)`, then `run()`, or `advance()` until it returns None.

    `pause_at(end)` lets both stop in front of an action; the next call goes on from there.
    """

    def __init__(
        self, rank: int, schedule: Schedule, programs: Programs, transport: Transport, clock: Clock = HOST
    ) -> None:
        self.rank, self.schedule = rank, schedule
        self._transport, self._clock = transport, clock
        self._mark = self._own_mark = clock.mark
        self._handlers = _Handlers(rank, schedule, programs, transport)
        # Three marks an action: it begins, its messages are there, it has ended. A mark that is still zero
        # says where the rank is (`place`), so the watchdog costs a step nothing.
        self._ops = [replace(op, at=3 * number) for number, op in enumerate(self._handlers.bound())]
        self._current = self._ops
        self._names: list[tuple[str, Lane]] = [(op.text, op.lane) for op in self._ops]
        self._times: list[Any] = []
        self._at, self._end = 0, len(self._ops)

    @property
    def outputs(self) -> StepOutputs:
        """Returns what the step has computed so far."""
        return self._handlers.outputs

    @property
    def has_ended(self) -> bool:
        """Tells whether the row has run to its end."""
        return self._at == len(self._ops)

    def begin(self, step: StepInputs, clock: Clock | None = None) -> None:
        """Sets the data of a step, which another clock than usual may mark."""
        self._at, self._end, used = 0, len(self._ops), clock or self._clock
        self._mark = self._own_mark if clock is None else clock.mark
        self._current = self._in_ranges() if is_profiled() else self._ops
        marks = Marks(self._names, clock=used)
        self._times = marks.times
        self._handlers.begin(step, StepOutputs(marks))

    def pause_at(self, end: int) -> None:
        """Lets the row stop in front of its action `end`, from where it then goes on."""
        self._end = max(end, self._at)

    def run(self) -> StepOutputs:
        """Runs all actions up to the end or the pause, blocking on receives."""
        for op in self._current[self._at : self._end]:
            self._execute(op)
        self._at = self._end
        if self._end == len(self._ops):
            self._handlers.end()
        self._transport.flush()
        return self.outputs

    def advance(self) -> bool | None:
        """Runs one action and returns True; returns False when it lacks a message, None at the end of the
        row or at the pause.
        """
        if self._at >= self._end:
            return None
        op = self._current[self._at]
        if op.ready is not None and not op.ready():
            return False
        self._execute(op)
        self._at += 1
        return True

    def computes(self) -> bool:
        """Returns whether the next action is one of compute."""
        return self._at < self._end and self._ops[self._at].lane == "compute"

    def place(self) -> tuple[int, bool]:
        """Returns how many actions of the row are done, and whether the next one waits for its messages.

        Another thread may ask: the marks of the step say it.
        """
        # Marks are written in order, so the first action without its last one is found by bisection; a mark
        # that is written meanwhile moves the answer by one, which is as good.
        times = self._times
        low, high = 0, len(times) // 3
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if times[3 * middle + 2] else (low, middle)
        waits = low < len(self._ops) and self._ops[low].gather is not None and not times[3 * low + 1]
        return low, waits

    def current(self) -> str:
        """Returns the action that `advance` would run next."""
        return self._ops[min(self._at, len(self._ops) - 1)].text

    def reset(self) -> None:
        """Drops an unfinished step."""
        self._handlers.reset()

    def _in_ranges(self) -> list[BoundAction]:
        """Returns the actions, each within a range that a profiler records."""
        pairs = zip(self._ops, self.schedule.actions[self.rank], strict=True)
        return [
            replace(
                op,
                run=in_range(range_name(action), op.run),
                gather=None if op.gather is None else in_range(wait_name(action), op.gather),
            )
            for op, action in pairs
        ]

    def _execute(self, op: BoundAction) -> None:
        times, at, mark, messages = self._times, op.at, self._mark, None
        times[at] = mark()
        try:
            if op.gather is not None:
                messages = op.gather()
                times[at + 1] = mark()
            op.run(messages)
        except torch.OutOfMemoryError as error:
            action = self.schedule.actions[self.rank][op.at // 3]
            error.add_note(_full(action, self.rank))
            raise
        times[at + 2] = mark()


def _full(action: Action, rank: int) -> str:
    """Words what a device without memory was asked for, and what tensors hold there."""
    held = {str(device): allocated_bytes(device) for device in all_devices()}
    numbers = ", ".join(f"{size:,} bytes of tensors on {device}" for device, size in held.items() if size)
    return (
        f"outsize: no memory for {action} (stage {action.stage}, rank {rank}); {numbers or 'on the CPU'}. "
        "Next: more microbatches, or outsize.Request(recompute='full')"
    )


@final
class _Handlers:
    """Maps each action of one rank to its handler and holds the message slots between them.

    It does not reference the actions that it binds, so that an engine that is dropped is freed at once and
    not when Python's garbage collector next runs.
    """

    def __init__(self, rank: int, schedule: Schedule, programs: Programs, transport: Transport) -> None:
        self._rank, self._rank_of = rank, schedule.rank_of
        self._row = schedule.actions[rank]
        self._programs, self._transport = programs, transport
        self._stages: dict[int, RunnableStage] = {}
        # Whoever takes a message, a compute action or a send, empties its slot. A tied weight comes with
        # microbatch 0 and stays for the step.
        self._values: dict[Message, MessageSlot] = {}
        self._gradients: dict[Message, MessageSlot] = {}
        self._tied: dict[tuple[str, int], MessageSlot] = {}
        self._held: dict[tuple[int, int], list[Pending]] = {}
        self._kept: list[Pending] = []  # The receives of tied weights.
        self._trains = any(a.kind in (Kind.B, Kind.I) for a in schedule.actions[rank])
        self._step = StepInputs((), (), ())
        self.outputs = StepOutputs(Marks(()))

    def begin(self, step: StepInputs, outputs: StepOutputs) -> None:
        """Sets the data of a new step."""
        self._step, self.outputs = step, outputs
        self.end()
        for stage in self._stages.values():
            stage.begin(step.grad_scale)

    def end(self) -> None:
        """Drops the tied weights of a step; their memory may be received into again."""
        for slot in self._tied.values():
            slot.content = MISSING
        for pending in self._kept:
            pending.release()
        self._kept.clear()
        self._programs.values.end()

    def reset(self) -> None:
        """Drops an unfinished step."""
        for stage in self._stages.values():
            stage.forget()
        for slot in (*self._values.values(), *self._tied.values(), *self._gradients.values()):
            slot.content = MISSING
        for held in (*self._held.values(), self._kept):
            held.clear()

    def bound(self) -> list[BoundAction]:
        """Returns the row's actions, bound to their handlers, those that run together as pairs."""
        ops, helper, at = [self._bind(at) for at in range(len(self._row))], Alternation(), 0
        for cell in together(self._row):
            if len(cell) > 1:
                stages = [*map(self._stage, cell)]
                pair = ActionPair(ops[at], ops[at + 1], partial(_alternate, stages), helper)
                ops[at : at + 2] = pair.bound()
            at += len(cell)
        return ops

    def _bind(self, at: int) -> BoundAction:
        action, moves = self._row[at], self._programs.moves
        if action.kind in NO_MICROBATCH | OFFLOAD | FETCH | VERIFICATION:
            return BoundAction(str(action), "load", self._move(action, moves.action(self._row, at)))
        op = self._table()[action.kind](action)
        arrival = moves.arrival(self._row, at) if action.kind in COMPUTE else None
        return op if arrival is None else op.behind(arrival)

    def _move(self, action: Action, move: Callable[[], None]) -> Callable[[Any], None]:
        """Returns the function that moves weights; copies of weights that leave are dropped before."""
        if action.kind not in LEAVING:
            return lambda _: move()

        def leave(_: Any) -> None:
            # A copy in autocast's dtype is as large as half of the weight that is about to go.
            for stage in self._stages.values():
                if stage.program.stage == action.stage:
                    stage.forget_casts()
            move()

        return leave

    def _table(self) -> dict[Kind, Callable[[Action], BoundAction]]:
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

    def _stage(self, action: Action) -> RunnableStage:
        stage = self._programs.stage(action.stage, action.microbatch)
        self._stages[id(stage)] = stage
        return stage

    def _down(self, boundary: Boundary, stage: int, mb: int) -> int:
        """Returns the channel of a value: one per program, boundary value, consuming stage and direction."""
        # Even numbers are values and odd ones their gradients, so that a value and its own gradient, which
        # may be under way between the same two ranks at once, are two messages.
        return self._programs.channels[mb] + (boundary.key * self._programs.stages + stage) * 2

    def _up(self, boundary: Boundary, stage: int, mb: int) -> int:
        """Returns the channel of a value's gradient."""
        return self._down(boundary, stage, mb) + 1

    # -- compute -------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> BoundAction:
        stage, mb = self._stage(action), action.microbatch
        wanted = [self._wanted(b, action.stage, mb) for b in stage.program.received]
        # In training the backward reads what was received once more, and lets it go; without one the forward
        # is the last to read it.
        pendings, release = self._held_of(action), self._release(action) if not self._trains else None
        pairs = [(b, c) for b in stage.program.sent for c in b.consumers]
        values = [(b, c) for b, c in pairs if b.weight is None]
        here = action.stage
        leaving = [
            (self._value(b, c, mb), b.key, self._wrapper((b.key, c, mb, False), here)) for b, c in values
        ]
        # A tied weight does not change within a step: it goes with the first microbatch and stays.
        tied = [(self._value(b, c, mb), b.key) for b, c in pairs if b.weight is not None and mb == 0]
        trains, keep = self._trains, self._programs.values.output

        def run(received: list[Tensor] | None) -> None:
            step = self._step
            result = stage.forward(mb, step.inputs[mb], received or (), step.seeds[mb])
            if result.loss is not None:
                self.outputs.losses[mb] = result.loss.detach()
            if result.outputs:
                # With their graph they would keep the step's activations until the next one.
                kept = (o.detach() for o in result.outputs) if trains else result.outputs
                self.outputs.outputs[mb] = tuple(map(keep, kept))
            # Detached, also for a stage of this rank: each stage has a graph of its own, which ends at a leaf
            # that the taker makes; else a backward would run on into the stage before it.
            for slot, key, wrap in leaving:
                slot.content = wrap(result.sent[key].detach())
            for slot, key in tied:
                slot.content = stage.tied_parameter(key).detach()
            if release is not None:
                release()

        def gather() -> list[Tensor]:
            return [
                take(slot, remote, keep, self._kept if keep else pendings) for slot, remote, keep in wanted
            ]

        op = BoundAction(str(action), "compute", run)
        return replace(op, gather=gather, ready=ready([w[:2] for w in wanted])) if wanted else op

    def _backward(self, action: Action) -> BoundAction:
        return self._gradients_through(action, self._stage(action).backward, self._release(action))

    def _backward_input(self, action: Action) -> BoundAction:
        # What was received stays: the gradients of weights are computed from it later (`_backward_weight`).
        return self._gradients_through(action, self._stage(action).backward_input, lambda: None)

    def _backward_weight(self, action: Action) -> BoundAction:
        stage, mb, release = self._stage(action), action.microbatch, self._release(action)

        def run(_: None) -> None:
            stage.backward_weight(mb)
            release()

        return BoundAction(str(action), "compute", run)

    def _gradients_through(
        self, action: Action, backward: Callable[[int, float, Gradients], Gradients], end: Callable[[], None]
    ) -> BoundAction:
        """Turns the gradients of what the stage sent, and of the last stage's loss, into those of what it
        received.
        """
        number, mb, pendings = action.stage, action.microbatch, self._held_of(action)
        program = self._stage(action).program
        ours = [(b, b.following(number)) for b in (*program.sent, *program.received) if b.requires_grad]
        incoming = [(b.key, self._gradient(b.key, number, mb), far) for b, far in ours if far is not None]
        incoming = [(key, slot, self._pends(far, number)) for key, slot, far in incoming]
        back = [b for b in program.received if b.requires_grad]
        onward = [(b.key, b.previous(number)) for b in back]
        returned = [
            (self._gradient(k, to, mb), k, self._wrapper((k, to, mb, True), number)) for k, to in onward
        ]

        def run(gradients: Gradients | None) -> None:
            sink = backward(mb, self._step.weights[mb], gradients or {})
            for slot, key, wrap in returned:
                slot.content = wrap(sink.get(key))
            end()

        def gather() -> Gradients:
            return {key: take(slot, remote, False, pendings) for key, slot, remote in incoming}

        op = BoundAction(str(action), "compute", run)
        return replace(op, gather=gather, ready=ready([i[1:] for i in incoming])) if incoming else op

    # -- transfers -----------------------------------------------------------------------------------

    def _send_values(self, action: Action) -> BoundAction:
        mb, peer = action.microbatch, action.peer
        sent = self._stage(action).program.sent
        leaving = [b for b in sent if peer in b.consumers and (b.weight is None or mb == 0)]
        return self._send(action, [(self._value(b, peer, mb), self._down(b, peer, mb)) for b in leaving])

    def _receive_values(self, action: Action) -> BoundAction:
        mb, here = action.microbatch, action.stage
        received = self._stage(action).program.received
        coming = [b for b in received if b.producer == action.peer and (b.weight is None or mb == 0)]
        return self._receive(
            action,
            [
                (self._value(b, here, mb), self._down(b, here, mb), self._receiver(b, here, mb))
                for b in coming
            ],
        )

    def _send_gradients(self, action: Action) -> BoundAction:
        mb, here, peer = action.microbatch, action.stage, action.peer
        received = self._stage(action).program.received
        back = [b for b in received if b.requires_grad and b.previous(here) == peer]
        return self._send(action, [(self._gradient(b.key, peer, mb), self._up(b, here, mb)) for b in back])

    def _receive_gradients(self, action: Action) -> BoundAction:
        mb, here, peer = action.microbatch, action.stage, action.peer
        program = self._stage(action).program
        # The order is that of their keys, in which the peer sends what it received, because NCCL has no tags.
        ours = sorted((*program.sent, *program.received), key=lambda b: b.key)
        coming = [b for b in ours if b.requires_grad and b.following(here) == peer]
        return self._receive(
            action, [(self._gradient(b.key, here, mb), self._up(b, peer, mb), identity) for b in coming]
        )

    def _send(self, action: Action, leaving: list[tuple[MessageSlot, int]]) -> BoundAction:
        rank, mb, send = self._rank_of[action.peer], action.microbatch, self._transport.send

        def run(_: None) -> None:
            for slot, channel in leaving:
                # The slot is emptied first, so that the transport alone keeps the tensor, until it has been
                # sent.
                tensor, slot.content = slot.content, MISSING
                send(rank, channel, mb, tensor)

        return BoundAction(str(action), "send", run)

    def _receive(self, action: Action, coming: list[tuple[MessageSlot, int, Receiver]]) -> BoundAction:
        rank, mb, post = self._rank_of[action.peer], action.microbatch, self._transport.post

        def run(_: None) -> None:
            for slot, channel, receiver in coming:
                slot.content = receiver(post(rank, channel, mb))

        return BoundAction(str(action), "recv", run)

    # -- message slots -------------------------------------------------------------------------------

    def _value(self, boundary: Boundary, stage: int, mb: int) -> MessageSlot:
        if boundary.weight is not None:
            return self._tied.setdefault((boundary.weight, stage), MessageSlot())
        return self._values.setdefault((boundary.key, stage, mb), MessageSlot())

    def _gradient(self, key: int, stage: int, mb: int) -> MessageSlot:
        return self._gradients.setdefault((key, stage, mb), MessageSlot())

    def _wanted(self, boundary: Boundary, stage: int, mb: int) -> tuple[MessageSlot, bool, bool]:
        """Returns the slot of a received value, whether it must be waited for, and whether it stays for the
        step.
        """
        slot, tied = self._value(boundary, stage, mb), boundary.weight is not None
        remote = self._rank_of[boundary.producer] != self._rank
        return slot, (remote and mb == 0) if tied else self._pends(boundary.producer, stage), tied

    def _pends(self, giver: int, taker: int) -> bool:
        """Returns whether a slot for what that stage passes to one of this rank holds a Pending."""
        return self._rank_of[giver] != self._rank or self._programs.values.pends(giver, taker)

    def _wrapper(self, key: ValueKey, giver: int) -> Callable[[Any], Any]:
        """Returns the function that prepares what stage `giver` passes on for its slot, for a stage of this
        rank or to be sent.
        """
        is_sent = self._rank_of[key[1]] != self._rank
        return self._programs.values.wrapper(key, giver, is_sent=is_sent)

    def _receiver(self, boundary: Boundary, stage: int, mb: int) -> Receiver:
        """Returns what makes a posted receive of a value the content of its slot; a tied weight stays in its
        message for the step, and without a backward nothing waits.
        """
        waits = self._trains and boundary.weight is None
        return self._programs.values.receiver((boundary.key, stage, mb, False)) if waits else identity

    def _held_of(self, action: Action) -> list[Pending]:
        return self._held.setdefault((action.stage, action.microbatch), [])

    def _release(self, action: Action) -> Callable[[], None]:
        """Returns a function that lets the memory of what the microbatch received be used again."""
        pendings = self._held_of(action)

        def release() -> None:
            for pending in pendings:
                pending.release()
            pendings.clear()

        return release


def _alternate(stages: Sequence[RunnableStage]) -> bool:
    return all(stage.alternates for stage in stages)
