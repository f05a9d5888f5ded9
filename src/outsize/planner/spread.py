"""Problem: what does a unit cost one device when the devices of a group share the work of a stage?

    tp          products are split in pairs, by columns and then by rows; all between them is split as well,
                and by sequence what is outside (arXiv 2205.05198, sec. 4.2): every pass takes 1 / tp of the
                flops and bytes, at the efficiency of so small an operator, and after the second product of
                a pair the group adds up: the bytes of one all-reduce in the forward, one in the backward
    cp          the same shares of work, by tokens; attention goes round a ring (context.py)
    sharded     FSDP gathers a stage's weights in the forward and once more in the backward, and scatters
                its gradients, for every microbatch. It prefetches, so a pass is as slow as the slower of
                compute and links, taken in the mean over the model (arXiv 2304.11277, sec. 3.3)
    replicas    one all-reduce of a stage's gradients for a step (or its two halves around a sharded
                optimizer's step) among all that have the same weights, cp too; the last backward hides as
                much of it as it lasts (arXiv 2006.15704, sec. 3.2)

A product is a unit with a weight of two dims or more that computes a matmul or a convolution. Which product
of a pair one is follows from the values: what a product by columns made is split, and stays so until a
product by rows has used it.

Deviations: the collectives of tp are not overlapped with compute; of weights that cp reads whole a share of
the bytes is counted; a replica's stages synchronise one after the other. Complexity: O(units + users of all
values). Oracle: tests/unit/planner/test_spread.py, figures by hand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster, Device
from outsize.ir.graph import ModelGraph, Unit, Value, Work
from outsize.planner.comm import collective_s
from outsize.planner.context import ring_bytes, ring_s
from outsize.planner.layout import Layout
from outsize.planner.roofline import seconds
from outsize.planner.seconds import UnitSeconds

Passes = tuple[tuple[Work, ...], tuple[Work, ...], tuple[Work, ...]]
PRODUCTS: Final = frozenset({"matmul", "convolution"})


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """What a graph says about the share that each device of a group has; the same for every mesh.

    `passes` are the different ones, unit u has those at `alike[u]`; `rows` are its `row_products`, each with
    the bytes that its group adds up, `rings` what attends, with its keys and values.
    """

    parameter_bytes: int
    rows: Mapping[int, int]
    rings: Mapping[int, int]
    passes: tuple[Passes, ...]
    alike: NDArray[np.int64]

    @classmethod
    def of(cls, graph: ModelGraph) -> Self:
        """Blocks repeat, so there are few different passes."""
        each = [(unit.forward, unit.backward_input, unit.backward_weight) for unit in graph.units]
        place: dict[Passes, int] = {}
        alike = np.array([place.setdefault(passes, len(place)) for passes in each])
        made: dict[int, int] = {}
        for value in graph.values:
            made[value.producer] = max(made.get(value.producer, 0), value.size_bytes)
        rows = {unit: made.get(unit, 0) for unit in row_products(graph)}
        return cls(graph.parameter_bytes, rows, ring_bytes(graph), tuple(place), alike)


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


def sync_s(gradient_bytes: int, backward_s: float, layout: Layout, cluster: Cluster) -> float:
    """Seconds for which replicas wait for each other's gradients of a stage, at the end of a step.

    `gradient_bytes` that one device holds of the stage; `backward_s` of its last microbatch runs beside it.
    """
    return max(0.0, collective_s("all_reduce", gradient_bytes, _alike(layout), cluster) - backward_s)


def row_products(graph: ModelGraph) -> tuple[int, ...]:
    """Units after which the devices of a tensor parallel group have to add up what they have."""
    split: set[int] = set()
    columns: dict[int, set[int]] = {}
    found: list[int] = []
    takes: dict[int, list[Value]] = defaultdict(list)
    for value in graph.values:
        for user in value.consumers:
            takes[user].append(value)
    for unit in graph.units:
        taken = takes[unit.index]
        given = {v.producer for v in taken} & split
        if not _is_product(unit, graph):
            split |= {unit.index} if given else set()
            continue
        whole = {v.id for v in taken if v.producer not in split and _may_be_input(v, unit, graph)}
        if given and not any(whole & columns.get(producer, set()) for producer in given):
            found.append(unit.index)
        else:
            columns[unit.index] = whole
            split.add(unit.index)
    return tuple(found)


def _may_be_input(value: Value, unit: Unit, graph: ModelGraph) -> bool:
    """Its last dim is one of a weight's, so the unit's product may be of it."""
    shapes = (graph.parameter_of[name].shape for name in unit.parameters)
    return bool(value.shape) and any(value.shape[-1] in shape for shape in shapes if len(shape) > 1)


def _is_product(unit: Unit, graph: ModelGraph) -> bool:
    wide = any(len(graph.parameter_of[name].shape) > 1 for name in unit.parameters)
    return wide and any(work.family in PRODUCTS for work in unit.forward)


def _split(sharing: Sharing, alone: UnitSeconds, layout: Layout, cluster: Cluster) -> UnitSeconds:
    group, ways, device = range(layout.axes.tp), layout.ways, cluster.devices[0]
    waits = np.zeros(len(sharing.alike))
    for unit, size in sharing.rows.items():
        waits[unit] = collective_s("all_reduce", size // layout.axes.cp, group, cluster)
    slower = np.array([[_slower(works, ways, device) for works in passes] for passes in sharing.passes])
    return alone.times(*slower[sharing.alike].T).plus(waits, waits)


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
    size = sharing.parameter_bytes // layout.axes.tp
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
    """Ranks of the first group that hold the same weights."""
    axes, shard = layout.axes, layout.axes.dp_shard * layout.ways
    within = shard if layout.weights != "sharded" else layout.ways
    return [r + c for r in range(0, layout.group, shard) for c in range(0, within, axes.tp)]


def _along(step: int, size: int) -> range:
    """The ranks of the first group that differ in all but the innermost axes."""
    return range(0, size, step)
