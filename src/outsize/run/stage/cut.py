"""Cuts a tape into stage programs: one generated function per stage, and the values between them.

    owners (0, 0, 1, 1, 0, 2): any stages whose numbers ascend along values and gradients (ir/stage_graph.py)
    owned instructions go to the stage of their unit, dead ones nowhere, replicable ones wherever needed

A program never computes what another stage owns; what it needs from there is a Boundary. The outputs of the
model, when they are wanted (evaluation), are sent to the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, final

from torch import nn

from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.lengths import FormAtLengths, Lengths, length_inputs
from outsize.program.liveness import live, replicable
from outsize.program.python_reads import NumberInput
from outsize.program.tape import Instruction, Tape, backward_slice
from outsize.run.stage.boundary import (
    NO_HOMES,
    Boundary,
    WeightHomes,
    find_boundaries,
    with_ordered_uses,
)


@final
@dataclass(frozen=True, slots=True)
class StageProgram:
    """Holds what one stage runs: `function(*inputs, *received slots, *received weights, seed) -> exits`.

    `exits` are the sent slots, then the loss if it is computed here, then the outputs if wanted. The function
    was generated from `spec`.
    """

    stage: int
    spec: SliceSpec
    function: Callable[..., tuple[Any, ...]]
    inputs: tuple[int, ...]  # positions in the tape's inputs
    received: tuple[Boundary, ...]  # slots before weights
    sent: tuple[Boundary, ...]
    has_loss: bool
    outputs: tuple[int, ...]
    weights: frozenset[str]  # every weight that the stage's own modules hold, and use or send
    written: frozenset[str]  # buffers that a forward changes


@final
@dataclass(frozen=True, slots=True)
class Cut:
    """Holds the programs of all stages of a model."""

    tape: Tape
    programs: tuple[StageProgram, ...]
    boundaries: tuple[Boundary, ...]


def cut(
    tape: Tape,
    model: nn.Module,
    owners: Sequence[int],
    *,
    outputs: bool,
    stages: int | None = None,
    homes: WeightHomes = NO_HOMES,
) -> Cut:
    """Cuts the tape; `owners[i]` is the stage of instruction i (`in_runs`).

    There are `stages` programs, by default as many as `owners` names. With `outputs=False` the programs
    compute what the loss needs, with `outputs=True` also every output of the model. Weights that live
    somewhere already stay there (`homes`), and no stage before one that has a weight may use it.
    """
    wanted = _wanted(tape, outputs)
    tape, owner = with_ordered_uses(tape, _owners(tape, owners, wanted))
    last = (max(owners, default=0) + 1 if stages is None else stages) - 1
    needs = [_needs(tape, owner, stage, wanted if stage == last else ()) for stage in range(last + 1)]
    trainable = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    boundaries = find_boundaries(tape, owner, [n.reads for n in needs], trainable, homes)
    programs = tuple(_program(tape, model, need, boundaries) for need in needs)
    return Cut(tape, programs, boundaries)


@final
class CutAtLengths:
    """The cut of a tape whose lengths are inputs: at all lengths, the stages run the same functions."""

    def __init__(self, base: Cut, followed: Tape) -> None:
        """`base` is the cut of a form of the tape that was followed, whose slots and calls come first."""
        self._base, self._form = base, FormAtLengths(base.tape, followed)
        self._numbers = [length_inputs(program.spec.instructions) for program in base.programs]

    def at(self, tape: Tape, lengths: Lengths) -> Cut:
        """Returns the cut with these lengths put in, which the followed tape has in `tape`."""
        tape = self._form.at(tape, lengths)
        boundaries = tuple(_at_meta(boundary, tape) for boundary in self._base.boundaries)
        of_key = {boundary.key: boundary for boundary in boundaries}
        programs = zip(self._base.programs, self._numbers, strict=True)
        return Cut(tape, tuple(_at_lengths(p, n, lengths, tape, of_key) for p, n in programs), boundaries)


def _at_meta(boundary: Boundary, tape: Tape) -> Boundary:
    return boundary if boundary.meta is None else replace(boundary, meta=tape.metas[boundary.slot])


def _at_lengths(
    program: StageProgram,
    numbers: tuple[NumberInput, ...],
    lengths: Lengths,
    tape: Tape,
    boundaries: dict[int, Boundary],
) -> StageProgram:
    if numbers:
        instructions = tuple(tape.instructions[i.index] for i in program.spec.instructions)
        function = partial(program.function, lengths=lengths.of(numbers))
        program = replace(program, spec=replace(program.spec, instructions=instructions), function=function)
    return replace(
        program,
        received=tuple(boundaries[b.key] for b in program.received),
        sent=tuple(boundaries[b.key] for b in program.sent),
    )


def in_runs(edges: Sequence[int]) -> list[int]:
    """Returns the stage of each instruction where stage s has the instructions `edges[s] ..
    edges[s+1] - 1`.
    """
    return [stage for stage, run in enumerate(pairwise(edges)) for _ in range(*run)]


def _wanted(tape: Tape, outputs: bool) -> tuple[int, ...]:
    """Returns the output slots that the last stage has to return."""
    return tuple(dict.fromkeys(tape.output_slots())) if outputs or tape.loss is None else ()


def _owners(tape: Tape, owners: Sequence[int], wanted: Sequence[int]) -> list[int]:
    required = {*wanted, *((tape.loss.slot,) if tape.loss is not None else ())}
    alive, copies = live(tape, required), replicable(tape)
    keep = [a and not c for a, c in zip(alive, copies, strict=True)]
    return [owner if is_owned else -1 for owner, is_owned in zip(owners, keep, strict=True)]


@final
@dataclass(frozen=True, slots=True)
class _Needs:
    """Lists what one stage runs, reads and returns; `reads` are slots that other stages own."""

    stage: int
    instructions: tuple[Instruction, ...]
    reads: tuple[int, ...]
    wanted: tuple[int, ...]
    has_loss: bool


def _needs(tape: Tape, owner: Sequence[int], stage: int, wanted: Sequence[int]) -> _Needs:
    owned_here = [i for i in tape.instructions if owner[i.index] == stage]
    asked = dict.fromkeys([s for i in owned_here for s in i.reads()] + list(wanted))
    present = {*tape.inputs, *tape.constants}
    foreign = [s for s in asked if s not in present and owner[tape.producer[s]] not in (stage, -1)]
    copied = [s for s in asked if s not in present and owner[tape.producer[s]] == -1]
    copies = backward_slice(tape.instructions, tape.metas, copied) if copied else []
    owned = {i.index for i in owned_here}
    copies = [i for i in copies if owner[i] == -1 and i not in owned]
    order = sorted({*copies, *owned})
    instructions = tuple(tape.instructions[i] for i in order)
    has_loss = tape.loss is not None and owner[tape.producer[tape.loss.slot]] == stage
    return _Needs(stage, instructions, tuple(sorted(foreign)), tuple(wanted), has_loss)


def _program(tape: Tape, model: nn.Module, need: _Needs, boundaries: Sequence[Boundary]) -> StageProgram:
    received = tuple(b for b in boundaries if need.stage in b.consumers)
    received = tuple(sorted(received, key=lambda b: (b.weight is not None, b.key)))
    sent = tuple(b for b in boundaries if b.producer == need.stage)
    reads = {s for i in need.instructions for s in i.reads()} | set(need.wanted)
    inputs = tuple(p for p, s in enumerate(tape.inputs) if s in reads)
    exits = [b.slot for b in sent if b.weight is None]
    exits += [tape.loss.slot] if need.has_loss and tape.loss is not None else []
    foreign = [b.weight for b in received if b.weight is not None]
    used = {w.name for i in need.instructions for w in i.weights}
    spec = SliceSpec(
        name=f"stage_{need.stage}",
        instructions=need.instructions,
        entries=[tape.inputs[p] for p in inputs] + [b.slot for b in received if b.weight is None],
        exits=[*exits, *need.wanted],
        foreign=foreign,
        constants={s: t for s, t in tape.constants.items() if s in reads},
        through={n: f for n, f in tape.through.items() if n in used},
    )
    return StageProgram(
        stage=need.stage,
        spec=spec,
        function=compile_slice(spec, model, tape.modes),
        inputs=inputs,
        received=received,
        sent=sent,
        has_loss=need.has_loss,
        outputs=need.wanted,
        weights=frozenset((used - set(foreign)).union(b.weight for b in sent if b.weight is not None)),
        written=frozenset(w.name for i in need.instructions for w in i.written_weights),
    )
