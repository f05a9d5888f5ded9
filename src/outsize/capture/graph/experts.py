"""Adds to a captured model which weights are of experts, and what their units send between ranks that divide
them.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from outsize.capture.graph.build import Captured
from outsize.ir.graph import ModelGraph
from outsize.program.sharding.expert_parallel.experts import find_experts


def with_experts(captured: Captured, model: nn.Module, graph: ModelGraph) -> ModelGraph:
    """Returns the graph with `experts` of its parameters and `routed_bytes` of its units; one without experts
    is unchanged.
    """
    found = find_experts(captured.tape, model) if graph.form == "tape" else {}
    if not found:
        return graph
    counts = {name: each.count for each in found.values() for name in each.parameters}
    routed: dict[int, tuple[int, int]] = {unit.index: (0, 0) for unit in graph.units}
    for unit, (start, stop) in enumerate(pairwise(captured.starts)):
        for index in found.keys() & range(start, stop):
            (slot,) = captured.tape.instructions[index].defines()
            size, choices = captured.tape.metas[slot].size_bytes, found[index].choices
            routed[unit] = routed[unit][0] + size, max(routed[unit][1], choices)
    fields = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields["parameters"] = tuple(
        p.model_copy(update={"experts": next((counts[n] for n in p.names if n in counts), 0)})
        for p in graph.parameters
    )
    fields["units"] = tuple(
        unit.model_copy(update=dict(zip(("routed_bytes", "choices"), routed[unit.index], strict=True)))
        for unit in graph.units
    )
    return ModelGraph(**fields)
