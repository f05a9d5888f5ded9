"""Adds to a captured model what context parallelism and slices of sequences need of it: whether ranks can
hold its sequences by rows, and slices compute them in order, and what each unit gathers or asks the others
for.

It is called only where a plan may have cp or slices, since it walks the whole tape.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from contextlib import suppress
from typing import Any

from torch import nn

from outsize.capture.graph.build import Captured
from outsize.errors import BadOption
from outsize.ir.graph import ModelGraph, RowFacts
from outsize.program.liveness import live
from outsize.program.sharding.axis_group import CountedGroup, collective_of
from outsize.program.sharding.context_parallel.calls import IN_PIECES
from outsize.program.sharding.context_parallel.row_tape import row_tape
from outsize.program.sharding.context_parallel.rows import by_rows
from outsize.program.sharding.context_parallel.slices import in_order
from outsize.program.sharding.scaled_linear import SCALED
from outsize.program.sharding.share import RankPosition
from outsize.program.tape import Tape


def longest_sequence(tape: Tape) -> int:
    """Returns the most tokens that inputs (samples, tokens, ...) or (tokens, samples, ...) may have.

    0 where there are none.
    """
    shapes = (tape.metas[slot].shape for slot in tape.inputs)
    return max((max(shape[:2]) for shape in shapes if len(shape) > 1), default=0)


def with_rows(captured: Captured, model: nn.Module, ranks: int) -> ModelGraph:
    """Returns the graph with `rows`, and `row_gather_bytes` of its units, as `ranks` ranks would run it.

    A graph by modules is unchanged.
    """
    graph, tape = captured.graph, captured.tape
    if graph.form != "tape" or graph.rows is not None:
        return graph
    fields: dict[str, Any] = {name: getattr(graph, name) for name in type(graph).model_fields}
    try:
        rows = by_rows(tape, model, ranks)
    except BadOption as refusal:
        fields["rows"] = RowFacts(refused=refusal.what)
        return ModelGraph(**fields)
    local = row_tape(tape, rows, dict(model.named_modules()), CountedGroup(RankPosition(0, ranks)))
    alive = live(local, local.output_slots() if local.loss is None else (local.loss.slot,))
    gathered, maxima, heads = Counter[int](), Counter[int](), Counter[int]()
    for instruction in local.instructions:
        call = collective_of(instruction)
        if call is None or not alive[instruction.index]:
            continue
        unit = bisect_right(captured.starts, instruction.origin) - 1
        if call.name == "gather":
            gathered[unit] += sum(local.metas[slot].size_bytes for slot in instruction.defines())
        if call.name == IN_PIECES:
            # The slots of both tapes are the same: those of keys and values are whole in the tape of one.
            keys = [tape.metas[each.slot] for each in instruction.args[1:3]]
            gathered[unit] += sum(meta.size_bytes for meta in keys)
            heads[unit] += keys[0].shape[-3]
        maxima[unit] += call.name == SCALED
    units = [
        u.model_copy(
            update={
                "row_gather_bytes": gathered[u.index],
                "row_heads": heads[u.index],
                "row_maxima": maxima[u.index],
            }
        )
        for u in graph.units
    ]
    facts = RowFacts(tokens=rows.tokens, in_order=_is_in_order(tape, model))
    fields |= {"units": tuple(units), "rows": facts}
    return ModelGraph(**fields)


def _is_in_order(tape: Tape, model: nn.Module) -> bool:
    """Tells whether slices of sequences can be computed one after the other."""
    with suppress(BadOption):
        return bool(in_order(tape, model, 2).tokens)
    return False
