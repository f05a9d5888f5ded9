"""Defines a DAG of units with a weight each, and the edges between them; sets of units are bit masks.

A split of a DAG into k stages gives each unit a stage so that no edge goes back: stage(u) <= stage(v) for
every edge u -> v. That is the same as "every stage is convex and the stages form no cycle", and the same
as a chain of *downsets* (sets that contain the predecessors of their members)

    {} = D_0 <= D_1 <= ... <= D_k = everything        stage s = D_s minus D_{s-1}

Two reductions change no optimum of the problem "least weight of the heaviest stage":

1. A unit of weight 0 is dropped and its predecessors joined to its successors. Proof: a split of the other
   units becomes one of the whole by giving the unit the latest stage among its predecessors (the first
   stage when it has none): every successor is no earlier, because it is joined to that predecessor, and no
   stage gets heavier. Conversely a split of the whole, without the unit, is one of the other units: the
   joined edges follow from transitivity.
2. If no stage may weigh more than T, D_s contains every unit whose followers (itself included)
   weigh more than (k - s) T, because they are on the k - s later stages otherwise; and no unit whose
   ancestors (itself included) weigh more than s T. `forced` returns the two downsets that enclose D_s.

Contracting two units in series is not among them: it forbids the cut between them, which the optimum may
need. Complexity: O(n e / 64) for the closures. Oracle: tests/unit/planner/dag/test_dag_partition.py tries all
splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

from outsize.errors import BadOption

Units = int
"""Is a set of units: bit u is unit u."""


@final
@dataclass(frozen=True)
class Dag:
    """Holds `weights[u]` of unit u (whole ticks, at least 0) and the sets of its direct neighbours."""

    weights: tuple[int, ...]
    before: tuple[Units, ...]
    after: tuple[Units, ...]

    @classmethod
    def of(cls, weights: Sequence[int], edges: Iterable[tuple[int, int]]) -> Self:
        """Builds a graph from pairs (earlier unit, later unit); raises BadOption for a cycle or a negative
        weight.
        """
        before, after = [0] * len(weights), [0] * len(weights)
        for source, destination in edges:
            before[destination] |= 1 << source
            after[source] |= 1 << destination
        dag = cls(tuple(weights), tuple(before), tuple(after))
        if min(weights, default=0) < 0:
            raise BadOption("a unit cannot take less than no time", numbers=f"{min(weights)} ticks")
        if len(dag.order) < len(weights):
            stuck = len(weights) - len(dag.order)
            raise BadOption("the graph has a cycle", numbers=f"{stuck} units wait for each other")
        return dag

    @property
    def everything(self) -> Units:
        """Returns the set of all units."""
        return (1 << len(self.weights)) - 1

    @cached_property
    def total(self) -> int:
        """Returns the weight of all units."""
        return sum(self.weights)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Returns a topological order, branch after branch: of the ready units the one readied last comes
        first.
        """
        waiting = [mask.bit_count() for mask in self.before]
        ready = [u for u in reversed(range(len(waiting))) if not waiting[u]]
        order: list[int] = []
        while ready:
            order.append(ready.pop())
            for follower in reversed(list(members(self.after[order[-1]]))):
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)
        return tuple(order)

    @cached_property
    def ancestors(self) -> tuple[Units, ...]:
        """Returns all units before each one, itself included."""
        return _closure(self.before, self.order)

    @cached_property
    def followers(self) -> tuple[Units, ...]:
        """Returns all units after each one, itself included."""
        return _closure(self.after, self.order[::-1])

    def weight(self, units: Units) -> int:
        """Returns the weight of a set."""
        return sum(self.weights[u] for u in members(units))

    def forced(self, stages: int, limit: int) -> tuple[list[Units], list[Units]]:
        """Returns for s in 0..stages what D_s contains at least and at most when no stage is above
        `limit`.
        """
        above = [self.weight(mask) for mask in self.ancestors]
        below = [self.weight(mask) for mask in self.followers]
        units = range(len(self.weights))
        least = [_mask(u for u in units if below[u] > (stages - s) * limit) for s in range(stages + 1)]
        most = [_mask(u for u in units if above[u] <= s * limit) for s in range(stages + 1)]
        least[stages], most[0] = self.everything, 0
        return least, most

    def without_weightless(self, crossing: Sequence[int] = ()) -> tuple[Dag, tuple[int, ...]]:
        """Returns the graph of the units that have a weight, and which units they are (reduction 1).

        Where something crosses boundaries only sources that send nothing are dropped, because their
        successors need no other edge instead.
        """
        keep = [bool(weight) for weight in self.weights]
        if crossing:
            keep = [k or bool(self.before[u] or crossing[u]) for u, k in enumerate(keep)]
        remaining = tuple(u for u, needed in enumerate(keep) if needed)
        place = {u: i for i, u in enumerate(remaining)}
        sources: dict[int, Units] = {}
        for u in self.order:
            joined = 0
            for earlier in members(self.before[u]):
                joined |= 1 << earlier if earlier in place else sources[earlier]
            sources[u] = joined
        edges = ((place[a], place[u]) for u in remaining for a in members(sources[u]))
        return Dag.of([self.weights[u] for u in remaining], edges), remaining


def members(units: Units) -> Iterator[int]:
    """Yields the units of a set, ascending."""
    while units:
        lowest = units & -units
        yield lowest.bit_length() - 1
        units ^= lowest


def _closure(direct: Sequence[Units], order: Sequence[int]) -> tuple[Units, ...]:
    reach = [0] * len(direct)
    for u in order:
        reach[u] = 1 << u
        for neighbour in members(direct[u]):
            reach[u] |= reach[neighbour]
    return tuple(reach)


def _mask(units: Iterable[int]) -> Units:
    mask = 0
    for u in units:
        mask |= 1 << u
    return mask
