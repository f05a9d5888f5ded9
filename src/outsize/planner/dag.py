"""Dag: units with a weight each, and the edges between them; sets of units are bit masks.

A split of a DAG into k stages gives each unit a stage so that no edge goes back: stage(u) <= stage(v) for
every edge u -> v. That is the same as "every stage is convex and the stages form no cycle", and the same
as a chain of *downsets* (sets that contain the predecessors of their members)

    {} = D_0 <= D_1 <= ... <= D_k = everything        stage s = D_s minus D_{s-1}

Two reductions change no optimum of the problem "least weight of the heaviest stage":

1. A unit of weight 0 is dropped and its predecessors joined to its successors. Proof: a split of what is
   left becomes one of the whole by giving the unit the latest stage among its predecessors (the first
   stage when it has none): every successor is no earlier, for it is joined to that predecessor, and no
   stage gets heavier. Conversely a split of the whole, without the unit, is one of what is left: the
   joined edges follow from transitivity.
2. Given that no stage may weigh more than T, D_s contains every unit whose followers (itself included)
   weigh more than (k - s) T, for they are on the k - s later stages otherwise; and no unit whose
   ancestors (itself included) weigh more than s T. `forced` returns the two downsets that enclose D_s.

Contracting two units in series is not among them: it forbids the cut between them, which the optimum may
need. Complexity: O(n e / 64) for the closures. Oracle: tests/unit/planner/test_downsets.py tries all splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

from outsize.errors import BadOption

Units = int
"""A set of units: bit u is unit u."""


@final
@dataclass(frozen=True)
class Dag:
    """`weights[u]` of unit u (whole ticks, at least 0) and the sets of its direct neighbours."""

    weights: tuple[int, ...]
    before: tuple[Units, ...]
    after: tuple[Units, ...]

    @classmethod
    def of(cls, weights: Sequence[int], edges: Iterable[tuple[int, int]]) -> Self:
        """A graph from pairs (earlier unit, later unit). BadOption for a cycle or a negative weight."""
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
        """All units."""
        return (1 << len(self.weights)) - 1

    @cached_property
    def total(self) -> int:
        """Weight of all units."""
        return sum(self.weights)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """A topological order, branch after branch: of the ready units the one readied last comes first."""
        waiting = [mask.bit_count() for mask in self.before]
        ready = [u for u in reversed(range(len(waiting))) if not waiting[u]]
        found: list[int] = []
        while ready:
            found.append(ready.pop())
            for follower in reversed(list(members(self.after[found[-1]]))):
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)
        return tuple(found)

    @cached_property
    def ancestors(self) -> tuple[Units, ...]:
        """All units before each one, itself included."""
        return _closure(self.before, self.order)

    @cached_property
    def followers(self) -> tuple[Units, ...]:
        """All units behind each one, itself included."""
        return _closure(self.after, self.order[::-1])

    def weight(self, units: Units) -> int:
        """Sum over a set."""
        return sum(self.weights[u] for u in members(units))

    def is_downset(self, units: Units) -> bool:
        """Whether the predecessors of all members are members."""
        return all(self.before[u] & ~units == 0 for u in members(units))

    def forced(self, stages: int, limit: int) -> tuple[list[Units], list[Units]]:
        """For s in 0..stages what D_s contains at least and at most when no stage is above `limit`."""
        above = [self.weight(mask) for mask in self.ancestors]
        below = [self.weight(mask) for mask in self.followers]
        units = range(len(self.weights))
        least = [_mask(u for u in units if below[u] > (stages - s) * limit) for s in range(stages + 1)]
        most = [_mask(u for u in units if above[u] <= s * limit) for s in range(stages + 1)]
        least[stages], most[0] = self.everything, 0
        return least, most

    def without_weightless(self, crossing: Sequence[int] = ()) -> tuple[Dag, tuple[int, ...]]:
        """The graph of the units that weigh something, and which units they are (reduction 1).

        Where something crosses boundaries only sources go that send nothing: what they were joined to is
        joined to nothing else instead.
        """
        keep = [bool(weight) for weight in self.weights]
        if crossing:
            keep = [k or bool(self.before[u] or crossing[u]) for u, k in enumerate(keep)]
        kept = tuple(u for u, wanted in enumerate(keep) if wanted)
        place = {u: i for i, u in enumerate(kept)}
        sources: dict[int, Units] = {}
        for u in self.order:
            here = 0
            for earlier in members(self.before[u]):
                here |= 1 << earlier if earlier in place else sources[earlier]
            sources[u] = here
        edges = ((place[a], place[u]) for u in kept for a in members(sources[u]))
        return Dag.of([self.weights[u] for u in kept], edges), kept


def members(units: Units) -> Iterator[int]:
    """The units of a set, ascending."""
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
