"""Problem: devices, or groups of them, of several kinds; which of them takes which stage?

Where there are few orders of kinds, each is cut. Few devices: the exact dynamic program over kinds, cuts and
the links between neighbours (arrange.py), with the memory of a stage that has so many behind it. Many: the
same without links that differ (unequal.py), whose bytes are bounded from above by what a run of units holds
for good and for each microbatch in flight.
Either decides the order alone; the cut of that order is then found as for equal devices (split.py), by the
price that knows the critical path, and the better of it and the order that was given counts. Models of
very many units are arranged and cut at once (fleet.py).

Complexity: as in those files. Oracle: tests/unit/planner/test_order.py tries every order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from math import comb, prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster, Device
from outsize.planner.arrange import NOBODY, arrange
from outsize.planner.layout import Layout
from outsize.planner.margin import room_bytes
from outsize.planner.memory import held_bytes, peak_table
from outsize.planner.moments import moments_by_stage
from outsize.planner.ranges import Bytes, Seconds
from outsize.planner.split import Case, Pipeline
from outsize.planner.unequal import Cuts, balance, lowest_first

# States of arrange.py (numbers of used devices, kinds squared) that are looked at; beyond, links are not.
STATES: Final = 600
# Orders of kinds that are all looked at.
ORDERS: Final = 24

Kind = tuple[str, int]
"""A device's kind and memory."""


def kinds_of(cluster: Cluster) -> tuple[Kind, ...]:
    """The different ones, in rank order."""
    return tuple(dict.fromkeys((d.kind, d.memory_bytes) for d in cluster.devices))


def numbers(cluster: Cluster) -> list[int]:
    """How many there are of each kind."""
    counts = Counter((d.kind, d.memory_bytes) for d in cluster.devices)
    return [counts[kind] for kind in kinds_of(cluster)]


def orders(
    layout: Layout, cluster: Cluster, cases: Sequence[Case], idle: bool = False
) -> Iterator[tuple[int, ...]]:
    """Stage -> rank: every order of kinds where there are few, or else the best balanced one.

    `cluster` has a device for each group, `cases[t]` is the model on kind t of `kinds_of`. With `idle` some
    groups may be left out.
    """
    counts, units = numbers(cluster), cases[0].units
    lengths = range(1, min(layout.stages, units) + 1) if idle else (layout.stages,)
    if sum(map(partial(_number, counts), lengths)) <= ORDERS:
        yield from (taken(kinds, cluster) for length in lengths for kinds in _sequences(counts, length))
        return
    few = prod(n + 1 for n in counts) * len(counts) ** 2 <= STATES
    chosen = (_by_links if few else _by_kind)(layout, cluster, cases, counts, idle)
    yield from [taken(chosen, cluster)] if chosen is not None else []


def _number(counts: Sequence[int], length: int) -> int:
    """Of the sequences of kinds of this length."""
    ways = [1] + [0] * length
    for count in counts:
        ways = [sum(ways[n - k] * comb(n, k) for k in range(min(count, n) + 1)) for n in range(length + 1)]
    return ways[length]


def _sequences(counts: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    if not length:
        yield ()
    for kind, left in enumerate(counts if length else ()):
        if left:
            fewer = [n - (t == kind) for t, n in enumerate(counts)]
            yield from ((kind, *rest) for rest in _sequences(fewer, length - 1))


def _by_links(
    layout: Layout, cluster: Cluster, cases: Sequence[Case], counts: Sequence[int], idle: bool
) -> tuple[int, ...] | None:
    devices = first_of(cluster)
    worst = moments_by_stage(layout.schedule, layout.stages, layout.microbatches, layout.axes.pp)

    def wait(one: int, other: int, size: Bytes) -> Seconds:
        if NOBODY in (one, other):
            return np.zeros(size.shape)
        latency_s, bytes_per_s = _link(cluster, one, other)
        return np.where(size > 0, latency_s + size / bytes_per_s, 0.0)

    def price(before: int, kind: int, behind: int, stages_behind: int) -> Seconds:
        case = cases[kind]
        peak = peak_table(case.ranges, worst[layout.stages - 1 - stages_behind])
        seconds = case.ranges.compute_s + wait(before, kind, case.ranges.received)
        seconds = seconds + wait(kind, behind, case.ranges.gradient_in)
        return np.where(peak <= room_bytes(devices[kind]), seconds, np.inf)

    found = arrange(counts, cases[0].units, price, None if idle else layout.stages)
    return None if found is None else found.kinds


def _by_kind(
    layout: Layout, cluster: Cluster, cases: Sequence[Case], counts: Sequence[int], idle: bool
) -> tuple[int, ...] | None:
    devices = first_of(cluster)
    seconds = np.stack([np.diagonal(case.ranges.compute_s, offset=1) for case in cases])

    def floor(kind: int, behind: int) -> Cuts:
        fixed, held = _bytes(cases[kind])
        return lowest_first(fixed, held, room_bytes(devices[kind]), min(layout.microbatches, behind + 1))

    found = balance(counts, seconds, floor=floor)
    return found.kinds if found is not None and (idle or len(found.kinds) == layout.stages) else None


def _bytes(case: Case) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each unit: for good with all that comes and goes once, and for each microbatch in flight."""
    ranges = case.ranges
    once = ranges.weights + ranges.replicas + ranges.optimizer + ranges.gradients
    held = ranges.saved + ranges.received + ranges.sent
    return np.diagonal(once, offset=1).copy(), np.diagonal(held, offset=1).copy()


def excess_bytes(pipeline: Pipeline, kinds: Sequence[int]) -> dict[int, float]:
    """Bytes by kind that the stages, a piece each, have too many of."""
    layout, found = pipeline.layout, dict[int, float]()
    moments = moments_by_stage(layout.schedule, layout.stages, layout.microbatches, layout.axes.pp)
    for stage, kind in enumerate(kinds):
        ways = (case.ranges.only(stage, stage + 1) for case in pipeline.ways[stage])
        least = min(max(held_bytes(here, alive) for alive in moments[stage]) for here in ways)
        if least > pipeline.room_bytes(stage):
            found[kind] = max(found.get(kind, 0.0), least - pipeline.room_bytes(stage))
    return found


def first_of(cluster: Cluster) -> list[Device]:
    """The first device of each kind."""
    first: dict[Kind, Device] = {}
    for device in cluster.devices:
        first.setdefault((device.kind, device.memory_bytes), device)
    return list(first.values())


def _link(cluster: Cluster, one: int, other: int) -> tuple[float, float]:
    """Between two devices of these kinds that are nearest in rank order: latency, bytes per second."""
    kinds = kinds_of(cluster)
    ranks = [[r for r, d in enumerate(cluster.devices) if (d.kind, d.memory_bytes) == kind] for kind in kinds]
    pairs = ((a, b) for a in ranks[one] for b in ranks[other] if a != b)
    alone = ranks[one][0], ranks[one][0]
    nearest = min(pairs, key=lambda pair: abs(pair[0] - pair[1]), default=alone)
    link = cluster.link(*nearest)
    return link.latency_s, link.bytes_per_s


def taken(chosen: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """Stage -> rank, for the kind of each stage: devices of a kind are taken in rank order."""
    kinds = kinds_of(cluster)
    free = [iter([r for r, d in enumerate(cluster.devices) if (d.kind, d.memory_bytes) == k]) for k in kinds]
    return tuple(next(free[kind]) for kind in chosen)
