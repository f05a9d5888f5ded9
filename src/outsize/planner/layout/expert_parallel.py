"""Problem: what is the model of one of `ep` ranks that divide the experts, as a graph of its own?

    weights of experts   ceil(E / ep) of E, and so their gradients and optimizer states
    saved, workspace     of a unit with experts: EXPERT_MARGIN times those of its own tokens, since a router
                         may send one rank more rows than the mean; and what is sent and received beside it
    gradients            are made whole before they are added up: in a backward's workspace the largest one is
                         that of the rank's own experts. What is left of the workspace is of tokens, and no
                         less than in a forward
    work                 that of its own tokens, since a mean rank computes as many rows as it sends; and
                         weights of its own experts are read (costs/parallel_times.py)

The graph says which weights are of experts (capture/graph/experts.py). All else is a replica's. Source:
GShard, arXiv 2006.16668, sec. 3.2. Deviation: the margin is stated and not derived; a run counts its rows.
Complexity: O(units). Oracle: tests/unit/planner/layout/test_layout_expert_parallel.py.
"""

from __future__ import annotations

from outsize.ir.graph import ModelGraph, Parameter, Unit
from outsize.ir.plan import EXPERT_MARGIN
from outsize.ir.profile import Profile, UnitCost


def expert_sizes(graph: ModelGraph, devices: int) -> list[int]:
    """Returns the sizes of ep > 1 by which so many devices can be divided, and each rank has an expert."""
    counts = {p.experts for p in graph.parameters if p.experts}
    sizes = (n for n in range(2, devices + 1) if devices % n == 0) if counts else ()
    return [n for n in sizes if all((n - 1) * -(-count // n) < count for count in counts)]


def of_expert_rank(model: tuple[ModelGraph, Profile], ep: int) -> tuple[ModelGraph, Profile]:
    """Returns the model of one of `ep` ranks, in bytes; its seconds stay those of one device."""
    graph, profile = model
    if ep == 1:
        return model
    fields = {name: getattr(graph, name) for name in type(graph).model_fields}
    fields["parameters"] = tuple(_weight(p, ep) if p.experts else p for p in graph.parameters)
    fields["units"] = tuple(_unit(graph, unit, ep) if unit.routed_bytes else unit for unit in graph.units)
    costs = tuple(
        _cost(cost, unit, ep) if unit.routed_bytes else cost
        for cost, unit in zip(profile.units, graph.units, strict=True)
    )
    return ModelGraph(**fields), profile.model_copy(update={"units": costs})


def sent_bytes(unit: Unit, ep: int) -> int:
    """Returns the bytes of all ranks' rows that a unit's forward sends there, and again back: of its tokens
    (gathered), or of their choices where these are fewer than ranks (dispatched).
    """
    return unit.routed_bytes * min(unit.choices, ep)


def experts_share(graph: ModelGraph) -> float:
    """Returns the share of the weights' bytes that are experts."""
    whole = graph.parameter_bytes
    return sum(p.size_bytes for p in graph.parameters if p.experts) / whole if whole else 0.0


def absent_bytes(graph: ModelGraph, unit: Unit, ep: int) -> int:
    """Returns the bytes of the experts of a unit that the first rank does not have."""
    return sum(p.size_bytes - _own_bytes(p, ep) for p in _experts_of(graph, unit))


def _experts_of(graph: ModelGraph, unit: Unit) -> list[Parameter]:
    return [p for p in map(graph.parameter_of.__getitem__, unit.parameters) if p.experts]


def _own_bytes(weight: Parameter, ep: int) -> int:
    return weight.size_bytes // weight.experts * -(-weight.experts // ep)


def _weight(weight: Parameter, ep: int) -> Parameter:
    shape = (-(-weight.experts // ep), *weight.shape[1:])
    return weight.model_copy(update={"shape": shape, "size_bytes": _own_bytes(weight, ep)})


def _unit(graph: ModelGraph, unit: Unit, ep: int) -> Unit:
    beside = 2 * sent_bytes(unit, ep)
    sizes = {name: int(EXPERT_MARGIN * getattr(unit, name)) for name in ("saved_bytes", "workspace_bytes")}
    backward = max(0, unit.backward_workspace_bytes)
    trained = [p for p in _experts_of(graph, unit) if p.trainable]
    whole, own = (max((_own_bytes(p, ranks) for p in trained), default=0) for ranks in (1, ep))
    tokens = max(backward - whole, min(backward, unit.workspace_bytes))
    sizes["backward_workspace_bytes"] = int(EXPERT_MARGIN * tokens) + min(backward, own) + beside
    sizes["workspace_bytes"] += beside
    return unit.model_copy(update=sizes)


def _cost(cost: UnitCost, unit: Unit, ep: int) -> UnitCost:
    work = int(EXPERT_MARGIN * cost.workspace_bytes) + 2 * sent_bytes(unit, ep)
    return cost.model_copy(
        update={"saved_bytes": int(EXPERT_MARGIN * cost.saved_bytes), "workspace_bytes": work}
    )
