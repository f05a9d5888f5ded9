"""Adds to a captured model what tensor parallelism shards: its styles, and the sharded share of each unit.

It is called only where a plan may have tp, since it takes about a fifth of the capture's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise

from torch import nn

from outsize.capture.graph.build import Captured
from outsize.ir.graph import ModelGraph, ShardedFraction
from outsize.program.sharding.tensor_parallel.bytes_sent import Sent, Traffic, sent_bytes
from outsize.program.sharding.tensor_parallel.calls import ByColumns, OfClasses
from outsize.program.sharding.tensor_parallel.explain_styles import explain
from outsize.program.sharding.tensor_parallel.sequence import in_sequence
from outsize.program.sharding.tensor_parallel.styles import Derived, derive
from outsize.program.tape import Instruction, Ref, Tape


def with_styles(captured: Captured, model: nn.Module) -> ModelGraph:
    """Returns the graph with `tensor`, and `divided` of its units and values; a graph by modules is
    unchanged.
    """
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


def _units(captured: Captured, derived: Derived, model: nn.Module) -> Iterator[ShardedFraction]:
    sent, storages = sent_bytes(captured.tape, derived, model), _kept(captured.tape)
    runs = (captured.tape.instructions[a:b] for a, b in pairwise(captured.starts))
    return (_unit(run, derived, sent, storages) for run in runs)


def _kept(tape: Tape) -> dict[int, tuple[int, frozenset[int]]]:
    """Maps each storage to its bytes and the slots that live in it."""
    storages: dict[int, tuple[int, frozenset[int]]] = {}
    for slot, meta in enumerate(tape.metas):
        size, slots = storages.get(meta.storage, (0, frozenset()))
        storages[meta.storage] = max(size, meta.size_bytes), slots | {slot}
    return storages


def _unit(
    instructions: Iterable[Instruction],
    derived: Derived,
    sent: Mapping[int, Traffic],
    storages: Mapping[int, tuple[int, frozenset[int]]],
) -> ShardedFraction:
    work = all_work = saved = 0.0
    total = Counter[Sent]()
    roles, beside = dict[str, None](), dict[str, None]()
    for instruction in instructions:
        cost, step = instruction.cost, derived.steps.get(instruction.index)
        split = step is not None and step.splits_work
        # What a product by columns gathers is gathered again in its backward, and saved as a shard.
        is_gathered_again = step is None or (
            isinstance(step.call, ByColumns) and not step.call.product.asks_ranks
        )
        if step is None or is_gathered_again:
            gathered = set[int]()
        else:
            gathered = {leaf.slot for leaf in step.gather if isinstance(leaf, Ref)}
        amount = 1000 * cost.flops + cost.moved_bytes  # A product weighs more than the glue around it.
        all_work += amount
        work += amount if split else 0
        kept = [storages[s] for s in cost.saved_storages if s in storages]
        if step is not None and isinstance(step.call, OfClasses):
            # The chances of this rank's classes, which are no value of the tape; labels are, and stay whole.
            saved += max(0, cost.saved_bytes - sum(size for size, _ in kept))
        else:
            saved += cost.saved_bytes * _share_of(kept, derived, gathered, split)
        traffic = sent.get(instruction.index, Traffic())
        total.update(traffic.sizes)
        beside |= dict.fromkeys(traffic.beside)
        roles |= dict.fromkeys(name for name in instruction.parameters() if name in derived.roles)
    return ShardedFraction(
        work=work / all_work if all_work else 0.0,
        saved_bytes=int(saved),
        parameters=tuple(roles),
        beside=tuple(beside),
        **total,
    )


def _share_of(
    entries: Sequence[tuple[int, frozenset[int]]], derived: Derived, gathered: Set[int], split: bool
) -> float:
    """Returns the sharded share of the memory that autograd saves; what is gathered here is saved whole."""
    whole = sum(size for size, _ in entries)
    if not whole:
        return float(split)
    divided = derived.shares.keys()
    sharded = (
        size for size, slots in entries if slots.isdisjoint(gathered) and not divided.isdisjoint(slots)
    )
    return sum(sharded) / whole
