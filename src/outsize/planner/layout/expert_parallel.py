"""Problem: what is the model of one of `ep` ranks that divide the experts, as a graph of its own?

    weights of experts   ceil(E / ep) of E, and so their gradients and optimizer states
    saved, workspace     of a unit with experts: EXPERT_MARGIN times those of its own tokens, since a router
                         may send one rank more rows than the mean; and what is sent and received beside it
    work                 that of its own tokens: a mean rank computes as many rows as it sends

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
    fields["units"] = tuple(_unit(unit, ep) if unit.routed_bytes else unit for unit in graph.units)
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


def _weight(weight: Parameter, ep: int) -> Parameter:
    own = -(-weight.experts // ep)
    size = weight.size_bytes // weight.experts * own
    return weight.model_copy(update={"shape": (own, *weight.shape[1:]), "size_bytes": size})


def _unit(unit: Unit, ep: int) -> Unit:
    beside = 2 * sent_bytes(unit, ep)
    sizes = {name: int(EXPERT_MARGIN * getattr(unit, name)) for name in ("saved_bytes", "workspace_bytes")}
    sizes["backward_workspace_bytes"] = int(EXPERT_MARGIN * max(0, unit.backward_workspace_bytes)) + beside
    sizes["workspace_bytes"] += beside
    return unit.model_copy(update=sizes)


def _cost(cost: UnitCost, unit: Unit, ep: int) -> UnitCost:
    work = int(EXPERT_MARGIN * cost.workspace_bytes) + 2 * sent_bytes(unit, ep)
    return cost.model_copy(
        update={"saved_bytes": int(EXPERT_MARGIN * cost.saved_bytes), "workspace_bytes": work}
    )
