"""Computes the edges between stages (which stage sends what to which) once the cuts are known.

The law, the same one that `run/stage/cut.py` follows when it cuts the real tape:

1. A *flow* is something made by one unit and needed by later ones: a value of the graph, or a parameter
   with several users, which its first user owns.
2. Forward, the owner's stage sends a flow directly to every later stage that uses it.
3. Backward, the gradient is threaded: the last using stage sends its part to the using stage
   before it, which adds its own and sends on, down to the owner. One message per using stage.
4. A flow without gradient (`requires_grad` false, a frozen parameter) has no backward edge.
5. A parameter is constant during a step, so its forward edge is a *step edge*: microbatch 0 only.

        stage 0 ──x──> 1             x used by 1 and 3:   forward  0->1, 0->3
              └──x────────────> 3                         backward 3->1, 1->0

Everything of one (source, destination) pair travels in one message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from outsize.ir.graph import ModelGraph

Edge = tuple[int, int]


@final
@dataclass(frozen=True, slots=True)
class Flow:
    """Describes a value or shared parameter: made by unit `producer`, used by the later `consumers`
    (ascending).

    `gradient`: the backward sends a gradient. `step`: it is constant during a step (a parameter).
    """

    size_bytes: int
    producer: int
    consumers: tuple[int, ...]
    gradient: bool
    step: bool


@final
@dataclass(frozen=True, slots=True)
class Edges:
    """Holds bytes per (source stage, destination stage), per microbatch; `step` once per step."""

    forward: Mapping[Edge, int]
    backward: Mapping[Edge, int]
    step: Mapping[Edge, int]


def flows(graph: ModelGraph) -> tuple[Flow, ...]:
    """Returns all values of the graph, then all parameters that more than one unit uses."""
    values = (
        Flow(v.size_bytes, v.producer, _later(v.producer, v.consumers), v.requires_grad, step=False)
        for v in graph.values
    )
    return tuple(f for f in (*values, *_shared_parameters(graph)) if f.consumers)


def edges_between(graph: ModelGraph, bounds: Sequence[int]) -> Edges:
    """Returns the edges between stages; `bounds` is the first unit of each stage, then the number
    of units.
    """
    return edges_of(flows(graph), bounds)


def edges_of(all_flows: Iterable[Flow], bounds: Sequence[int]) -> Edges:
    """Returns the same edges from the graph's `flows`."""
    return edges_among(all_flows, lambda unit: bisect_right(bounds, unit) - 1)


def edges_among(all_flows: Iterable[Flow], stage_of: Callable[[int], int]) -> Edges:
    """Returns the same edges where stages are not runs of units (ir/stage_graph.py): `stage_of(unit)`."""
    forward: dict[Edge, int] = defaultdict(int)
    backward: dict[Edge, int] = defaultdict(int)
    step: dict[Edge, int] = defaultdict(int)
    for flow in all_flows:
        if flow.step and not flow.gradient:
            # A frozen tied weight never changes: every stage that uses it has its own copy.
            continue
        owner, *users = sorted({stage_of(unit) for unit in (flow.producer, *flow.consumers)})
        for user in users:
            (step if flow.step else forward)[owner, user] += flow.size_bytes
        for earlier, later in pairwise([owner, *users]):
            if flow.gradient:
                backward[later, earlier] += flow.size_bytes
    return Edges(_sorted(forward), _sorted(backward), _sorted(step))


def _shared_parameters(graph: ModelGraph) -> list[Flow]:
    users: dict[str, list[int]] = defaultdict(list)
    for unit in graph.units:
        for name in unit.parameters:
            users[graph.parameter_of[name].name].append(unit.index)
    return [
        Flow(p.size_bytes, users[p.name][0], _later(users[p.name][0], users[p.name]), p.trainable, step=True)
        for p in graph.parameters
        if p.name in users
    ]


def _later(producer: int, units: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({u for u in units if u > producer}))


def _sorted(edges: Mapping[Edge, int]) -> dict[Edge, int]:
    return dict(sorted(edges.items()))
