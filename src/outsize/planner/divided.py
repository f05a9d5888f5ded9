"""Problem: what is left of a model for one of `ways` tensor parallel ranks, as a graph of its own?

    weights, values, saved bytes     the divided ones 1 / ways (rounded up), all others whole
    work, workspace                  of a unit whose work is divided 1 / ways
    sequence parallelism             the same; what lies between layers is divided, too (program/sequence.py)

The graph says what is divided (`ModelGraph.tensor`, derived from the program: program/tensor_styles.py). All
that a planner counts for a stage it then counts on this graph; what ranks send each other is spread.py's.
Sources: Megatron-LM, arXiv 1909.08053, sec. 3; sequence parallelism, arXiv 2205.05198, sec. 4.2.2.
Deviation: a unit's workspace is divided as its work is. Symbols: t -> ways. Complexity: O(units + values).
Oracle: tests/unit/planner/test_divided.py, against the parts that a rank of a real model has.
"""

from __future__ import annotations

from collections.abc import Iterator

from outsize.ir.graph import ModelGraph, Parameter, Unit, Value
from outsize.ir.profile import Profile, UnitCost
from outsize.ir.text import bytes_text, percent_text


def styled(graph: ModelGraph, sequence: bool) -> ModelGraph:
    """The graph, of which under sequence parallelism more is divided."""
    if not sequence:
        return graph
    fields = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields["units"] = tuple(u.model_copy(update={"divided": u.in_sequence}) for u in graph.units)
    fields["values"] = tuple(v.model_copy(update={"divided": v.in_sequence}) for v in graph.values)
    return ModelGraph(**fields)


def of_rank(
    model: tuple[ModelGraph, Profile], ways: int, sequence: bool = False
) -> tuple[ModelGraph, Profile]:
    """The model of one rank, in bytes: seconds stay those of one device. `sequence`: under that parallelism.

    The same where there is one rank, or where nobody has asked what is divided.
    """
    graph, profile = model
    if ways == 1 or graph.tensor is None:
        return model
    graph = styled(graph, sequence)
    costs = tuple(_cost(c, u, ways) for c, u in zip(profile.units, graph.units, strict=True))
    return _graph(graph, ways), profile.model_copy(update={"units": costs})


def divides(graph: ModelGraph, ways: int) -> bool:
    """May so many ranks divide it? True where nobody has asked; a model by modules has sizes of its own."""
    whole = graph.form == "modules"
    return ways == 1 or (not whole and (graph.tensor is None or ways in graph.tensor.degrees))


def tensor_reasons(graph: ModelGraph, ways: int, sequence: bool) -> Iterator[str]:
    """Sentences for `Plan.why`; `graph` is of one microbatch."""
    if ways == 1 or graph.tensor is None:
        return
    if sequence:
        whole, graph = graph, styled(graph, sequence)
        kept = [sum(unit.saved_bytes for unit in _graph(of, ways).units) for of in (graph, whole)]
        less, before = map(bytes_text, kept)
        yield f"sequence parallel: a rank keeps {less} of a microbatch for its backward, not {before}"
    assert graph.tensor is not None
    modules, each = graph.tensor.modules, [unit.divided for unit in graph.units]
    divided = sum(module.style != "whole" for module in modules)
    held = percent_text(_graph(graph, ways).parameter_bytes / graph.parameter_bytes)
    sums = sum(unit.forward_sum + unit.backward_sum for unit in each)
    gathers = sum(unit.forward_gather + unit.backward_gather for unit in each)
    more = f" and gathers {bytes_text(gathers)}" if gathers else ""
    yield (
        f"tp {ways}: {divided} of {len(modules)} modules with weights are divided, a rank has {held} of the "
        f"weights; a microbatch adds up {bytes_text(sums)}{more} between the ranks"
    )
    if graph.tensor.hints:
        said = "; ".join(graph.tensor.hints[:2])
        yield f"the model's own tp plan is compared, and not followed: {said}"


def _graph(graph: ModelGraph, ways: int) -> ModelGraph:
    names = {name for unit in graph.units for name in unit.divided.parameters}
    fields = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields["units"] = tuple(_unit(unit, ways) for unit in graph.units)
    fields["values"] = tuple(_value(value, ways) if value.divided else value for value in graph.values)
    fields["parameters"] = tuple(_weight(p, ways) if p.name in names else p for p in graph.parameters)
    return ModelGraph(**fields)


def _unit(unit: Unit, ways: int) -> Unit:
    names = ("workspace_bytes", "backward_workspace_bytes", "flops", "moved_bytes")
    less = {name: _left(unit, getattr(unit, name), ways) for name in names}
    saved = unit.saved_bytes - unit.divided.saved_bytes + share(unit.divided.saved_bytes, ways)
    return unit.model_copy(update={**less, "saved_bytes": saved})


def _cost(cost: UnitCost, unit: Unit, ways: int) -> UnitCost:
    divided = min(unit.divided.saved_bytes, cost.saved_bytes)
    saved, work = cost.saved_bytes - divided + share(divided, ways), _left(unit, cost.workspace_bytes, ways)
    return cost.model_copy(update={"saved_bytes": saved, "workspace_bytes": work})


def _left(unit: Unit, size: int, ways: int) -> int:
    divided = int(size * unit.divided.work)
    return size - divided + share(divided, ways)


def _value(value: Value, ways: int) -> Value:
    less = {name: share(getattr(value, name), ways) for name in ("size_bytes", "storage_bytes")}
    return value.model_copy(update=less)


def _weight(weight: Parameter, ways: int) -> Parameter:
    less = {"shape": (share(weight.numel, ways),), "size_bytes": share(weight.size_bytes, ways)}
    return weight.model_copy(update=less)


def share(size: int, ways: int) -> int:
    """The largest of `ways` shares."""
    return -(-size // ways)
