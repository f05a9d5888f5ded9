"""Problem: how long does each unit take in a real step: forward, input gradient, weight gradient?

A lap is a training step of one stage: the wanted units one after the other, with their activations alive
until one backward over all of them. So memory comes and goes as in a real step; a unit that is run repeatedly
by itself finds its memory warm and mapped and is up to a third faster than it will be.

    forward    a clock reading between units
    backward   autograd runs nodes in descending order of their making, so the first node of a unit to run
               is one that made a value that leaves the unit; a hook on each of these reads the clock
    input      a second kind of lap asks for the gradients of the earliest activations alone: autograd then
               skips every weight gradient (a convolution's too, whose one op is told what to compute)
    weight     whole - input; timing weight gradients alone would pay the way through a unit's inside twice

Units that are not wanted (copies of others) run once, detached from one another, to make the values that
wanted ones need; a wanted unit then starts from a detached copy, as a stage does from what it received.
Parameters keep their .grad from lap to lap, so each lap accumulates, as all microbatches but the first do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from outsize.capture.graph.build import Captured, required_slots
from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.liveness import last_reads, live
from outsize.program.replaying.modes import forget_casts, outside_autocast

Clock = Callable[[], float]
Seed = Callable[[int], object]
Seconds = dict[int, float]
"""The key is a unit."""
WARM_UP: Final = 2


@final
@dataclass(frozen=True, slots=True)
class Laps:
    """Holds the seconds of each wanted unit, one number per lap.

    `backward` is the whole backward, `inputs` its input part.
    """

    forward: Mapping[int, Sequence[float]]
    backward: Mapping[int, Sequence[float]]
    inputs: Mapping[int, Sequence[float]]


@final
@dataclass(frozen=True, slots=True)
class UnitFunction:
    """Runs one unit as a function; `dead` are the slots that nothing reads after it."""

    unit: int
    function: Callable[..., tuple[Any, ...]]
    entries: tuple[int, ...]
    exits: tuple[int, ...]
    dead: tuple[int, ...]


@final
@dataclass(slots=True)
class _ForwardRun:
    """Holds a forward that waits for its backward."""

    forward: Seconds = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    owner: dict[Node, int] = field(default_factory=dict)
    fired: list[tuple[int, float]] = field(default_factory=list)
    entries: list[Tensor] = field(default_factory=list)


@final
class Stopwatch:
    """Times laps over some units of a captured model, on the tape's input tensors."""

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        inputs: Sequence[Tensor],
        wanted: Collection[int],
        *,
        clock: Clock,
        seed: Seed,
    ) -> None:
        self._metas, self._clock, self._seed = captured.tape.metas, clock, seed
        pieces = list(_pieces(captured, model))
        self._pieces = [p for p in pieces if p.unit in wanted]
        made = {slot for p in self._pieces for slot in p.exits}
        read = {slot for p in self._pieces for slot in p.entries}
        self._roots = _roots(captured, pieces, wanted)
        inputs_by_slot = dict(zip(captured.tape.inputs, inputs, strict=True))
        self._carried = (
            self._carry(pieces, inputs_by_slot, read - made)
            if read - made - set(inputs_by_slot)
            else inputs_by_slot
        )
        self._sources = _sources(self._pieces, self._metas)

    def laps(self, repeats: int, progress: Callable[[], None] = lambda: None) -> Laps:
        """Runs `repeats` whole laps and laps of input gradients, in turn, after a warm-up of both."""
        wholes: list[tuple[Seconds, Seconds]] = []
        inputs: list[tuple[Seconds, Seconds]] = []
        for _ in range(WARM_UP + repeats):
            wholes.append(self._lap(self._whole_backward))
            progress()
            inputs.append(self._lap(self._input_only))
            progress()
        wholes, inputs = wholes[WARM_UP:], inputs[WARM_UP:]
        units = [p.unit for p in self._pieces]
        return Laps(
            forward={u: [lap[0][u] for lap in (*wholes, *inputs)] for u in units},
            backward={u: [lap[1].get(u, 0.0) for lap in wholes] for u in units},
            inputs={u: [lap[1].get(u, 0.0) for lap in inputs] for u in units},
        )

    def _lap(
        self, backward: Callable[[_ForwardRun, list[Tensor], list[Tensor]], None]
    ) -> tuple[Seconds, Seconds]:
        with torch.enable_grad():
            run = self._forward()
            roots = [t for s in self._roots if isinstance(t := run.values[s], Tensor) and t.requires_grad]
            grads = [torch.ones_like(root) for root in roots]
            start = self._clock()
            if roots:
                with outside_autocast():
                    backward(run, roots, grads)
            return run.forward, _by_unit(run.fired, start, self._clock())

    def _whole_backward(self, run: _ForwardRun, roots: list[Tensor], grads: list[Tensor]) -> None:
        torch.autograd.backward(roots, grads)

    def _input_only(self, run: _ForwardRun, roots: list[Tensor], grads: list[Tensor]) -> None:
        earliest = [run.values[slot] for slot in self._sources] + run.entries
        if earliest:
            torch.autograd.grad(roots, earliest, grads, allow_unused=True)

    # -- forward -------------------------------------------------------------------------------------

    def _forward(self) -> _ForwardRun:
        forget_casts()
        run = _ForwardRun()
        run.values |= {slot: self._fresh(run, slot, value) for slot, value in self._carried.items()}
        needed_slots = {*self._roots, *self._sources}
        for piece in self._pieces:
            start = self._clock()
            self._call(piece, run.values, needed_slots)
            run.forward[piece.unit] = self._clock() - start
            self._listen(run, piece)
        return run

    def _call(self, piece: UnitFunction, values: dict[int, Any], needed_slots: Collection[int]) -> None:
        exits = piece.function(*(values[slot] for slot in piece.entries), self._seed)
        values.update(zip(piece.exits, exits, strict=True))
        for slot in piece.dead:
            if slot not in needed_slots:
                values.pop(slot, None)

    def _fresh(self, run: _ForwardRun, slot: int, value: Any) -> Any:
        if not self._metas[slot].requires_grad:
            return value
        entry = value.detach().requires_grad_()
        run.entries.append(entry)
        return entry

    def _listen(self, run: _ForwardRun, piece: UnitFunction) -> None:
        """Reads the clock when the backward reaches the nodes that made what leaves this unit."""
        for slot in piece.exits:
            value = run.values.get(slot)
            node = value.grad_fn if isinstance(value, Tensor) else None
            if node is not None and node not in run.owner:
                run.owner[node] = piece.unit
                node.register_prehook(self._hook(run.fired, piece.unit))

    def _hook(self, fired: list[tuple[int, float]], unit: int) -> Callable[[Any], None]:
        clock = self._clock
        return lambda _: fired.append((unit, clock()))

    def _carry(
        self, pieces: Sequence[UnitFunction], inputs: dict[int, Any], wanted: set[int]
    ) -> dict[int, Any]:
        """Returns the inputs, and what wanted units read of the others, from one forward.

        It runs with gradients, since a unit may take some inside its forward (a gradient penalty).
        """
        values = dict(inputs)
        with torch.enable_grad():
            for piece in pieces:
                self._call(piece, values, {*wanted, *inputs})
                values |= {slot: values[slot].detach() for slot in piece.exits if slot in values}
        return {slot: value for slot, value in values.items() if slot in wanted or slot in inputs}


def _by_unit(fired: Sequence[tuple[int, float]], start: float, end: float) -> Seconds:
    """Assigns the time from one unit's first node to the next one's; earlier time counts for the
    first unit.
    """
    seconds: Seconds = {}
    opened = start
    for number, (unit, _) in enumerate(fired):
        closed = fired[number + 1][1] if number + 1 < len(fired) else end
        seconds[unit] = seconds.get(unit, 0.0) + closed - opened
        opened = closed
    return seconds


def _pieces(captured: Captured, model: nn.Module) -> Iterator[UnitFunction]:
    tape, starts = captured.tape, captured.starts
    required = required_slots(tape)
    alive = live(tape, required)
    last = last_reads(tape, alive) | dict.fromkeys(required, len(tape.instructions))
    for unit in range(len(captured.graph.units)):
        start, stop = starts[unit : unit + 2]
        body = [i for i in tape.instructions[start:stop] if alive[i.index]]
        made = {slot for i in body for slot in i.defines()}
        reads = dict.fromkeys(s for i in body for s in i.reads())
        entries = tuple(s for s in reads if s not in made and s not in tape.constants)
        exits = tuple(s for i in body for s in i.defines() if last.get(s, -1) >= stop)
        constants = {s: t for s, t in tape.constants.items() if s in reads}
        spec = SliceSpec(f"unit_{unit}", body, entries, exits, constants=constants)
        dead = tuple(s for s in (*entries, *exits) if last.get(s, -1) < stop)
        yield UnitFunction(unit, compile_slice(spec, model, tape.modes), entries, exits, dead)


def _roots(captured: Captured, pieces: Sequence[UnitFunction], wanted: Collection[int]) -> tuple[int, ...]:
    """Returns what wanted units pass to others, or to the end: the backward starts there."""
    asked = {s for p in pieces if p.unit not in wanted for s in p.entries} | set(
        required_slots(captured.tape)
    )
    exits = (s for p in pieces if p.unit in wanted for s in p.exits)
    return tuple(s for s in dict.fromkeys(exits) if s in asked)


def _sources(pieces: Sequence[UnitFunction], metas: Sequence[Any]) -> tuple[int, ...]:
    """Returns exits of the units in which gradients end: no input of theirs requires one."""
    ends = (p for p in pieces if not any(metas[s].requires_grad for s in p.entries))
    return tuple(s for p in ends for s in p.exits if metas[s].requires_grad)
