"""Problem: find a split of a DAG under a given limit where its downsets are too many to list.

It needs D_1 <= D_2 <= ... with no stage above T, one after the other. D_s must weigh at least total - (k - s)
T, because the other units have k - s stages, and at most weight(D_{s-1}) + T.

Method: order the units after D_{s-1} in a random topological order and free the `FREE` units on both sides of
the place where the weight is right. Free units that no edge joins fall into two groups; all downsets of each
are listed, and a pair with the right sum is found by bisection (meet in the middle: Horowitz and Sahni, J.
ACM 21(2), 1974). The heaviest in its window becomes D_s. What crosses a boundary does not add up over groups:
then fewer units are free, in one group. With many branches the sums are so dense that a window of one tick is
hit after a few orders; where they are not, the search fails, which proves nothing.
It is deterministic. Complexity: O(k x TRIES x GROUP). Oracle: tests/unit/planner/dag/test_dag_partition.py
checks the split and that it meets the lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from outsize.planner.dag.dag import Dag, Units, members
from outsize.planner.dag.ideals import between

FREE = 16
FREE_TOGETHER = 8
GROUP = 1 << 15
TRIES = 12


def random_split(dag: Dag, crossing: Sequence[int], stages: int, limit: int) -> list[Units] | None:
    """Returns a chain of downsets from nothing to everything with no stage and no boundary above `limit`, or
    None.
    """
    least, most = dag.forced(stages, limit)
    if any(low & ~high for low, high in zip(least, most, strict=True)):
        return None
    random = Random(0)
    chain: list[Units] = [0]
    for s in range(1, stages):
        downset = _next(dag, crossing, (chain[-1], least[s], most[s]), (stages - s, limit), random)
        if downset is None:
            return None
        chain.append(downset)
    fits = dag.weight(dag.everything & ~chain[-1]) <= limit
    return [*chain, dag.everything] if fits else None


def _next(
    dag: Dag,
    crossing: Sequence[int],
    walls: tuple[Units, Units, Units],
    task: tuple[int, int],
    random: Random,
) -> Units | None:
    (done, least, most), (stages_left, limit) = walls, task
    start = done | least
    top = dag.weight(done) + limit
    window = max(dag.total - stages_left * limit, 0), top
    for free in (FREE, FREE_TOGETHER) * TRIES:
        if crossing and free == FREE:
            continue
        low, high = _around(dag, start, most | start, (top, free), random)
        one, two = (high & ~low, 0) if free == FREE_TOGETHER else _groups(dag, high & ~low)
        downset = _heaviest(dag, crossing, (low, one, two), (window, limit))
        if downset is not None:
            return downset
    return None


def _heaviest(
    dag: Dag, crossing: Sequence[int], parts: tuple[Units, Units, Units], task: tuple[tuple[int, int], int]
) -> Units | None:
    """Returns the heaviest downset with weight in the window: the first part, and some of the other two."""
    (low, one, two), ((least, top), limit) = parts, task
    first = between(dag, dag, crossing, low, low | one, GROUP << 1)
    second = between(dag, dag, (), low, low | two, GROUP)
    if first is None or second is None:
        return None
    order = np.argsort(second.weight, kind="stable")
    more = second.weight[order] - second.weight[0]
    place = np.searchsorted(more, top - first.weight, side="right") - 1
    weight = np.where(place >= 0, first.weight + more[place], -1)
    weight[first.crossing > limit] = -1
    at = int(weight.argmax())
    return first.downsets[at] | second.downsets[order[place[at]]] if weight[at] >= least else None


def _groups(dag: Dag, free: Units) -> tuple[Units, Units]:
    """Splits the free units in two parts of about equal size with no edge between them."""
    one = two = 0
    for part in sorted(_components(dag, free), key=lambda c: (-c.bit_count(), c)):
        if one.bit_count() <= two.bit_count():
            one |= part
        else:
            two |= part
    return one, two


def _components(dag: Dag, free: Units) -> list[Units]:
    components: list[Units] = []
    while free:
        part = edge = free & -free
        while edge:
            edge = _neighbours(dag, edge) & free & ~part
            part |= edge
        components.append(part)
        free &= ~part
    return components


def _neighbours(dag: Dag, units: Units) -> Units:
    around = 0
    for unit in members(units):
        around |= dag.before[unit] | dag.after[unit]
    return around


def _around(
    dag: Dag, start: Units, most: Units, goal: tuple[int, int], random: Random
) -> tuple[Units, Units]:
    """Returns the downsets before and after the free units, on a random path from `start` up to
    weight `top`.
    """
    top, free = goal
    path, weight = [start], dag.weight(start)
    ready = [u for u in members(most & ~start) if dag.before[u] & ~start == 0]
    beyond = 0
    while ready and beyond < free:
        unit = ready.pop(random.randrange(len(ready)))
        path.append(path[-1] | 1 << unit)
        weight += dag.weights[unit]
        beyond += weight > top
        followers = members(dag.after[unit] & most)
        ready += [f for f in followers if dag.before[f] & ~path[-1] == 0]
    return path[max(len(path) - 1 - 2 * free, 0)], path[-1]
