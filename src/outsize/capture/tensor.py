"""A captured model with what tensor parallelism divides of it: its styles, and of each unit a share.

Asked for only where a plan may have tp: it takes about as long as a fifth of the capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise

from torch import nn

from outsize.capture.graph import Captured
from outsize.ir.graph import Divided, ModelGraph
from outsize.program.explain_styles import explain
from outsize.program.tape import Instruction, Tape
from outsize.program.tensor_bytes import Sent, sent_bytes
from outsize.program.tensor_styles import Derived, derive


def with_styles(captured: Captured, model: nn.Module) -> ModelGraph:
    """The graph with `tensor`, and `divided` of its units and values; a model by modules as it is."""
    graph, tape = captured.graph, captured.tape
    if graph.form != "tape" or graph.tensor is not None:
        return graph
    derived = derive(tape, model)
    sent, kept = sent_bytes(tape, derived, model), _kept(tape)
    units = [
        unit.model_copy(update={"divided": _unit(tape.instructions[a:b], derived, sent, kept)})
        for unit, (a, b) in zip(graph.units, pairwise(captured.starts), strict=True)
    ]
    values = [v.model_copy(update={"divided": v.id in derived.shares}) for v in graph.values]
    fields = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields |= {"units": tuple(units), "values": tuple(values), "tensor": explain(tape, model, derived)}
    return ModelGraph(**fields)


def _kept(tape: Tape) -> dict[int, tuple[int, frozenset[int]]]:
    """Storage -> its bytes, and the slots that live in it."""
    found: dict[int, tuple[int, frozenset[int]]] = {}
    for slot, meta in enumerate(tape.metas):
        size, slots = found.get(meta.storage, (0, frozenset()))
        found[meta.storage] = max(size, meta.size_bytes), slots | {slot}
    return found


def _unit(
    instructions: Iterable[Instruction],
    derived: Derived,
    sent: Mapping[int, Counter[Sent]],
    kept: Mapping[int, tuple[int, frozenset[int]]],
) -> Divided:
    work = all_work = saved = 0.0
    total = Counter[Sent]()
    roles: dict[str, None] = {}
    for instruction in instructions:
        cost, split = instruction.cost, _is_split(instruction, derived)
        amount = 1000 * cost.flops + cost.moved_bytes  # a product weighs more than the glue at it
        all_work += amount
        work += amount if split else 0
        saved += cost.saved_bytes * _share_of(cost.kept, derived, kept, split)
        total.update(sent.get(instruction.index, {}))
        roles |= dict.fromkeys(name for name in instruction.parameters() if name in derived.roles)
    return Divided(
        work=work / all_work if all_work else 0.0,
        saved_bytes=int(saved),
        parameters=tuple(roles),
        **total,
    )


def _is_split(instruction: Instruction, derived: Derived) -> bool:
    """Does a rank do its part of the work alone?"""
    act = derived.acts.get(instruction.index)
    return act is not None and act.kind != "vocabulary" and not (act.kind is None and act.gather)


def _share_of(
    storages: Iterable[int], derived: Derived, kept: Mapping[int, tuple[int, frozenset[int]]], split: bool
) -> float:
    """Of the memory that autograd keeps, the share that is divided."""
    found = [kept[storage] for storage in storages if storage in kept]
    whole = sum(size for size, _ in found)
    if not whole:
        return float(split)
    return sum(size for size, slots in found if not slots.isdisjoint(derived.shares.keys())) / whole
