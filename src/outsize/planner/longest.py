"""Problem: the seconds of a step, for very many cuts of one schedule, without the spans of each.

Which action waits for which is the schedule's alone, so the simulator's network of events (simulate.py) is
written down once: compute actions wait for the one before on their rank and for the messages that are
received for them, transfers for their send, their receive and the one before on their wire. For a cut only
the durations differ, and the step is the longest path: each node starts when the last it waits for has
ended.

The same maxima and sums as in the simulator, so the same seconds, bit by bit. A critical path (Kelley 1961)
in topological order, by graphlib. Complexity: O(actions), after O(actions) once. Oracle:
tests/unit/planner/test_longest.py compares with `simulate` for all schedules, skips and tied weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Self, final

from outsize.ir.schedule import COMPUTE, TRANSFER, Action, Kind, Schedule
from outsize.schedules.message import RECEIVES, Ends, Message, message_of

Cost = tuple[Kind, int, int]
"""(kind, stage, -1) of a compute action; (F or B, source, destination) of a transfer."""


@final
@dataclass(frozen=True, slots=True)
class Network:
    """Nodes in an order in which each comes after those it waits for."""

    costs: tuple[Cost, ...]
    waits: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, lowered: Schedule) -> Self:
        """The network of a schedule with its transfers; graphlib.CycleError when it hangs."""
        waits = _waits(lowered)
        order = tuple(TopologicalSorter(waits).static_order())
        place = {node: at for at, node in enumerate(order)}
        return cls(
            tuple(map(_cost, order)), tuple(tuple(place[before] for before in waits[n]) for n in order)
        )

    def step_s(self, seconds: Mapping[Cost, float]) -> float:
        """When the last node ends."""
        ends: list[float] = []
        for cost, waits in zip(self.costs, self.waits, strict=True):
            start = 0.0
            for before in waits:
                if ends[before] > start:
                    start = ends[before]
            ends.append(start + seconds[cost])
        return max(ends, default=0.0)


Node = Action | Message


def _waits(lowered: Schedule) -> Mapping[Node, Sequence[Node]]:
    """Node -> what it waits for."""
    waits: defaultdict[Node, list[Node]] = defaultdict(list)
    rank_of, ends = lowered.rank_of, Ends(lowered)
    wires: defaultdict[tuple[int, int, Kind], list[Node]] = defaultdict(list)
    for rank, row in enumerate(lowered.actions):
        last: list[Node] = []
        for action in row:
            node = message_of(action) if action.kind in TRANSFER else action
            waits[node] += last
            if action.kind in COMPUTE:
                last = [action]
            elif isinstance(node, Message) and action.kind in RECEIVES:
                waits[ends.consumer(node)].append(node)
            elif isinstance(node, Message):
                wire = wires[rank, rank_of[node.destination], node.kind]
                waits[node] += wire
                wire[:] = [node]
    return waits


def _cost(node: Node) -> Cost:
    if isinstance(node, Message):
        return node.kind, node.source, node.destination
    return node.kind, node.stage, -1
