"""Problem: devices of several kinds; which of them takes which stage?

Few devices: the exact dynamic program over kinds, cuts and the links between neighbours (arrange.py), with
the memory of a stage that has so many behind it. Many: the same without links that differ (unequal.py),
whose bytes are bounded from above by what a run of units holds for good and for each microbatch in flight.
Either decides the order alone; the cut of that order is then found as for equal devices (split.py), by the
price that knows the critical path, and the better of it and the order that was given counts.

Complexity: as in those files. Oracle: tests/unit/planner/test_order.py tries every order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster, Device
from outsize.planner.arrange import NOBODY, arrange
from outsize.planner.layout import Layout
from outsize.planner.margin import room_bytes
from outsize.planner.memory import peak_table
from outsize.planner.moments import moments_by_stage
from outsize.planner.ranges import Bytes, Seconds
from outsize.planner.seconds import UnitSeconds
from outsize.planner.split import Case
from outsize.planner.unequal import Cuts, balance, lowest_first

# States of arrange.py (numbers of used devices, kinds squared) that are looked at; beyond, links are not.
STATES: Final = 600
# Relative error of the least pace.
PRECISE: Final = 1e-4

Kind = tuple[str, int]
"""A device's kind and memory."""


def kinds_of(cluster: Cluster) -> tuple[Kind, ...]:
    """The different ones, in rank order."""
    return tuple(dict.fromkeys((d.kind, d.memory_bytes) for d in cluster.devices))


def ordered(layout: Layout, cluster: Cluster, cases: Sequence[Case]) -> tuple[int, ...] | None:
    """Stage -> rank, for one stage on each device; `cases[t]` is the model on kind t of `kinds_of`.

    None when no order fits.
    """
    kinds = kinds_of(cluster)
    counts = Counter((d.kind, d.memory_bytes) for d in cluster.devices)
    numbers = [counts[kind] for kind in kinds]
    few = prod(n + 1 for n in numbers) * len(kinds) ** 2 <= STATES
    chosen = _by_links(layout, cluster, cases, numbers) if few else _by_kind(layout, cluster, cases, numbers)
    return None if chosen is None else _ranks(chosen, cluster)


def _by_links(
    layout: Layout, cluster: Cluster, cases: Sequence[Case], counts: Sequence[int]
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

    found = arrange(counts, cases[0].units, price, layout.stages)
    return None if found is None else found.kinds


def _by_kind(
    layout: Layout, cluster: Cluster, cases: Sequence[Case], counts: Sequence[int]
) -> tuple[int, ...] | None:
    devices = first_of(cluster)
    seconds = np.stack([np.diagonal(case.ranges.compute_s, offset=1) for case in cases])

    def floor(kind: int, behind: int) -> Cuts:
        fixed, held = _bytes(cases[kind])
        return lowest_first(fixed, held, room_bytes(devices[kind]), min(layout.microbatches, behind + 1))

    found = balance(counts, seconds, floor=floor)
    return None if found is None or len(found.kinds) < layout.stages else found.kinds


def least_pace_s(costs: Sequence[UnitSeconds], cluster: Cluster) -> float:
    """Seconds of a microbatch on the slowest stage, below every order and cut; `costs[t]` of kind t."""
    counts = Counter((d.kind, d.memory_bytes) for d in cluster.devices)
    seconds = np.stack([each.total for each in costs])
    found = balance([counts[kind] for kind in kinds_of(cluster)], seconds, tolerance=PRECISE)
    assert found is not None, "without memory everything fits"
    return found.bound_s


def _bytes(case: Case) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each unit: for good with all that comes and goes once, and for each microbatch in flight."""
    ranges = case.ranges
    once = ranges.weights + ranges.replicas + ranges.optimizer + ranges.gradients
    held = ranges.saved + ranges.received + ranges.sent
    return np.diagonal(once, offset=1).copy(), np.diagonal(held, offset=1).copy()


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


def _ranks(chosen: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """The devices of each kind are taken in rank order."""
    kinds = kinds_of(cluster)
    free = [iter([r for r, d in enumerate(cluster.devices) if (d.kind, d.memory_bytes) == k]) for k in kinds]
    return tuple(next(free[kind]) for kind in chosen)
