"""Builds a ModelGraph from a tape: groups instructions into units and lists the values between them.

Every leaf call, every op with FLOPs or parameters and the loss is an anchor. Between two anchors the
legal cut with the fewest crossing bytes separates their units (the later one when equal, so that cheap
glue stays with the layer that feeds it); where no cut is legal the anchors share a unit.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from torch import Tensor, nn
from torch._ops import OpOverload

from outsize.capture.costs.saved_memory import TapeStorages
from outsize.capture.costs.units import UnitCosts
from outsize.ir.graph import MATMULS, ModelGraph, Parameter, Unit, Value, Work
from outsize.ir.units.names import prefixes
from outsize.program.liveness import last_reads, legal_cuts, live, replicable
from outsize.program.loss_in_pieces.rewrite import in_pieces
from outsize.program.tape import Instruction, Tape
from outsize.program.values.wrapper_tensors import stored_bytes
from outsize.program.weights.beside import beside_bytes, numbers_of


@final
@dataclass(frozen=True, slots=True)
class Captured:
    """Holds a live tape, its graph, and `starts[u]`, the first instruction of unit u (then the
    total count).
    """

    tape: Tape
    graph: ModelGraph
    starts: tuple[int, ...]


def on_accelerators(tape: Tape) -> Tape:
    """Returns the tape with the costs that accelerators have, where a CPU has other kernels."""
    if all(i.cost.on_accelerator is None for i in tape.instructions):
        return tape
    instructions = tuple(replace(i, cost=i.cost.on_accelerator or i.cost) for i in tape.instructions)
    return replace(tape, instructions=instructions)


def multiplied_in(products: Mapping[str, str], captured: Captured) -> Captured:
    """Returns the recorded model with its products counted in other types than those of their operands."""
    if not products:
        return captured

    def counted(works: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(
            w.model_copy(update={"dtype": products.get(w.dtype, w.dtype)}) if w.family in MATMULS else w
            for w in works
        )

    passes = ("forward", "backward_input", "backward_weight")
    graph = captured.graph
    fields = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields["units"] = tuple(
        unit.model_copy(update={name: counted(getattr(unit, name)) for name in passes})
        for unit in graph.units
    )
    return replace(captured, graph=ModelGraph(**fields))


def with_pieces(captured: Captured, model: nn.Module, loss: int, modules: int) -> Captured:
    """Returns the recorded model with its loss, and its wide modules, in so many pieces of rows; as it is
    where they cannot be.
    """
    if captured.graph.form != "tape":
        return captured
    tape = in_pieces(captured.tape, model, loss, modules)
    return captured if tape is captured.tape else build_graph(tape, model, captured.graph.batch_size)


def required_slots(tape: Tape) -> tuple[int, ...]:
    """Returns the slots that a training step needs: the loss, or every output when there is none."""
    return (tape.loss.slot,) if tape.loss is not None else tape.output_slots()


def build_graph(tape: Tape, model: nn.Module, samples: int | None = None) -> Captured:
    """Builds units, values and parameters of a recorded model.

    Without `samples` the batch size is dim 0 of the first input.
    """
    alive, copies = live(tape, required_slots(tape)), replicable(tape)
    owned = [a and not c for a, c in zip(alive, copies, strict=True)]
    last = last_reads(tape, alive)
    starts = _unit_starts(tape, owned, last)
    parameters = parameters_of(model)
    memory = TapeStorages.of(tape, starts)
    units = _units(tape, starts, owned, model, UnitCosts(tape, last, memory))
    graph = ModelGraph(
        model=type(model).__name__,
        fingerprint=fingerprint_of(model, parameters, units),
        batch_size=_batch_size(tape) if samples is None else samples,
        units=units,
        values=_values(tape, memory, starts, owned),
        parameters=_with_outer(parameters, units),
        output_bytes=sum(tape.metas[s].size_bytes for s in tape.output_slots()),
        input_bytes=sum(memory.size_bytes[s] for s in {tape.storage(i) for i in tape.inputs}),
        notes=tape.opaque,
    )
    return Captured(tape, graph, starts)


def _unit_starts(tape: Tape, owned: list[bool], last: dict[int, int]) -> tuple[int, ...]:
    legal, crossing = legal_cuts(tape), _crossing_bytes(tape, owned, last)
    anchors = [i.index for i in tape.instructions if owned[i.index] and _is_anchor(tape, i)]
    starts = [0]
    for before, after in pairwise(anchors):
        cuts = [p for p in range(before + 1, after + 1) if legal[p] and p > starts[-1]]
        if cuts:
            starts.append(min(cuts, key=lambda p: (crossing[p], -p)))
    return (*starts, len(tape.instructions))


def _is_anchor(tape: Tape, instruction: Instruction) -> bool:
    # ATen ops themselves are parts of a transform (vmap), which a unit of their own would cut.
    heavy = instruction.cost.flops and not isinstance(instruction.target, OpOverload)
    if instruction.is_leaf or heavy or instruction.parameters():
        return True
    return tape.loss is not None and tape.loss.slot in instruction.defines()


def _crossing_bytes(tape: Tape, owned: list[bool], last: dict[int, int]) -> list[int]:
    steps = [0] * (len(tape.instructions) + 2)
    for slot, producer in tape.producer.items():
        if owned[producer] and last.get(slot, producer) > producer:
            steps[producer + 1] += tape.metas[slot].size_bytes
            steps[last[slot] + 1] -= tape.metas[slot].size_bytes
    total, crossing = 0, []
    for step in steps:
        total += step
        crossing.append(total)
    return crossing


def _units(
    tape: Tape, starts: Sequence[int], owned: list[bool], model: nn.Module, costs: UnitCosts
) -> tuple[Unit, ...]:
    groups = [tape.instructions[a:b] for a, b in pairwise(starts)]
    groups = [[i for i in group if owned[i.index]] for group in groups]
    anchors = [next((i for i in g if _is_anchor(tape, i)), g[0] if g else None) for g in groups]
    names = _unique([a.name if a is not None else f"glue.{n}" for n, a in enumerate(anchors)])
    counted: set[str] = set()
    modules, units = dict(model.named_modules()), list[Unit]()
    for name, anchor, group in zip(names, anchors, groups, strict=True):
        buffers = {w.name for i in group for w in i.weights if w.kind == "buffer"} - counted
        counted |= buffers
        unit = Unit(
            index=len(units),
            name=name,
            kind=_kind(anchor, modules),
            parameters=tuple(dict.fromkeys(p for i in group for p in i.parameters())),
            buffer_bytes=sum(stored_bytes(model.get_buffer(b)) for b in buffers),
            **costs.of(len(units), group),
        )
        units.append(unit)
    return tuple(units)


def _kind(anchor: Instruction | None, modules: dict[str, nn.Module]) -> str:
    if anchor is None:
        return "glue"
    if isinstance(anchor.target, str):
        return type(modules[anchor.target]).__name__
    return anchor.name.rpartition(":")[2]


def _unique(names: list[str]) -> list[str]:
    """Appends `#0`, `#1`, ... to names that occur several times, or whose pattern covers another unit."""
    totals, seen = Counter(names), Counter[str]()
    covering = {pattern for name in totals for pattern in prefixes(name)[1:]}
    unique = []
    for name in names:
        unique.append(f"{name}#{seen[name]}" if totals[name] > 1 or name in covering else name)
        seen[name] += 1
    return unique


def _values(tape: Tape, memory: TapeStorages, starts: Sequence[int], owned: list[bool]) -> tuple[Value, ...]:
    unit_of = _unit_index(starts)
    consumers: dict[int, set[int]] = {}
    for instruction in tape.instructions:
        if owned[instruction.index]:
            for slot in instruction.reads():
                consumers.setdefault(slot, set()).add(unit_of[instruction.index])
    values = []
    for slot, producer in sorted(tape.producer.items()):
        users = sorted(u for u in consumers.get(slot, ()) if u > unit_of[producer])
        if owned[producer] and users:
            values.append(_value(tape, memory, slot, unit_of[producer], users))
    return tuple(values)


def _value(tape: Tape, memory: TapeStorages, slot: int, producer: int, users: list[int]) -> Value:
    meta = tape.metas[slot]
    return Value(
        id=slot,
        shape=meta.shape,
        dtype=str(meta.dtype).removeprefix("torch."),
        size_bytes=meta.size_bytes,
        requires_grad=meta.requires_grad,
        producer=producer,
        consumers=tuple(users),
        storage=meta.storage,
        storage_bytes=memory.size_bytes[meta.storage],
        saved_by=memory.saved_by.get(meta.storage, -1),
        also_saved_by=memory.keepers.get(meta.storage, ())[1:],
    )


def _unit_index(starts: Sequence[int]) -> list[int]:
    return [u for u, (a, b) in enumerate(pairwise(starts)) for _ in range(a, b)]


def parameters_of(model: nn.Module) -> tuple[Parameter, ...]:
    """Returns all parameters of the model, tied ones once, under their first name."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    beside, numbers = beside_bytes(model), numbers_of(model)
    return tuple(
        Parameter(
            names=tuple(names[key]),
            shape=tuple(t.shape),
            dtype=str(t.dtype).removeprefix("torch."),
            size_bytes=stored_bytes(t) + beside.get(names[key][0], 0),
            trainable=t.requires_grad,
            numbers=numbers.get(key, 0),
        )
        for key, t in tensors.items()
    )


def _with_outer(parameters: tuple[Parameter, ...], units: Sequence[Unit]) -> tuple[Parameter, ...]:
    """Marks the parameters that are looked up by index, and those of the last layer."""
    lookups = {
        name for u in units if any(w.family == "embedding" for w in u.forward) for name in u.parameters
    }
    last = next((u.parameters for u in reversed(units) if u.parameters), ())
    outer = lookups.union(last)
    return tuple(p if outer.isdisjoint(p.names) else p.model_copy(update={"outer": True}) for p in parameters)


def fingerprint_of(model: nn.Module, parameters: tuple[Parameter, ...], units: tuple[Unit, ...]) -> str:
    """Returns a text that is equal for equal classes, weights and units; the batch size does not matter."""
    parts = [
        type(model).__name__,
        *(f"{p.names}{p.shape}{p.dtype}" for p in parameters),
        *(u.name for u in units),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _batch_size(tape: Tape) -> int:
    shapes = [tape.metas[s].shape for s in tape.inputs]
    return next((shape[0] for shape in shapes if shape), 1)
