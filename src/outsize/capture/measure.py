"""Time every unit on this machine: forward and backward, one after the other, on the real example.

Each unit is replayed as a function of its own, on detached inputs, several times; the median counts.
Gradients, buffers and generators are afterwards as they were. The input's and the weight's gradient are
timed together and split evenly where the unit has parameters (timing them apart needs two backwards).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.graph import Captured, required_slots
from outsize.errors import BadOption
from outsize.ir.graph import Unit
from outsize.ir.profile import Profile, UnitCost
from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.liveness import last_reads, live

Progress = Callable[[int, int], None]


def measure_units(
    captured: Captured,
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    repeats: int = 5,
    progress: Progress | None = None,
) -> Profile:
    """A measured profile; `inputs` are the tape's input tensors. Raises BadOption for weights on meta."""
    if any(p.is_meta for p in model.parameters()):
        raise BadOption(
            "weights on meta cannot be timed",
            numbers=f"{sum(p.is_meta for p in model.parameters())} parameters hold no values",
            next_step="build the model with weights, or plan without --measure",
        )
    graph = captured.graph
    costs = []
    with _undisturbed(model):
        stopwatch = _Stopwatch(captured, model, inputs, repeats)
        for unit in graph.units:
            costs.append(_cost(unit, *stopwatch.time(unit.index)))
            if progress is not None:
                progress(unit.index + 1, len(graph.units))
    return Profile(
        fingerprint=graph.fingerprint,
        device="cpu",
        microbatch_size=graph.batch_size,
        units=tuple(costs),
    )


def _cost(unit: Unit, forward_s: float, backward_s: float) -> UnitCost:
    weight_s = backward_s / 2 if unit.parameters else 0.0
    return UnitCost(
        name=unit.name,
        forward_s=forward_s,
        backward_input_s=backward_s - weight_s,
        backward_weight_s=weight_s,
        saved_bytes=unit.saved_bytes,
        workspace_bytes=0,
        flops=unit.flops,
        source="measured",
    )


@final
class _Stopwatch:
    """Walks through the units and carries the values from one to the next."""

    def __init__(self, captured: Captured, model: nn.Module, inputs: Sequence[Tensor], repeats: int) -> None:
        self._captured, self._model, self._repeats = captured, model, repeats
        tape = captured.tape
        self._alive = live(tape, required_slots(tape))
        self._last = last_reads(tape, self._alive)
        for slot in required_slots(tape):
            self._last[slot] = len(tape.instructions)
        self._values: dict[int, Any] = dict(zip(tape.inputs, inputs, strict=True))

    def time(self, unit: int) -> tuple[float, float]:
        """(forward seconds, backward seconds) of a unit; its results become the next ones' inputs."""
        spec = self._spec(unit)
        function = compile_slice(spec, self._model, self._captured.tape.modes)
        laps = [self._lap(spec, function) for _ in range(self._repeats)]
        self._values |= laps[-1][2]
        stop = self._captured.starts[unit + 1]
        for slot in [s for s in self._values if self._last.get(s, -1) < stop]:
            del self._values[slot]
        return statistics.median(lap[0] for lap in laps), statistics.median(lap[1] for lap in laps)

    def _spec(self, unit: int) -> SliceSpec:
        tape, (start, stop) = self._captured.tape, self._captured.starts[unit : unit + 2]
        body = [i for i in tape.instructions[start:stop] if self._alive[i.index]]
        made = [slot for i in body for slot in i.defines()]
        reads = dict.fromkeys(s for i in body for s in i.reads())
        exits = [s for s in made if self._last.get(s, -1) >= stop]
        entries = [s for s in reads if s not in made and s not in tape.constants]
        constants = {s: t for s, t in tape.constants.items() if s in reads}
        return SliceSpec(f"unit_{unit}", body, entries, exits, constants=constants)

    def _lap(
        self, spec: SliceSpec, function: Callable[..., tuple[Any, ...]]
    ) -> tuple[float, float, dict[int, Any]]:
        entries = [self._fresh(slot) for slot in spec.entries]
        start = time.perf_counter()
        exits = function(*entries, torch.manual_seed)
        middle = time.perf_counter()
        roots = [t for t in exits if isinstance(t, Tensor) and t.requires_grad]
        grads = [torch.ones_like(t) for t in roots]
        before = time.perf_counter()
        if roots:
            torch.autograd.backward(roots, grads)
        end = time.perf_counter()
        detached = {s: t.detach() for s, t in zip(spec.exits, exits, strict=True)}
        return middle - start, end - before, detached

    def _fresh(self, slot: int) -> Tensor:
        tensor = self._values[slot].detach()
        return tensor.requires_grad_() if self._captured.tape.metas[slot].requires_grad else tensor


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Gradients, buffers and generators survive."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    for p in model.parameters():
        p.grad = None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for name, p in model.named_parameters():
            p.grad = grads[name]
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
