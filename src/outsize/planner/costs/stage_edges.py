"""Which bytes cross between stages once the cuts are known, and how long do they take?

When a message is sent, and by which action, is the question of schedules/message.py. The law of what
crosses, the same one that `run/stage/cut.py` follows when it cuts the real tape:

1. A *flow* is something made by one unit and needed by later ones: a value of the graph, or a parameter
   with several users, which its first user owns.
2. Forward, the owner's stage sends a flow directly to every later stage that uses it.
3. Backward, the gradient is threaded: the last using stage sends its part to the using stage
   before it, which adds its own and sends on, down to the owner. One message per using stage.
4. A flow without gradient (`requires_grad` false, a frozen parameter) has no backward edge.
5. A parameter is constant during a step, so its forward edge is a *step edge*: microbatch 0 only.

        stage 0 ──x──> 1             x used by 1 and 3:   forward  0->1, 0->3
              └──x────────────> 3                         backward 3->1, 1->0

Everything of one (source, destination) pair travels in one message, priced by Hockney's model of a link
(`Link.seconds`, ir/hardware/links.py). Complexity: O(users of all flows). Oracles: the run's own edges in
tests/parity/test_edges_agree.py, and tests/unit/planner/costs/test_stage_edges.py by hand.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import numpy as np

from outsize.ir.cluster import Link
from outsize.ir.graph import ModelGraph
from outsize.ir.schedule import Kind, Schedule
from outsize.schedules.lower import lower

Edge = tuple[int, int]
Along = tuple[frozenset[Edge], frozenset[Edge], frozenset[Edge]]
"""Holds the edges that carry values, gradients, and what is sent once a step."""


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

    @property
    def along(self) -> Along:
        """Returns the edges without their bytes."""
        return frozenset(self.forward), frozenset(self.backward), frozenset(self.step)

    def lowered(self, schedule: Schedule) -> Schedule:
        """Returns the compute-only schedule with the transfers of these edges."""
        return lower(schedule, *self.along)

    def message_bytes(self, microbatches: int) -> dict[Kind, Mapping[Edge, int]]:
        """Returns the bytes of a message over each edge, of values and of gradients.

        What crosses once a step travels with the values where some cross, too: there it is spread over the
        step's messages.
        """
        values = dict(self.step)
        for edge, size in self.forward.items():
            values[edge] = size + self.step.get(edge, 0) // microbatches
        return {Kind.F: values, Kind.B: self.backward}

    def message_s(
        self, microbatches: int, link: Callable[[int, int], Link], parts: int = 1
    ) -> dict[tuple[Kind, int, int], float]:
        """Returns the seconds of a message over each edge on `link(source, destination)`, of which each of so
        many ranks that divide its tokens sends a part.
        """
        return {
            (kind, source, destination): link(source, destination).seconds(-(-size // parts))
            for kind, sizes in self.message_bytes(microbatches).items()
            for (source, destination), size in sizes.items()
        }


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


def crossing_bytes(graph: ModelGraph) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns, for each cut 0..n, the bytes of the values that cross it."""
    steps = [0] * (len(graph.units) + 2)
    for value in graph.values:
        if value.consumers:
            steps[value.producer + 1] += value.size_bytes
            steps[value.consumers[-1] + 1] -= value.size_bytes
    return np.array(list(accumulate(steps))[:-1], np.int64)


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
