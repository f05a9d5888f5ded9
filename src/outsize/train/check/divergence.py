"""Finds the first unit whose values differ from the model's own, forward or backward.

Forward: the user's model runs eagerly and every call's results are recorded; the tape is replayed unit by
unit on the same inputs, each unit from the eager values before it, so that one wrong unit cannot hide behind
another. Backward: the last unit in forward order with a wrong parameter gradient, since backward runs from
the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outsize.capture.graph.build import Captured
from outsize.capture.recording.fallbacks import LossFn
from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.replaying.replay import bindings
from outsize.program.tape import Instruction
from outsize.program.weights.of_loss import with_loss
from outsize.run.stage.rng import Seed, borrowed_generators
from outsize.train.batch.batch import Batch
from outsize.train.check.reference import eager


def first_forward_divergence(
    captured: Captured, model: nn.Module, part: Batch, seed: Seed, loss_fn: LossFn | None
) -> str | None:
    """Returns the name of the first unit whose replay differs from the eager model, or None. Changes
    buffers.
    """
    model, tape, values = with_loss(model, loss_fn), captured.tape, dict[int, Any]()
    values.update(zip(tape.inputs, part.tensors(), strict=True))

    def visit(instruction: Instruction, result: Any) -> None:
        for slot, value in bindings(instruction.out, result).items():
            values[slot] = value.detach().clone()

    buffers = {n: b.clone() for n, b in model.named_buffers()}
    with borrowed_generators(), torch.no_grad():
        eager(model, tape, part, seed, loss_fn, visit)
        _restore(model, buffers)
        for unit in captured.graph.units:
            if not _unit_agrees(captured, unit.index, model, values, seed):
                return unit.name
    return None


def _unit_agrees(captured: Captured, unit: int, model: nn.Module, values: dict[int, Any], seed: Seed) -> bool:
    tape, (start, stop) = captured.tape, captured.starts[unit : unit + 2]
    body = [i for i in tape.instructions[start:stop] if all(s in values for s in i.defines())]
    defined = [slot for i in body for slot in i.defines()]
    # Memory that the unit writes in place has its final value only at the end: compare what is not written.
    written = {s for i in body for s in i.writes}
    exits = [s for s in defined if tape.storage(s) not in written]
    reads = dict.fromkeys(s for i in body for s in i.reads())
    entries = [s for s in reads if s not in defined and s not in tape.constants]
    constants = {s: t for s, t in tape.constants.items() if s in reads}
    spec = SliceSpec(f"unit_{unit}", body, entries, exits, constants=constants)
    replayed = compile_slice(spec, model, tape.modes)(*(values[s].clone() for s in entries), seed)
    return all(
        torch.equal(values[s], t) for s, t in zip(exits, replayed, strict=True) if isinstance(t, Tensor)
    )


def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def last_wrong_gradient(captured: Captured, wrong: frozenset[str]) -> str | None:
    """Returns the unit that the backward reaches first among those of parameters with wrong gradients."""
    graph = captured.graph
    owners = [u.name for u in graph.units if any(_names(graph, p) & wrong for p in u.parameters)]
    return owners[-1] if owners else None


def first_wrong_buffer(captured: Captured, model: nn.Module, wrong: frozenset[str]) -> str | None:
    """Returns the first unit whose instructions touch one of these buffers."""
    names = {id(b): n for n, b in model.named_buffers()}
    for instruction in captured.tape.instructions if wrong else ():
        touched = {w.name for w in instruction.weights if w.kind == "buffer"}
        if touched & wrong:
            return instruction.name
    return next((n for n in names.values() if n in wrong), None)


def _names(graph: Any, parameter: str) -> set[str]:
    return set(graph.parameter_of[parameter].names)
