"""Runs forward and backward of a stage as graphs of its device, which need no host between their kernels.

    step 1, 2     as without graphs: kernels load, libraries choose, optimizers make their states
    step 3        F0 recorded, replayed   F1 recorded, replayed   B0 recorded, replayed   F2 replayed ...
    step 4        F0 replayed ...

Each microbatch in flight has a `_Flight`: a graph of the forward and one of the backward, with one memory for
both, so what autograd saves is there in between, and is used again in the backward as without graphs. What
comes in is copied to where the graphs read it, and what goes out is copied from where they write it: no
address of a graph is ever anybody else's. Flights are made as they are needed, one for each microbatch in
flight, and for each layout of the values (shapes, strides, alignment).

Bits are those of the stage without graphs. Kernels are the same, on values with the same layouts. Seeds: each
random instruction draws from a state of its own, which is seeded before a replay as the generator is without
graphs (law 6). Gradients: a graph computes those of one microbatch, in the order of autograd; they are added
to `.grad` after it, as autograd's own nodes add them, and by these where a parameter has hooks. The share of
a microbatch in the loss is an input of the backward.

A stage that cannot be recorded runs as it is from then on, and `DeviceGraphs.stages` says why. Whatever has
been replayed by then is recomputed: a backward that cannot be recorded follows a second forward.

Oracle: tests/device/test_graphs_device.py, on the simulated device and on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from outsize.device.graphs import DeviceGraph, DrawStates, GraphRecorder, Memory, has_graphs
from outsize.ir.answers.compilation import StageGraphs
from outsize.program.source_line import warn_user
from outsize.program.weights.lookup import weight_named
from outsize.run.device_graphs.static_values import (
    ValueLayout,
    copies_of,
    copy_values,
    empty_as,
    is_plain,
    layout_of,
)
from outsize.run.stage.base import Gradients, Result, StageAround
from outsize.run.stage.cut import StageProgram
from outsize.run.stage.rng import MicrobatchSeed, Seed
from outsize.run.stage.stage import BackwardEnds, StageExecutor

_WARM_UP: Final = 2  # Steps.
_MOST_LAYOUTS: Final = 8
_RECORDED: Final = -1  # Stands for a microbatch.
Inputs = tuple[ValueLayout | int, ...]
"""Layouts of what comes into a forward; of a weight of another stage that is in its place, the address."""


@final
class NotRecorded(UserWarning):
    """A stage runs without graphs, since its device cannot record it."""


@final
class CannotRecord(RuntimeError):
    """A stage does something that no graph repeats."""


@final
class DeviceGraphs:
    """Records the stages of an engine; `stages` says what is recorded. `speaks`: a stage without graphs is
    a warning.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._recorders: dict[torch.device, GraphRecorder] = {}
        self._recorded = WeakSet[GraphedStage]()
        self._reasons: dict[int, str] = {}

    @property
    def stages(self) -> tuple[StageGraphs, ...]:
        """Returns what is recorded of each stage, in their order."""
        numbers = {stage.program.stage for stage in self._recorded} | self._reasons.keys()
        return tuple(map(self._recorded_of, sorted(numbers)))

    def _recorded_of(self, number: int) -> StageGraphs:
        sizes = [b for s in self._recorded if s.program.stage == number for b in s.graph_bytes]
        reason = self._reasons.get(number, "")
        return StageGraphs(stage=number, graphs=len(sizes), size_bytes=sum(sizes), reason=reason)

    def add(self, stage: GraphedStage) -> None:
        """Counts the graphs of a stage from now on."""
        self._recorded.add(stage)

    def recorder(self, device: torch.device) -> GraphRecorder:
        """Returns what records on a device."""
        return self._recorders.setdefault(device, GraphRecorder(device))

    def refuse(self, stage: int, reason: str) -> None:
        """Says once why a stage runs without graphs."""
        if stage not in self._reasons and self._speaks:
            warn_user(f"stage {stage} runs without device graphs: {reason}", NotRecorded)
        self._reasons.setdefault(stage, reason)


def reason_against(program: StageProgram, model: nn.Module, device: torch.device) -> str | None:
    """Returns why no graph can repeat this stage; None where that is not known before it is tried."""
    if not has_graphs(device):
        return f"torch has no graphs for {device.type} devices"
    spec, modules = program.spec, dict(model.named_modules())
    if spec.through:
        return "its ranks exchange values within it"
    if len(spec.copied):
        return "it has copies of weights of other devices"
    for instruction in spec.instructions:
        if instruction.is_leaf:
            hooked = next((m for m in modules[str(instruction.target)].modules() if _has_hooks(m)), None)
            if hooked is not None:
                return f"{instruction.name} has hooks, which a graph does not call"
    return None


def _has_hooks(module: Any) -> bool:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in names)


@final
class _RecordedSeed(Seed):
    """Lets each random instruction draw from a state of its own, while a graph is recorded."""

    def __init__(self, states: DrawStates) -> None:
        self._states = states
        self._last: tuple[Any, ...] | None = None  # Of the host's generators, before the last draw.

    def __call__(self, instruction: int, device: torch.device | None = None) -> None:
        self.insist_on_device()
        self._states.draw_from(instruction)
        self._last = _host_generators()

    def on(self, device: torch.device) -> Seed:
        return self

    def numbers(self, instructions: Sequence[int]) -> Tensor:
        raise CannotRecord("its compiled code draws random numbers")

    def insist_on_device(self) -> None:
        """Raises CannotRecord where the last instruction has drawn from a generator of the host."""
        last, self._last = self._last, None
        if last is not None and last != _host_generators():
            raise CannotRecord("it draws random numbers on the host")


def _host_generators() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    drawn = numpy[1].tobytes(), numpy[2:]
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), drawn


@final
@dataclass(slots=True)
class _Flight:
    """Holds the graphs of one microbatch in flight, and the memory that they read and write."""

    memory: Memory
    inputs: list[Any]  # At the positions that the stage reads.
    received: list[Tensor]
    written: list[Tensor]  # The part of these that is copied for each microbatch.
    seed: MicrobatchSeed
    forward: DeviceGraph | None = None
    backward: DeviceGraph | None = None
    ends: BackwardEnds | None = None  # Until the backward is recorded.
    sent: dict[int, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    outputs: tuple[Tensor, ...] = ()
    coming: dict[int, Tensor] = field(default_factory=dict)  # Gradients.
    loss_gradient: Tensor | None = None
    sink: dict[int, Tensor] = field(default_factory=dict)
    gradients: list[tuple[int, Tensor]] = field(default_factory=list)  # By the place of the weight.

    def result(self) -> Result:
        """Returns copies of what the forward has computed."""
        has_loss = self.loss is not None
        values = [*self.sent.values(), *([self.loss] if self.loss is not None else []), *self.outputs]
        copies = copies_of(values)
        loss = copies[len(self.sent)] if has_loss else None
        sent = dict(zip(self.sent, copies, strict=False))
        return Result(sent, loss, tuple(copies[len(self.sent) + has_loss :]))


@final
class GraphedStage(StageAround[StageExecutor]):
    """Runs one StageProgram by graphs of its device, where they can be recorded."""

    def __init__(self, stage: StageExecutor, device: torch.device, graphs: DeviceGraphs) -> None:
        """Records what `stage` does on `device`."""
        super().__init__(stage)
        self._graphs, self._recorder = graphs, graphs.recorder(device)
        self._attributes = _attributes(self.program)
        self._instructions = sorted({i.origin for i in self.program.spec.instructions if i.random})
        self._idle: dict[Inputs, list[_Flight]] = {}
        self._flying: dict[int, tuple[Inputs, _Flight]] = {}
        self._steps, self._reason, self._state = 0, "", None
        self._states: DrawStates | None = None
        self.graph_bytes: list[int] = []  # Of each graph.
        graphs.add(self)

    def begin(self, grad_scale: Tensor | None = None) -> None:
        self._stage.begin(grad_scale)
        if not self._stage.trains or self._reason:
            return
        state = self._weights_now()
        if state != self._state:
            # The graphs read other memory than that of the weights.
            self._forget_graphs()
            self._state, self._steps = state, 0
        self._steps += 1

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: Seed
    ) -> Result:
        flight = None
        if isinstance(seed, MicrobatchSeed) and self._stage.trains and self._steps > _WARM_UP:
            flight = self._flight_for(inputs, received, seed)
        if flight is None:
            return self._stage.forward(microbatch, inputs, received, seed)
        used = flight[1]
        assert used.forward is not None
        copy_values(used.written, [*(inputs[p] for p in self.program.inputs), *self._moving(received)])
        self._seed(used.seed)
        used.forward.replay()
        self._flying[microbatch] = flight
        return used.result()

    def backward(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        key, flight = self._flying.pop(microbatch, (None, None))
        if key is None or flight is None:
            return self._stage.backward(microbatch, weight, gradients)
        coming = {k: g for k, g in gradients.items() if g is not None}
        if flight.backward is None and not self._reason:
            self._record(flight, coming)
        if flight.backward is None or not _fit(flight.coming, coming):
            return self._again_from(flight, microbatch, weight, gradients)
        copy_values(list(flight.coming.values()), [coming[k] for k in flight.coming])
        if flight.loss is not None and flight.loss_gradient is not None:
            flight.loss_gradient.data.copy_(self._stage.loss_gradient(flight.loss, weight))
        if self._stage.recomputes:
            self._seed(flight.seed)
        if weight:
            flight.backward.replay()
        self._add(flight, zero=not weight)
        # The next replay writes over the graph's own, while what was sent may still be on its way.
        sink: Gradients = dict(zip(flight.sink, copies_of(list(flight.sink.values())), strict=True))
        if not weight:
            sink = {k: None if g is None else torch.zeros_like(g) for k, g in sink.items()}
        if not self._reason:
            self._idle.setdefault(key, []).append(flight)
        return sink

    def backward_input(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        if microbatch in self._flying:
            return self.backward(microbatch, weight, gradients)
        return self._stage.backward_input(microbatch, weight, gradients)

    def forget(self) -> None:
        self._stage.forget()
        self._flying.clear()

    # -- what comes in -------------------------------------------------------------------------------

    def _layouts(self, inputs: Sequence[Tensor], received: Sequence[Tensor]) -> Inputs | None:
        """Returns the layouts of what comes in; None where some of it can have no fixed place."""
        coming = [*(inputs[p] for p in self.program.inputs), *received]
        for value in coming:
            if not is_plain(value) or value.device != self._recorder.device:
                self._refuse(f"it reads a {type(value).__name__} on {value.device}")
                return None
            if value.requires_grad:
                self._refuse("an input has a gradient")
                return None
        own = [layout_of(inputs[p]) for p in self.program.inputs]
        return (*own, *(self._place(i, value) for i, value in enumerate(received)))

    def _place(self, index: int, value: Tensor) -> ValueLayout | int:
        """Returns the address of a weight of another stage in this process, which stays; else the layout."""
        name = self.program.received[index].weight
        if name is not None and value.data_ptr() == weight_named(self._stage.model, name).data_ptr():
            return value.data_ptr()
        return layout_of(value)

    def _moving(self, received: Sequence[Tensor]) -> Iterator[Tensor]:
        return (v for i, v in enumerate(received) if not isinstance(self._place(i, v), int))

    def _weights_now(self) -> Any:
        """Returns where the weights are, and the modes by which kernels are chosen."""
        tensors = [entry.tensor for entry in self._stage.weights]
        tensors += [weight_named(self._stage.model, name) for name in self._attributes]
        weights = tuple((t.data_ptr(), t.requires_grad, t.dtype) for t in tensors)
        modes = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
        return weights, modes

    def _seed(self, seed: MicrobatchSeed) -> None:
        if self._states is not None:
            self._states.seed(seed.number)

    # -- recording -----------------------------------------------------------------------------------

    def _flight_for(
        self, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: MicrobatchSeed
    ) -> tuple[Inputs, _Flight] | None:
        """Returns graphs that no microbatch in flight uses; None where they cannot be recorded."""
        if self._stage.casts:
            self._refuse("autocast casts weights once for a step; model.bfloat16() needs none")
        key = None if self._reason else self._layouts(inputs, received)
        if key is None:
            return None
        idle = self._idle.setdefault(key, [])
        if not idle and len(self._idle) > _MOST_LAYOUTS:
            self._refuse(f"its values come in more than {_MOST_LAYOUTS} layouts")
            return None
        flight = idle.pop() if idle else self._recorded_flight(inputs, received, seed)
        if flight is None:
            return None
        flight.seed = seed
        return key, flight

    def _recorded_flight(
        self, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: MicrobatchSeed
    ) -> _Flight | None:
        own = {p: empty_as(inputs[p]) for p in self.program.inputs}
        arriving = [v if isinstance(self._place(i, v), int) else empty_as(v) for i, v in enumerate(received)]
        moving = [v for v, r in zip(arriving, received, strict=True) if v is not r]
        statics: list[Any] = [own.get(p) for p in range(len(inputs))]
        memory = self._recorder.memory()
        flight = _Flight(memory, statics, arriving, [*own.values(), *moving], seed)
        return flight if self._recorded(lambda: self._record_forward(flight)) else None

    def _recorded(self, record: Callable[[], None]) -> bool:
        """Returns whether it could be recorded; otherwise the stage runs as it is from now on."""
        held = self._recorder.held_bytes
        try:
            record()
        except Exception as error:  # What a device or the user's code raises in a recording is not known.
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            self._refuse(reason if isinstance(error, CannotRecord) else f"recording it raised: {reason}")
            return False
        self.graph_bytes.append(self._recorder.held_bytes - held)
        return True

    def _record_forward(self, flight: _Flight) -> None:
        if self._instructions and self._states is None:
            self._states = DrawStates(self._recorder.device, self._instructions)
        states = self._states
        seed = flight.seed if states is None else _RecordedSeed(states)
        if any(_has_gradient_hooks(entry.tensor) for entry in self._stage.weights):
            raise CannotRecord("a parameter has hooks on its gradient")
        with self._recorder.recording(flight.memory, () if states is None else states.states) as graph:
            result = self._stage.forward(_RECORDED, flight.inputs, flight.received, seed)
            if isinstance(seed, _RecordedSeed):
                seed.insist_on_device()
        flight.ends = self._stage.ends_of(_RECORDED)
        flight.sent = {key: value.detach() for key, value in result.sent.items()}
        flight.loss = None if result.loss is None else result.loss.detach()
        flight.outputs = tuple(output.detach() for output in result.outputs)
        if not all(map(is_plain, [*flight.sent.values(), *flight.outputs])):
            raise CannotRecord("it passes on tensors that are not strided")
        flight.forward = graph

    def _record(self, flight: _Flight, coming: dict[int, Tensor]) -> None:
        if not all(map(is_plain, coming.values())):
            self._refuse("its gradients are not strided")
        else:
            self._recorded(lambda: self._record_backward(flight, coming))

    def _record_backward(self, flight: _Flight, coming: dict[int, Tensor]) -> None:
        ends, leaves = flight.ends, self._leaves()
        assert ends is not None
        flight.coming = {key: empty_as(gradient) for key, gradient in coming.items()}
        roots = [self._stage.root(ends, key) for key in flight.coming]
        gradients = [*flight.coming.values()]
        if ends.loss is not None and ends.loss.requires_grad:
            flight.loss_gradient = torch.empty_like(ends.loss)
            roots.append(ends.loss)
            gradients.append(flight.loss_gradient)
        states = self._states.states if self._stage.recomputes and self._states is not None else ()
        asked = [get_gradient_edge(tensor) for tensor in (*leaves, *ends.aliases.values())]
        with self._recorder.recording(flight.memory, states) as graph:
            found = _gradients(roots, gradients, asked)
        flight.ends = None
        at = len(leaves)
        flight.gradients = [(i, g) for i, g in enumerate(found[:at]) if g is not None]
        flight.sink = {k: g for k, g in zip(ends.aliases, found[at:], strict=True) if g is not None}
        if not all(is_plain(g) for g in found if g is not None):
            raise CannotRecord("its gradients are not strided")
        flight.backward = graph

    def _again_from(self, flight: _Flight, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        """Runs the backward as it is, behind a second forward that changes no buffer."""
        buffers = [self._stage.model.get_buffer(name) for name in sorted(self.program.written)]
        now = [buffer.clone() for buffer in buffers]
        self._stage.forward(microbatch, flight.inputs, flight.received, flight.seed)
        sink = self._stage.backward(microbatch, weight, gradients)
        for buffer, value in zip(buffers, now, strict=True):
            buffer.data.copy_(value)  # Forwards in flight may have saved it, as torch's own write it.
        return sink

    def _refuse(self, reason: str) -> None:
        """Lets the stage run as it is from now on."""
        self._reason = self._reason or reason
        self._forget_graphs()
        self._graphs.refuse(self.program.stage, reason)

    def _forget_graphs(self) -> None:
        self._idle.clear()
        self.graph_bytes.clear()

    # -- gradients -----------------------------------------------------------------------------------

    def _leaves(self) -> list[Tensor]:
        """Returns the weights that are trained here, each once."""
        tensors = {id(entry.tensor): entry.tensor for entry in self._stage.weights}
        return [t for t in tensors.values() if t.requires_grad and t.is_leaf]

    @torch.no_grad()
    def _add(self, flight: _Flight, *, zero: bool) -> None:
        """Adds a microbatch's gradients as autograd does: the first is copied, others are added in place."""
        leaves, first, more = self._leaves(), list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for index, gradient in flight.gradients:
            leaf, new = leaves[index], torch.zeros_like(gradient) if zero else gradient
            if _has_gradient_hooks(leaf) or _has_late_hooks(leaf):
                _accumulate(leaf, new)
            elif leaf.grad is None:
                leaf.grad = torch.empty_like(leaf)
                first.append((leaf.grad, new))
            else:
                more.append((leaf.grad, new))
        if first:
            torch.ops.aten._foreach_copy_.default([to for to, _ in first], [new for _, new in first])
        if more:
            torch.ops.aten._foreach_add_.List([to for to, _ in more], [new for _, new in more])


def _gradients(
    roots: Sequence[Any], gradients: Sequence[Tensor], asked: Sequence[Any]
) -> list[Tensor | None]:
    """Returns the gradients at these edges; nothing is added to `.grad`."""
    if not roots or not asked:
        return [None] * len(asked)
    found = Variable._execution_engine.run_backward(
        tuple(roots),
        tuple(gradients),
        False,
        False,
        tuple(asked),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return [*found]


def _accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Adds a gradient by autograd's own node, which calls the hooks of the leaf."""
    Variable._execution_engine.run_backward(
        (leaf,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _has_gradient_hooks(leaf: Any) -> bool:
    return bool(leaf._backward_hooks)


def _has_late_hooks(leaf: Any) -> bool:
    return bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def _fit(into: dict[int, Tensor], coming: dict[int, Tensor]) -> bool:
    """Returns whether these gradients are in the layouts of those for which the backward was recorded."""
    return into.keys() == coming.keys() and all(layout_of(into[k]) == layout_of(g) for k, g in coming.items())


def _attributes(program: StageProgram) -> list[str]:
    """Returns the names of tensors in attributes that the stage reads."""
    weights: Iterable[Any] = (w for i in program.spec.instructions for w in i.weights)
    return sorted({w.name for w in weights if w.kind == "attribute"})
