"""Problem: which of several kinds of devices, or groups of them, takes which stage?

Where there are few orders of kinds, each is cut. For few devices, the exact dynamic program over kinds, cuts
and the links between neighbours (neighbour_dp.py) is used, with the memory of a stage by the number of stages
after it. For many, the same without unequal links (probe.py), with an upper bound of the bytes: what a run of
units holds permanently and for each microbatch in flight.
Both decide the order alone; the cut of that order is then found as for equal devices
(partition/stage_prices.py), by the price that knows the critical path, and the better of it and rank order
wins. Models of very many units are ordered and cut at once (bounds.py). Complexity: as in those files.
Oracle: tests/unit/planner/heterogeneous/test_assignment.py tries every order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from math import comb, prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster, Device, Link
from outsize.planner.costs.collectives import messages_s
from outsize.planner.heterogeneous.neighbour_dp import NOBODY, arrange
from outsize.planner.heterogeneous.probe import Cuts, balance, lowest_first
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.account import bytes_in_state, peak_table
from outsize.planner.memory.headroom import room_bytes
from outsize.planner.memory.in_flight_states import states_by_stage
from outsize.planner.memory.range_tables import Bytes, Seconds
from outsize.planner.partition.stage_prices import Pipeline, PricedModel

# With at most this many states of neighbour_dp.py (numbers of used devices, kinds squared) links are
# considered.
STATES: Final = 600
# Up to this many orders of kinds all are tried.
ORDERS: Final = 24

Kind = tuple[str, int]
"""Holds a device's kind and memory."""


def kinds_of(cluster: Cluster) -> tuple[Kind, ...]:
    """Returns the distinct kinds, in rank order."""
    return tuple(dict.fromkeys((d.kind, d.memory_bytes) for d in cluster.devices))


def numbers(cluster: Cluster) -> list[int]:
    """Returns the number of devices of each kind."""
    counts = Counter((d.kind, d.memory_bytes) for d in cluster.devices)
    return [counts[kind] for kind in kinds_of(cluster)]


def orders(
    layout: Layout, cluster: Cluster, cases: Sequence[PricedModel], idle: bool = False
) -> Iterator[tuple[int, ...]]:
    """Yields maps stage -> rank: every order of kinds where there are few, otherwise the best balanced one.

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
    """Returns the number of sequences of kinds of this length."""
    sequences = [1] + [0] * length
    for count in counts:
        sequences = [
            sum(sequences[n - k] * comb(n, k) for k in range(min(count, n) + 1)) for n in range(length + 1)
        ]
    return sequences[length]


def _sequences(counts: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    if not length:
        yield ()
    for kind, remaining in enumerate(counts if length else ()):
        if remaining:
            fewer = [n - (t == kind) for t, n in enumerate(counts)]
            yield from ((kind, *later_kinds) for later_kinds in _sequences(fewer, length - 1))


def _by_links(
    layout: Layout, cluster: Cluster, cases: Sequence[PricedModel], counts: Sequence[int], idle: bool
) -> tuple[int, ...] | None:
    devices = first_of(cluster)
    states = states_by_stage(layout.schedule, layout.stages, layout.microbatches, layout.axes.pp)

    def wait(one: int, other: int, size: Bytes) -> Seconds:
        if NOBODY in (one, other):
            return np.zeros(size.shape)
        return messages_s(_link(cluster, one, other), size)

    def price(before: int, kind: int, after: int, stages_after: int) -> Seconds:
        case = cases[kind]
        peak = peak_table(case.ranges, states[layout.stages - 1 - stages_after])
        seconds = case.ranges.compute_s + wait(before, kind, case.ranges.received)
        seconds = seconds + wait(kind, after, case.ranges.gradient_in)
        return np.where(peak <= room_bytes(devices[kind]), seconds, np.inf)

    arrangement = arrange(counts, cases[0].units, price, None if idle else layout.stages)
    return None if arrangement is None else arrangement.kinds


def _by_kind(
    layout: Layout, cluster: Cluster, cases: Sequence[PricedModel], counts: Sequence[int], idle: bool
) -> tuple[int, ...] | None:
    devices = first_of(cluster)
    seconds = np.stack([np.diagonal(case.ranges.compute_s, offset=1) for case in cases])

    def floor(kind: int, stages_after: int) -> Cuts:
        fixed, held = _bytes(cases[kind])
        return lowest_first(
            fixed, held, room_bytes(devices[kind]), min(layout.microbatches, stages_after + 1)
        )

    arrangement = balance(counts, seconds, floor=floor)
    return (
        arrangement.kinds
        if arrangement is not None and (idle or len(arrangement.kinds) == layout.stages)
        else None
    )


def _bytes(case: PricedModel) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns bytes per unit: permanent ones with one microbatch's temporaries, and those per microbatch in
    flight.
    """
    ranges = case.ranges
    permanent = ranges.weights + ranges.replicas + ranges.optimizer + ranges.gradients
    held = ranges.saved + ranges.received + ranges.sent
    return np.diagonal(permanent, offset=1).copy(), np.diagonal(held, offset=1).copy()


def excess_bytes(pipeline: Pipeline, kinds: Sequence[int]) -> dict[int, float]:
    """Returns by kind the bytes by which the stages, one piece each, exceed their devices."""
    layout, excess = pipeline.layout, dict[int, float]()
    states = states_by_stage(layout.schedule, layout.stages, layout.microbatches, layout.axes.pp)
    for stage, kind in enumerate(kinds):
        options = (case.ranges.of_run(stage, stage + 1) for case in pipeline.options[stage])
        least_bytes = min(max(bytes_in_state(here, state) for state in states[stage]) for here in options)
        if least_bytes > pipeline.room_bytes(stage):
            excess[kind] = max(excess.get(kind, 0.0), least_bytes - pipeline.room_bytes(stage))
    return excess


def first_of(cluster: Cluster) -> list[Device]:
    """Returns the first device of each kind."""
    first: dict[Kind, Device] = {}
    for device in cluster.devices:
        first.setdefault((device.kind, device.memory_bytes), device)
    return list(first.values())


def _link(cluster: Cluster, one: int, other: int) -> Link:
    """Returns the link between the two devices of these kinds that are nearest in rank order."""
    kinds = kinds_of(cluster)
    ranks = [[r for r, d in enumerate(cluster.devices) if (d.kind, d.memory_bytes) == kind] for kind in kinds]
    pairs = ((a, b) for a in ranks[one] for b in ranks[other] if a != b)
    same_device = ranks[one][0], ranks[one][0]
    nearest = min(pairs, key=lambda pair: abs(pair[0] - pair[1]), default=same_device)
    return cluster.link(*nearest)


def taken(chosen: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """Returns a map stage -> rank from the kind of each stage: devices of a kind are used in rank order."""
    kinds = kinds_of(cluster)
    free = [iter([r for r, d in enumerate(cluster.devices) if (d.kind, d.memory_bytes) == k]) for k in kinds]
    return tuple(next(free[kind]) for kind in chosen)
