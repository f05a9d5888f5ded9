"""Problem: units are on ranks; which stages do they form, so that no rank waits where it could compute?

A stage runs as a whole once it has all its inputs. So a unit that waits for another rank, and those that
depend on it, are in another stage than what the rank can do before:

    level(u) = max over what u needs of level(v) + (v is on another rank)        stage = (level, rank)
               at least that of a unit that uses before u what both have a gradient for (ir/stage_graph.py)

    tower a on rank 0 (level 0)  ─┐
    tower b on rank 1 (level 0)  ─┴─ head on rank 1 (level 1)      three stages on two ranks

As one stage with the head, tower b would wait for tower a in the forward, and tower a for tower b in the
backward. Levels ascend along values, so the stages form a DAG; in a chain they are runs. Several assignments
of units to ranks are tried: the runs of a plan, the balanced stages of balance_gain.py, and whole branches:
units with the same beginnings and the same ends of the graph. One of the branches may be cut in two, so that
three equal towers keep two ranks busy. Complexity: O(units + edges). Oracle:
tests/unit/planner/strategies/test_parallel_branches.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Final, final

import numpy as np

from outsize.ir.graph import ModelGraph
from outsize.ir.stage_graph import summed
from outsize.planner.costs.unit_times import Seconds

# Branches below this share of all work join their neighbours; with more branches or assignments none is
# tried.
SMALL: Final = 0.02
MOST_BRANCHES: Final = 8
MOST_WAYS: Final = 512
MOST_CUTS: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Placed:
    """Holds the stage of each unit, and the rank of each stage."""

    owners: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def units(self) -> list[list[int]]:
        """Returns the units of each stage, ascending."""
        units: list[list[int]] = [[] for _ in self.ranks]
        for unit, stage in enumerate(self.owners):
            units[stage].append(unit)
        return units


@final
class StageLevels:
    """Knows which units of a model wait for which, since many placements of one model are tried."""

    def __init__(self, graph: ModelGraph) -> None:
        self._before, self._first_users = _needed(graph), [list[int]() for _ in graph.units]
        ascending = [(v.producer, user) for v in graph.values for user in v.consumers]
        for _, users in summed(graph):
            for earlier, later in pairwise(users):
                self._first_users[later].append(earlier)
                ascending.append((earlier, later))
        self._ascending = np.array(ascending, np.int64).reshape(-1, 2).T

    def stages(self, ranks: Sequence[int], *, apart: bool = False) -> Placed | None:
        """Returns the stages of units on these ranks, or None where sums of gradients forbid them
        (ir/stage_graph.py).

        `apart`: unconnected units on one rank and level form more than one stage.
        """
        levels = self._levels(ranks)
        pieces = _pieces(self._before, list(zip(levels, ranks, strict=True))) if apart else [0] * len(ranks)
        places = list(zip(levels, ranks, pieces, strict=True))
        first: dict[tuple[int, int, int], int] = {}
        for unit, place in enumerate(places):
            first.setdefault(place, unit)
        order = sorted(first, key=lambda place: (place[0], first[place]))
        number = {place: stage for stage, place in enumerate(order)}
        owners = tuple(number[place] for place in places)
        earlier, later = np.array(owners)[self._ascending]
        return None if np.any(later < earlier) else Placed(owners, tuple(rank for _, rank, _ in order))

    def _levels(self, ranks: Sequence[int]) -> list[int]:
        """Returns how often what leads to each unit changes its rank."""
        levels = [0] * len(ranks)
        for unit, rank in enumerate(ranks):
            level = 0
            for v in self._before[unit]:
                level = max(level, levels[v] + (ranks[v] != rank))
            for v in self._first_users[unit]:
                level = max(level, levels[v])
            levels[unit] = level
        return levels


def _pieces(before: Sequence[Sequence[int]], places: Sequence[tuple[int, int]]) -> list[int]:
    """Returns for each unit the first one that is connected to it in its place."""
    parent = list(range(len(places)))

    def piece(unit: int) -> int:
        while parent[unit] != unit:
            parent[unit] = unit = parent[parent[unit]]
        return unit

    for unit, needed in enumerate(before):
        for v in needed:
            if places[v] == places[unit]:
                low, high = sorted((piece(v), piece(unit)))
                parent[high] = low
    return list(map(piece, range(len(places))))


def by_branches(graph: ModelGraph, seconds: Seconds, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yields assignments of whole branches to ranks; none where there is only one branch, or there are too
    many.
    """
    branch_of = _small_ones_away(graph, _branch_of(graph), seconds)
    count = max(branch_of, default=0) + 1
    if count < 2 or count > MOST_BRANCHES or ranks ** (count - 1) > MOST_WAYS:
        return
    for other_ranks in product(range(ranks), repeat=count - 1):
        yield tuple((0, *other_ranks)[branch] for branch in branch_of)
    if ranks > 1 and 2 * count * ranks ** (count - 1) <= MOST_CUTS:
        yield from _one_in_two(branch_of, seconds, ranks)


def _one_in_two(branch_of: Sequence[int], seconds: Seconds, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yields assignments of whole branches but one, which is divided to balance the two ranks with the least
    work.
    """
    count = max(branch_of) + 1
    units = [[unit for unit, branch in enumerate(branch_of) if branch == own] for own in range(count)]
    work = [float(seconds[own].sum()) for own in units]
    for cut, other_ranks in product(range(count), product(range(ranks), repeat=count - 1)):
        places = [*other_ranks[:cut], -1, *other_ranks[cut:]]
        loads = [sum(w for w, at in zip(work, places, strict=True) if at == rank) for rank in range(ranks)]
        least = sorted(range(ranks), key=loads.__getitem__)[:2]
        for first, second in (least, least[::-1]):
            share_s = (loads[second] - loads[first] + work[cut]) / 2
            done_s = np.cumsum(seconds[units[cut]]) - seconds[units[cut]] / 2
            early = {unit for unit, at_s in zip(units[cut], done_s, strict=True) if at_s < share_s}
            yield tuple(
                (first if unit in early else second) if branch == cut else places[branch]
                for unit, branch in enumerate(branch_of)
            )


def _needed(graph: ModelGraph) -> list[list[int]]:
    """Returns the units that make something for each unit."""
    producers: list[list[int]] = [[] for _ in graph.units]
    for value in graph.values:
        for user in value.consumers:
            producers[user].append(value.producer)
    return producers


def _branch_of(graph: ModelGraph) -> list[int]:
    """Numbers branches: units with the same beginnings and ends are one branch."""
    before, n = _needed(graph), len(graph.units)
    starts, ends = [0] * n, [0] * n
    used = {v for needed in before for v in needed}
    for unit in range(n):
        for v in before[unit]:
            starts[unit] |= starts[v]
        starts[unit] = starts[unit] or 1 << unit
    for unit in reversed(range(n)):
        ends[unit] = ends[unit] if unit in used else 1 << unit
        for v in before[unit]:
            ends[v] |= ends[unit]
    numbers: dict[tuple[int, int], int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in zip(starts, ends, strict=True)]


def _small_ones_away(graph: ModelGraph, branch_of: Sequence[int], seconds: Seconds) -> list[int]:
    """Joins a branch of little work with that of a unit that uses it, or otherwise that makes something for
    it.
    """
    total, work = float(seconds.sum()), dict.fromkeys(branch_of, 0.0)
    for unit, branch in enumerate(branch_of):
        work[branch] += float(seconds[unit])
    large = {branch for branch, branch_s in work.items() if branch_s >= SMALL * total}
    joined = [branch if branch in large else -1 for branch in branch_of]
    for value in reversed(graph.values):
        if joined[value.producer] < 0:
            joined[value.producer] = joined[value.consumers[0]]
    for value in graph.values:
        for user in value.consumers:
            if joined[user] < 0:
                joined[user] = joined[value.producer]
    names = {branch: number for number, branch in enumerate(dict.fromkeys(b for b in joined if b >= 0))}
    return [names.get(branch, 0) for branch in joined]
