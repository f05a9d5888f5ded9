"""Problem: units are on ranks; which stages are they to be, so that no rank waits where it could work?

A stage runs as a whole once it has all its inputs. So a unit that waits for another rank, and those that wait
for it, are another stage than what the rank can do before:

    level(u) = max over what u needs of level(v) + (v is on another rank)        stage = (level, rank)
               at least that of who uses before u what both have a gradient for (ir/quotient.py)

    tower a on rank 0 (level 0)  ─┐
    tower b on rank 1 (level 0)  ─┴─ head on rank 1 (level 1)      three stages on two ranks

As one stage with the head, tower b would wait for tower a in the forward, and tower a for tower b in the
backward. Levels ascend along values, so the stages form a DAG; in a chain they are runs. Who shares a rank
with whom is tried: the runs of a plan, the balanced stages of branches.py, and whole branches: units that
hang on the same beginnings and the same ends of the graph; of these one may be cut in two, so that three
equal towers keep two ranks busy. Complexity: O(units + edges). Oracle:
tests/unit/planner/test_branched.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Final, final

import numpy as np

from outsize.errors import BadPlan
from outsize.ir.graph import ModelGraph
from outsize.ir.quotient import check_quotient, summed
from outsize.planner.seconds import Seconds

# Branches with less of all work go where their neighbours go; of more branches, or more ways, none is tried.
SMALL: Final = 0.02
MOST_BRANCHES: Final = 8
MOST_WAYS: Final = 512
MOST_CUTS: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Placed:
    """The stage of each unit, and the rank of each stage."""

    owners: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def units(self) -> list[list[int]]:
        """Of each stage, ascending."""
        found: list[list[int]] = [[] for _ in self.ranks]
        for unit, stage in enumerate(self.owners):
            found[stage].append(unit)
        return found


def stages_of(graph: ModelGraph, ranks: Sequence[int], *, apart: bool = False) -> Placed | None:
    """The stages of units on these ranks, or None where sums of gradients forbid them (ir/quotient.py).

    `apart`: what is on one rank and level and does not hang together is more than one stage.
    """
    before, first_users = _needed(graph), [list[int]() for _ in ranks]
    for _, users in summed(graph):
        for earlier, later in pairwise(users):
            first_users[later].append(earlier)
    levels = [0] * len(ranks)
    for unit, rank in enumerate(ranks):
        needed = (levels[v] + (ranks[v] != rank) for v in before[unit])
        levels[unit] = max((*needed, *(levels[v] for v in first_users[unit])), default=0)
    pieces = _pieces(before, list(zip(levels, ranks, strict=True))) if apart else [0] * len(ranks)
    places = list(zip(levels, ranks, pieces, strict=True))
    first: dict[tuple[int, int, int], int] = {}
    for unit, place in enumerate(places):
        first.setdefault(place, unit)
    order = sorted(first, key=lambda place: (place[0], first[place]))
    number = {place: stage for stage, place in enumerate(order)}
    owners = tuple(number[place] for place in places)
    try:
        check_quotient(graph, owners)
    except BadPlan:
        return None
    return Placed(owners, tuple(rank for _, rank, _ in order))


def _pieces(before: Sequence[Sequence[int]], places: Sequence[tuple[int, int]]) -> list[int]:
    """Of each unit the first one that hangs together with it in its place."""
    found = list(range(len(places)))

    def piece(unit: int) -> int:
        while found[unit] != unit:
            found[unit] = unit = found[found[unit]]
        return unit

    for unit, needed in enumerate(before):
        for v in needed:
            if places[v] == places[unit]:
                low, high = sorted((piece(v), piece(unit)))
                found[high] = low
    return list(map(piece, range(len(places))))


def by_branches(graph: ModelGraph, seconds: Seconds, ranks: int) -> Iterator[tuple[int, ...]]:
    """Whole branches on ranks, in every way; nothing where there is only one, or there are too many."""
    of = _small_ones_away(graph, _branch_of(graph), seconds)
    count = max(of, default=0) + 1
    if count < 2 or count > MOST_BRANCHES or ranks ** (count - 1) > MOST_WAYS:
        return
    for rest in product(range(ranks), repeat=count - 1):
        yield tuple((0, *rest)[branch] for branch in of)
    if ranks > 1 and 2 * count * ranks ** (count - 1) <= MOST_CUTS:
        yield from _one_in_two(of, seconds, ranks)


def _one_in_two(of: Sequence[int], seconds: Seconds, ranks: int) -> Iterator[tuple[int, ...]]:
    """Whole branches but one, whose halves are on the two ranks with least to do, for as much on both."""
    count = max(of) + 1
    units = [[unit for unit, branch in enumerate(of) if branch == own] for own in range(count)]
    work = [float(seconds[own].sum()) for own in units]
    for cut, rest in product(range(count), product(range(ranks), repeat=count - 1)):
        places = [*rest[:cut], -1, *rest[cut:]]
        loads = [sum(w for w, at in zip(work, places, strict=True) if at == rank) for rank in range(ranks)]
        least = sorted(range(ranks), key=loads.__getitem__)[:2]
        for first, second in (least, least[::-1]):
            share_s = (loads[second] - loads[first] + work[cut]) / 2
            done_s = np.cumsum(seconds[units[cut]]) - seconds[units[cut]] / 2
            early = {unit for unit, at_s in zip(units[cut], done_s, strict=True) if at_s < share_s}
            yield tuple(
                (first if unit in early else second) if branch == cut else places[branch]
                for unit, branch in enumerate(of)
            )


def _needed(graph: ModelGraph) -> list[list[int]]:
    """The units that make something for each unit."""
    found: list[list[int]] = [[] for _ in graph.units]
    for value in graph.values:
        for user in value.consumers:
            found[user].append(value.producer)
    return found


def _branch_of(graph: ModelGraph) -> list[int]:
    """Units with the same beginnings and ends are one branch."""
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


def _small_ones_away(graph: ModelGraph, of: Sequence[int], seconds: Seconds) -> list[int]:
    """A branch of little work joins that of a unit that uses it, or else that makes something for it."""
    total, work = float(seconds.sum()), dict.fromkeys(of, 0.0)
    for unit, branch in enumerate(of):
        work[branch] += float(seconds[unit])
    large = {branch for branch, its in work.items() if its >= SMALL * total}
    found = [branch if branch in large else -1 for branch in of]
    for value in reversed(graph.values):
        if found[value.producer] < 0:
            found[value.producer] = found[value.consumers[0]]
    for value in graph.values:
        for user in value.consumers:
            if found[user] < 0:
                found[user] = found[value.producer]
    names = {branch: number for number, branch in enumerate(dict.fromkeys(b for b in found if b >= 0))}
    return [names.get(branch, 0) for branch in found]
