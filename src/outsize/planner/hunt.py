"""Hunt: find a split of a DAG under a given limit where its downsets are too many to list.

Problem: D_1 <= D_2 <= ... with no stage above T, one after the other. D_s must weigh at least
total - (k - s) T, for the rest has k - s stages, and at most weight(D_{s-1}) + T.

Method: lay the units behind D_{s-1} in a random topological order, free the `FREE` units on either side
of the place where the weight is right, and list all downsets of those, at most 2^(2 FREE); the heaviest
that is in its window and lets nothing through above T becomes D_s. With many branches their sums are so
dense that a window of one tick is hit after a few orders; where they are not, the hunt fails, which
proves nothing. Same seed, same split. Complexity: k TRIES 4^FREE at worst.
Oracle: tests/unit/planner/test_downsets.py checks what is found and that it meets the lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from outsize.planner.dag import Dag, Units, members
from outsize.planner.lattice import between

FREE = 8
TRIES = 12


def hunt(dag: Dag, crossing: Sequence[int], stages: int, limit: int) -> list[Units] | None:
    """A chain of downsets from nothing to everything with no stage and no boundary above `limit`, or None."""
    least, most = dag.forced(stages, limit)
    if any(low & ~high for low, high in zip(least, most, strict=True)):
        return None
    random = Random(0)
    chain: list[Units] = [0]
    for s in range(1, stages):
        here = _next(dag, crossing, (chain[-1], least[s], most[s]), (stages - s, limit), random)
        if here is None:
            return None
        chain.append(here)
    fits = dag.weight(dag.everything & ~chain[-1]) <= limit
    return [*chain, dag.everything] if fits else None


def _next(
    dag: Dag,
    crossing: Sequence[int],
    walls: tuple[Units, Units, Units],
    task: tuple[int, int],
    random: Random,
) -> Units | None:
    (done, least, most), (left, limit) = walls, task
    start = done | least
    top = dag.weight(done) + limit
    window = max(dag.total - left * limit, 0), top
    for _ in range(TRIES):
        low, high = _around(dag, start, most | start, top, random)
        lattice = between(dag, dag, crossing, low, high, 1 << (2 * FREE))
        assert lattice is not None, "n free units have at most 2^n downsets"
        fine = (lattice.weight >= window[0]) & (lattice.weight <= window[1]) & (lattice.crossing <= limit)
        if fine.any():
            return lattice.downsets[int(np.argmax(np.where(fine, lattice.weight, -1)))]
    return None


def _around(dag: Dag, start: Units, most: Units, top: int, random: Random) -> tuple[Units, Units]:
    """The downsets before and behind the free units, on a random way from `start` up to weight `top`."""
    way, weight = [start], dag.weight(start)
    ready = [u for u in members(most & ~start) if dag.before[u] & ~start == 0]
    beyond = 0
    while ready and beyond < FREE:
        unit = ready.pop(random.randrange(len(ready)))
        way.append(way[-1] | 1 << unit)
        weight += dag.weights[unit]
        beyond += weight > top
        followers = members(dag.after[unit] & most)
        ready += [f for f in followers if dag.before[f] & ~way[-1] == 0]
    return way[max(len(way) - 1 - 2 * FREE, 0)], way[-1]
