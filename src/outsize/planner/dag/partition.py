"""Problem: split a DAG into at most k stages so that the heaviest stage is as light as possible, exactly.

    minimise T   with   weight(D_s - D_{s-1}) <= T   and   crossing(D_s) <= T     for all s

over chains of downsets {} = D_0 <= ... <= D_k = everything (dag.py). `crossing(D)` is what leaves D and may
be empty. This is the bottleneck of PipeDream (arXiv 1806.03377, sec. 3.1): the slowest stage or the slowest
boundary, which transfers while stages compute; an edge that skips stages passes, and is counted at, every
boundary on its path. Symbols: T -> limit, k -> stages, D_s -> a downset of lattice s.

    D_s can be reached with T  iff  weight(D_s) - max over reachable D_{s-1} inside D_s of its weight <= T

ideals.py passes the maximum along, so one T costs O(k N w) for N downsets; T is whole ticks and found by
bisection between max(heaviest unit, ceil(total / k)) and the best split of a topological order. `Dag.forced`
encloses each D_s between two downsets: only those between them are listed. Of D_s and the enclosure of
D_{s-1} only the intersection can matter, and it is again a downset of that lattice.

Where the lattices are larger than `most_downsets`, only the downsets near the best split so far are listed,
nearer ones first: an upper bound that is optimal when it meets the lower bound. Otherwise the answer says how
far they are apart (`DagPartition.gap`).
Oracle: tests/unit/planner/dag/test_dag_partition.py (all splits of small graphs, HiGHS to 40 units).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np

from outsize.errors import BadOption
from outsize.planner.dag.dag import Dag, Units, members
from outsize.planner.dag.ideals import NOTHING, Lattice, Ticks, between
from outsize.planner.dag.local_search import random_split

MOST_DOWNSETS = 400_000
WIDTHS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
RANDOM_LIMITS = 6


@final
@dataclass(frozen=True)
class DagPartition:
    """Holds stages in order, as sets of units; none is better than `bound`, and `downsets` were listed."""

    stages: tuple[Units, ...]
    ticks: int
    bound: int
    downsets: int

    @property
    def gap(self) -> float:
        """Returns the relative distance to the bound: 0 is a proof that the split is optimal."""
        return self.ticks / self.bound - 1 if self.ticks > self.bound else 0.0


@final
@dataclass(frozen=True, eq=False)
class _PartitionProblem:
    """Holds the reduced graph, what its units send, and how many downsets may be listed at once."""

    dag: Dag
    crossing: tuple[int, ...]
    stages: int
    limit: int

    def lattices(self, structure: Dag, least: Sequence[Units], most: Sequence[Units]) -> list[Lattice] | None:
        """Returns one lattice for each boundary, 0 to k; None when they are larger than the limit
        together.
        """
        lattices: list[Lattice] = []
        room = self.limit
        for low, high in zip(least, most, strict=True):
            lattice = between(structure, self.dag, self.crossing, low, high, room)
            if lattice is None:
                return None
            room -= len(lattice.downsets)
            lattices.append(lattice)
        return lattices


def split_dag(
    dag: Dag, stages: int, crossing: Sequence[int] = (), most_downsets: int = MOST_DOWNSETS
) -> DagPartition:
    """Returns the best split into at most `stages`; into exactly as many when nothing crosses and units
    suffice.

    `crossing[u]` are the ticks that the output of unit u takes on a boundary (both directions). Raises
    BadOption for less than one stage.
    """
    if stages < 1:
        raise BadOption(f"{stages} stages cannot hold a graph", next_step="--stages 1")
    # A unit without weight whose output nobody uses may be dropped; with crossings only one without inputs.
    small, remaining = dag.without_weightless(crossing)
    search = _PartitionProblem(
        small, tuple(crossing[u] for u in remaining) if crossing else (), stages, most_downsets
    )
    chain, bound, listed = _best_chain(search)
    chain, proved, more = _improve(search, chain, bound)
    groups = _expand(dag, remaining, chain)
    groups = groups if crossing else _filled(dag, groups)
    ticks = max(_ticks(search, chain), 0)
    return DagPartition(tuple(groups), ticks, ticks if proved else bound, listed + more)


def lower_bound(dag: Dag, stages: int) -> int:
    """Returns the heaviest unit or the mean of the stages, whichever is larger."""
    return max(max(dag.weights, default=0), -(-dag.total // stages))


def _best_chain(search: _PartitionProblem) -> tuple[list[Units], int, int]:
    """Returns the best split of a topological order, the lower bound, and how many downsets were listed."""
    dag, k = search.dag, search.stages
    line = Dag.of(dag.weights, pairwise(dag.order))
    lattices = _PartitionProblem(dag, search.crossing, k, (k + 1) * (len(dag.weights) + 1)).lattices(
        line, [0] * k + [dag.everything], [0] + [dag.everything] * k
    )
    assert lattices is not None, "a line has one downset more than units"
    bound = lower_bound(dag, k)
    chain = _least(lattices, bound, max(dag.total, bound))
    assert chain is not None, "all in one stage is a split"
    return chain, bound, sum(len(x.downsets) for x in lattices)


def _improve(search: _PartitionProblem, chain: list[Units], bound: int) -> tuple[list[Units], bool, int]:
    """Improves the split until it is proved optimal or nothing more can be listed; returns how many were
    listed.
    """
    chain, proved, listed = _exact(search, chain, bound)
    if proved:
        return chain, True, listed
    chain = _by_random_splits(search, chain, bound)
    for width in WIDTHS:
        if _ticks(search, chain) <= bound:
            return chain, True, listed
        lattices = _lattices_near(search, chain, width)
        if lattices is None:
            break
        listed += sum(len(x.downsets) for x in lattices)
        chain = _least(lattices, bound, _ticks(search, chain) - 1) or chain
    chain, proved, more = _exact(search, chain, bound)
    return chain, proved, listed + more


def _exact(search: _PartitionProblem, chain: list[Units], bound: int) -> tuple[list[Units], bool, int]:
    """Returns the best of all splits and True, or the present one and False when its lattices are
    too large.
    """
    ticks = _ticks(search, chain)
    if ticks <= bound:
        return chain, True, 0
    least, most = search.dag.forced(search.stages, ticks - 1)
    if any(low & ~high for low, high in zip(least, most, strict=True)):
        return chain, True, 0
    lattices = search.lattices(search.dag, least, most)
    if lattices is None:
        return chain, False, 0
    return _least(lattices, bound, ticks - 1) or chain, True, sum(len(x.downsets) for x in lattices)


def _by_random_splits(search: _PartitionProblem, chain: list[Units], bound: int) -> list[Units]:
    """Tries the bound itself first, then limits between it and the present split."""
    limit = bound
    for _ in range(RANDOM_LIMITS):
        split = random_split(search.dag, search.crossing, search.stages, limit)
        if split is not None:
            return split if _ticks(search, split) < _ticks(search, chain) else chain
        limit += (_ticks(search, chain) - limit) // 8
    return chain


def _lattices_near(search: _PartitionProblem, chain: Sequence[Units], width: int) -> list[Lattice] | None:
    least, most = search.dag.forced(search.stages, _ticks(search, chain) - 1)
    if any(low & ~high for low, high in zip(least, most, strict=True)):
        return None
    return search.lattices(search.dag, *_near(search.dag, chain, least, most, width))


def _near(
    dag: Dag, chain: Sequence[Units], least: Sequence[Units], most: Sequence[Units], width: int
) -> tuple[list[Units], list[Units]]:
    """Returns what is forced, and all but `width` units on both sides of each boundary of the
    present split.
    """
    ordered = [u for low, high in pairwise(chain) for u in dag.order if (high & ~low) >> u & 1]
    prefix = [0]
    for unit in ordered:
        prefix.append(prefix[-1] | 1 << unit)
    sizes = [downset.bit_count() for downset in chain]
    lows = [
        prefix[max(size - width, 0)] & high | low for size, low, high in zip(sizes, least, most, strict=True)
    ]
    tops = [prefix[min(size + width, len(ordered))] for size in sizes]
    highs = [(top | low) & high for top, low, high in zip(tops, least, most, strict=True)]
    return lows, highs


def _least(lattices: Sequence[Lattice], low: int, high: int) -> list[Units] | None:
    """Returns the chain of downsets with the least limit from `low` to `high`; None when `high` is
    too small.
    """
    inside = [_projected(a, b) for a, b in pairwise(lattices)]
    best = _reach(lattices, inside, low)
    if best is not None:
        return best
    best = _reach(lattices, inside, high)
    while best is not None and low + 1 < high:
        middle = (low + high) // 2
        chain = _reach(lattices, inside, middle)
        low, high, best = (low, middle, chain) if chain is not None else (middle, high, best)
    return best


def _projected(earlier: Lattice, later: Lattice) -> Ticks:
    """Returns for each later downset the index of the largest earlier one inside it."""
    most = earlier.downsets[-1]
    return np.array([earlier.index[d & most] for d in later.downsets], np.int64)


def _reach(lattices: Sequence[Lattice], inside: Sequence[Ticks], limit: int) -> list[Units] | None:
    """Returns a chain of downsets with no stage and no boundary above the limit."""
    owns = [lattices[0].weight]
    bests = [lattices[0].best_inside(owns[0])]
    last = len(lattices) - 1
    for s in range(1, last + 1):
        before, lattice = bests[-1][inside[s - 1]], lattices[s]
        fine = (before > NOTHING) & (lattice.weight - before <= limit)
        if s < last:
            fine &= lattice.crossing <= limit
        owns.append(np.where(fine, lattice.weight, NOTHING))
        if not fine.any():
            return None
        bests.append(lattice.best_inside(owns[-1]))
    return list(_trace(lattices, owns, bests))[::-1]


def _trace(lattices: Sequence[Lattice], owns: Sequence[Ticks], bests: Sequence[Ticks]) -> Iterator[Units]:
    downset = lattices[-1].downsets[-1]
    for lattice, own, best in zip(reversed(lattices), reversed(owns), reversed(bests), strict=True):
        downset = lattice.witness(downset & lattice.downsets[-1], best, own)
        yield downset


def _ticks(search: _PartitionProblem, chain: Sequence[Units]) -> int:
    """Returns the slowest stage or boundary."""
    stages = [search.dag.weight(high & ~low) for low, high in pairwise(chain)]
    after, out = search.dag.after, search.crossing
    cuts = [sum(out[u] for u in members(d) if after[u] & ~d) for d in chain[1:-1]] if out else []
    return max([*stages, *cuts])


def _expand(dag: Dag, remaining: Sequence[int], chain: Sequence[Units]) -> list[Units]:
    """Returns the stages of the whole graph: a dropped unit goes to the latest stage among its
    predecessors.
    """
    stage_of: dict[int, int] = {}
    for s, (low, high) in enumerate(pairwise(chain)):
        stage_of.update(dict.fromkeys((remaining[u] for u in members(high & ~low)), s))
    for u in dag.order:
        if u not in stage_of:
            stage_of[u] = max((stage_of[p] for p in members(dag.before[u])), default=0)
    groups = [0] * (len(chain) - 1)
    for u, s in stage_of.items():
        groups[s] |= 1 << u
    return groups


def _filled(dag: Dag, groups: list[Units]) -> list[Units]:
    """Splits stages until none is empty while units suffice: halving a stage makes none heavier."""
    target = min(len(groups), len(dag.weights))
    groups = [g for g in groups if g]
    while len(groups) < target:
        s = next(i for i, g in enumerate(groups) if g.bit_count() > 1)
        first = next(u for u in dag.order if groups[s] >> u & 1)
        groups[s : s + 1] = [1 << first, groups[s] ^ 1 << first]
    return groups
