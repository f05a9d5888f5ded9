"""A captured model with what tensor parallelism divides of it: its styles, and of each unit a share.

Asked for only where a plan may have tp: it takes about as long as a fifth of the capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import pairwise

from torch import nn

from outsize.capture.graph import Captured
from outsize.ir.graph import Divided, ModelGraph
from outsize.program.explain_styles import explain
from outsize.program.sequence import in_sequence
from outsize.program.tape import Instruction, Ref, Tape
from outsize.program.tensor_bytes import Sent, sent_bytes
from outsize.program.tensor_styles import Derived, derive


def with_styles(captured: Captured, model: nn.Module) -> ModelGraph:
    """The graph with `tensor`, and `divided` of its units and values; a model by modules as it is."""
    graph, tape = captured.graph, captured.tape
    if graph.form != "tape" or graph.tensor is not None:
        return graph
    derived = derive(tape, model)
    cut = in_sequence(tape, derived, model)
    each = zip(graph.units, _units(captured, derived, model), _units(captured, cut, model), strict=True)
    units = [unit.model_copy(update={"divided": a, "in_sequence": b}) for unit, a, b in each]
    values = [
        v.model_copy(update={"divided": v.id in derived.shares, "in_sequence": v.id in cut.shares})
        for v in graph.values
    ]
    fields = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields |= {"units": tuple(units), "values": tuple(values), "tensor": explain(tape, model, derived)}
    return ModelGraph(**fields)


def _units(captured: Captured, derived: Derived, model: nn.Module) -> Iterator[Divided]:
    sent, kept = sent_bytes(captured.tape, derived, model), _kept(captured.tape)
    runs = (captured.tape.instructions[a:b] for a, b in pairwise(captured.starts))
    return (_unit(run, derived, sent, kept) for run in runs)


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
        cost, act = instruction.cost, derived.acts.get(instruction.index)
        split = act is not None and (act.parts or act.kind in ("row", "loss"))
        gathered = set[int]() if act is None else {leaf.slot for leaf in act.gather if isinstance(leaf, Ref)}
        amount = 1000 * cost.flops + cost.moved_bytes  # a product weighs more than the glue at it
        all_work += amount
        work += amount if split else 0
        saved += cost.saved_bytes * _share_of(
            (kept[s] for s in cost.kept if s in kept), derived, gathered, split
        )
        total.update(sent.get(instruction.index, {}))
        roles |= dict.fromkeys(name for name in instruction.parameters() if name in derived.roles)
    return Divided(
        work=work / all_work if all_work else 0.0,
        saved_bytes=int(saved),
        parameters=tuple(roles),
        **total,
    )


def _share_of(
    kept: Iterable[tuple[int, frozenset[int]]], derived: Derived, gathered: Set[int], split: bool
) -> float:
    """Of the memory that autograd keeps, the share that is divided: what is gathered here is kept whole."""
    found = list(kept)
    whole = sum(size for size, _ in found)
    if not whole:
        return float(split)
    divided = derived.shares.keys()
    own = (size for size, slots in found if slots.isdisjoint(gathered) and not slots.isdisjoint(divided))
    return sum(own) / whole
