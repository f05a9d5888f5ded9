"""Problem: what does a unit cost one device when the devices of a group share the work of a stage?

    tp          products are split in pairs, by columns and then by rows, and all between them is split as
                well (arXiv 1909.08053, sec. 3): a pass takes 1 / tp of such flops and bytes, at the
                efficiency of so small an operator; then the group adds up. Which units these are and what
                is sent is derived from the program (`Unit.divided`); where nobody asked, all is split
    cp          the same shares of work, by tokens; attention goes round a ring (context.py)
    sharded     FSDP gathers a stage's weights in the forward and once more in the backward, and scatters
                its gradients, for every microbatch. It prefetches, so a pass is as slow as the slower of
                compute and links, taken in the mean over the model (arXiv 2304.11277, sec. 3.3)
    replicas    one all-reduce of a stage's gradients for a step among all that have the same weights, cp
                too; the last backward hides as much of it as it lasts (arXiv 2006.15704, sec. 3.2)
    resident    over dp_shard its two halves: gradients are scattered beside the last backward, weights
                gathered beside the next step's first forward (arXiv 1910.02054, sec. 7.2.1)

Deviations: the collectives of tp are not overlapped with compute; of weights that cp reads whole a share of
the bytes is counted; a replica's stages synchronise one after the other. Complexity: O(units + users of all
values). Oracle: tests/unit/planner/test_spread.py, figures by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster, Device
from outsize.ir.graph import Divided, ModelGraph, Work
from outsize.planner.comm import collective_s
from outsize.planner.context import ring_bytes, ring_s
from outsize.planner.layout import Layout
from outsize.planner.roofline import seconds
from outsize.planner.seconds import UnitSeconds

Passes = tuple[tuple[Work, ...], tuple[Work, ...], tuple[Work, ...]]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """What a graph says about the share that each device of a group has; the same for every mesh.

    `passes` are the different ones, unit u has those at `alike[u]`; `divided` is the share of each unit's
    work that tp splits, `units` say what its ranks add up and gather, `rings` what attends, with its keys
    and values. `parameter_bytes`: of all weights, and of those that tp leaves whole.
    """

    parameter_bytes: tuple[int, int]
    units: Sequence[Divided]
    divided: NDArray[np.float64]
    rings: Mapping[int, int]
    passes: tuple[Passes, ...]
    alike: NDArray[np.int64]

    @classmethod
    def of(cls, graph: ModelGraph) -> Self:
        """Blocks repeat, so there are few different passes."""
        each = [(unit.forward, unit.backward_input, unit.backward_weight) for unit in graph.units]
        place: dict[Passes, int] = {}
        alike = np.array([place.setdefault(passes, len(place)) for passes in each])
        units, known = [unit.divided for unit in graph.units], graph.tensor is not None
        divided = np.array([unit.work if known else 1.0 for unit in units])
        names = {name for unit in units for name in unit.parameters}
        whole = sum(p.size_bytes for p in graph.parameters if known and p.name not in names)
        sizes = graph.parameter_bytes, whole
        return cls(sizes, units, divided, ring_bytes(graph), tuple(place), alike)

    def weights_bytes(self, tp: int) -> int:
        """Of one of so many tensor parallel ranks."""
        every, whole = self.parameter_bytes
        return whole + (every - whole) // tp


def spread(sharing: Sharing, alone: UnitSeconds, layout: Layout, cluster: Cluster) -> UnitSeconds:
    """Seconds of a unit on each of the devices of its group, with the collectives that they wait for.

    `alone`: on one device.
    """
    if layout.ways > 1:
        alone = _split(sharing, alone, layout, cluster)
    if layout.axes.cp > 1:
        alone = _ringed(sharing, alone, layout, cluster)
    if layout.weights == "sharded":
        alone = _gathering(sharing, alone, layout, cluster)
    return alone


def sync_s(held: tuple[int, int], passes: tuple[float, float], layout: Layout, cluster: Cluster) -> float:
    """Seconds of a step for which replicas wait for each other's weights and gradients of a stage.

    `held`: bytes of both on one device; `passes`: forward and backward of a microbatch, which run beside.
    """
    (weights, gradients), (forward_s, backward_s), shard = held, passes, layout.axes.dp_shard
    gather_s = scatter_s = 0.0
    if layout.weights == "resident" and shard > 1:
        group = _along(layout.ways, shard * layout.ways)
        gather_s = collective_s("all_gather", weights, group, cluster)
        scatter_s = collective_s("reduce_scatter", gradients, group, cluster)
        gradients = -(-gradients // shard)
    added_s = collective_s("all_reduce", gradients, _alike(layout), cluster)
    return max(0.0, gather_s - forward_s) + max(0.0, scatter_s + added_s - backward_s)


def _split(sharing: Sharing, alone: UnitSeconds, layout: Layout, cluster: Cluster) -> UnitSeconds:
    group, cp, device = range(layout.axes.tp), layout.axes.cp, cluster.devices[0]

    @cache
    def waits_s(summed: int, gathered: int) -> float:
        adding = collective_s("all_reduce", summed // cp, group, cluster)
        return adding + collective_s("all_gather", gathered // cp, group, cluster)

    forward = np.array([waits_s(unit.forward_sum, unit.forward_gather) for unit in sharing.units])
    backward = np.array([waits_s(unit.backward_sum, unit.backward_gather) for unit in sharing.units])
    split, whole = (
        np.array([[_slower(works, ways, device) for works in passes] for passes in sharing.passes])
        for ways in (layout.ways, cp)
    )
    divided = sharing.divided[:, None]
    slower = divided * split[sharing.alike] + (1 - divided) * whole[sharing.alike]
    return alone.times(*slower.T).plus(forward, backward)


def _ringed(sharing: Sharing, parts: UnitSeconds, layout: Layout, cluster: Cluster) -> UnitSeconds:
    tp, cp, ranks = layout.axes.tp, layout.axes.cp, _along(layout.axes.tp, layout.ways)
    forward, given = parts.forward.copy(), parts.given.copy()
    for unit, size in sharing.rings.items():
        # An all-gather by a ring is cp - 1 turns.
        turn_s, double_s = (
            collective_s("all_gather", sent // tp, ranks, cluster) / (cp - 1) for sent in (size, 2 * size)
        )
        forward[unit] = ring_s(forward[unit], turn_s, cp)
        given[unit] = ring_s(given[unit], double_s, cp) + turn_s
    return replace(parts, forward=forward, given=given)


def _slower(works: Sequence[Work], ways: int, device: Device) -> float:
    """Time of a share of the works over that of all: no less than 1 / ways."""
    whole = seconds(works, device)
    if not whole:
        return 1 / ways
    return seconds([_part(work, ways) for work in works], device) / whole


def _part(work: Work, ways: int) -> Work:
    return work.model_copy(update={"flops": work.flops // ways, "moved_bytes": work.moved_bytes // ways})


def _gathering(sharing: Sharing, alone: UnitSeconds, layout: Layout, cluster: Cluster) -> UnitSeconds:
    size = sharing.weights_bytes(layout.axes.tp)
    group = _along(layout.ways, layout.axes.dp_shard * layout.ways)
    gather = collective_s("all_gather", size, group, cluster)
    scatter = collective_s("reduce_scatter", size, group, cluster)
    forward = _beside(gather, float(alone.forward.sum()))
    backward = _beside(gather + scatter, float(alone.backward.sum()))
    return alone.times(forward, backward, backward)


def _beside(links_s: float, compute_s: float) -> float:
    """How much longer a pass takes whose links are at work all along."""
    return max(1.0, links_s / compute_s) if compute_s else 1.0


def _alike(layout: Layout) -> list[int]:
    """Ranks of the first group that hold the same part of the weights."""
    axes, shard = layout.axes, layout.axes.dp_shard * layout.ways
    return [r + c for r in range(0, layout.group, shard) for c in range(0, layout.ways, axes.tp)]


def _along(step: int, size: int) -> range:
    """The ranks of the first group that differ in all but the innermost axes."""
    return range(0, size, step)
