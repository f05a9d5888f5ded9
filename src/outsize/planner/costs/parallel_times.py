"""Problem: how long does a unit take on one device when the devices of a group share the work of a stage?

    tp          products are split in pairs, by columns and then by rows, and all ops between them are
                split too (arXiv 1909.08053, sec. 3): a pass takes 1 / tp of such flops and bytes, at the
                efficiency of so small an operator; then the group reduces. The program tells which units
                these are and what is sent (`Unit.divided`); where it is not known, all units are split.
                The host launches as many kernels for a share as for the whole, and the collectives: small
                shares wait for it. A collective waits for the last of its ranks, so that what host and
                device do not hide of each other grows with the group (`Efficiency.lateness`). The
                collective behind products by columns has only begun when their weights' gradients are
                computed (`ShardedFraction.beside`), unless the schedule splits the backward: of C seconds
                beside W, max(C, W + crowded min(C, W)) - W are seen
    cp          the same shares of work, by tokens; keys and values are gathered before attention, and their
                gradients scattered behind it (program/sharding/context_parallel). Where a product has scales
                of whole tensors, ranks of tp and cp ask each other for the largest elements of their parts
    ep          rows are sent to the ranks of their experts and back (`routed_times`), on top of the above;
                the sum of tp over a unit with experts stays counted, where a gather of half its bytes runs
    replicas    a unit takes as long as on one device. Collectives of weights and gradients
                (`WeightCollectives`) are actions of their own: UNSHARD gathers weights over
                dp_shard x cp, REDUCE_GRAD scatters gradients there and sums them among all that have the
                same part (schedules/sharded.py, evaluate/played_step.py)

Deviations: a cut between products that share a collective leaves them as they are; the collectives of cp
are not overlapped, and its work counts as balanced although the last rows of a causal attention read most
keys; weights that cp reads whole count with a share of their bytes. Complexity: O(units +
users of all values). Oracle: tests/unit/planner/costs/test_parallel_times.py, figures by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Final, Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.axes.axis import Axis
from outsize.axes.registry import EXPERT_HOLDERS, HOLDERS, ranks_along, size_of, those
from outsize.ir.cluster import Cluster, Device
from outsize.ir.graph import MATMULS, ModelGraph, ShardedFraction, Work
from outsize.ir.hardware.collectives import Collective
from outsize.ir.hardware.devices import host_link
from outsize.ir.plan import Axes
from outsize.planner.costs.collectives import collective_s, collectives_among
from outsize.planner.costs.efficiency import default_of
from outsize.planner.costs.roofline import (
    WorkPasses,
    distinct_passes,
    host_blocks,
    host_seconds,
    passes_of,
    seconds,
)
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.layout.expert_parallel import absent_bytes, sent_bytes
from outsize.planner.layout.layout import Layout

# Two numbers in float32: the largest elements of two operands.
_MAXIMA_BYTES: Final = 8
_PRODUCTS: Final = those(lambda axis: axis.divides_products)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """Holds what a graph says about the share of each device of a group; it is the same for every mesh.

    `passes` are the distinct passes; unit u has `passes[pass_of[u]]`. `divided` is the share of each unit's
    work that tp splits. `units` say what tp ranks reduce and gather. `keys` maps units to the bytes of keys
    and values that cp ranks gather, those `in_pieces` once more in the backward, `maxima` to the operands of
    which they ask each other for the largest element, in each pass. `blocks` are the first units of the
    blocks in which a host catches up. `hiding` maps units to those whose weights' gradients are computed
    while their collective runs. `parameter_bytes`: of all weights, and of those that tp leaves whole.
    """

    parameter_bytes: tuple[int, int]
    units: Sequence[ShardedFraction]
    divided: NDArray[np.float64]
    keys: Mapping[int, int]
    in_pieces: frozenset[int]
    maxima: Mapping[int, int]
    passes: tuple[WorkPasses, ...]
    pass_of: NDArray[np.int64]
    blocks: tuple[int, ...]
    hiding: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, graph: ModelGraph) -> Self:
        """Collects the passes of a graph; blocks repeat, so few are distinct."""
        passes, pass_of = distinct_passes(graph)
        units, known = [unit.divided for unit in graph.units], graph.tensor is not None
        divided = np.array([unit.work if known else 1.0 for unit in units])
        names = {name for unit in units for name in unit.parameters}
        whole = sum(p.size_bytes for p in graph.parameters if known and p.name not in names)
        sizes, blocks = (graph.parameter_bytes, whole), host_blocks(graph)
        hiding = dict(_hiding(graph))
        keys = {unit.index: unit.row_gather_bytes for unit in graph.units if unit.row_gather_bytes}
        maxima = {unit.index: unit.row_maxima for unit in graph.units if unit.row_maxima}
        in_pieces = frozenset(unit.index for unit in graph.units if unit.row_heads > 1)
        return cls(sizes, units, divided, keys, in_pieces, maxima, passes, pass_of, blocks, hiding)

    def weights_bytes(self, tp: int) -> int:
        """Returns the weight bytes of one of `tp` tensor-parallel ranks."""
        every, whole = self.parameter_bytes
        return whole + (every - whole) // tp


def split_times(sharing: Sharing, times: UnitSeconds, layout: Layout, cluster: Cluster) -> UnitSeconds:
    """Returns the seconds of each unit on a device of its group, with the collectives that it waits for.

    `times`: the seconds on one device. Of the layout only the axes tp and cp count: all weights are there.
    """
    if layout.microbatch_ranks > 1:
        times = _split(sharing, times, layout, cluster)
    if layout.axes.cp > 1:
        times = _with_gathers(sharing, times, layout, cluster)
    return times


def routed_times(graph: ModelGraph, times: UnitSeconds, axes: Axes, cluster: Cluster) -> UnitSeconds:
    """Returns the seconds of each unit on one of the ranks of ep and tp that divide experts, with what is
    sent there and back; a mean rank computes as many rows as it sends, and reads the weights of its own
    experts. `times`: those without; `graph` has all experts.

    Each rank of tp and of cp sends its part of the tokens.
    """
    alike = axes.tp * axes.cp
    ranks = [first + rank for first in range(0, axes.ep * alike, alike) for rank in range(axes.tp)]

    @cache
    def waits_s(size_bytes: int) -> float:
        return sum(
            collective_s(kind, size_bytes, ranks, cluster) for kind in ("all_gather", "reduce_scatter")
        )

    @cache
    def shares(passes: WorkPasses, absent: int) -> tuple[float, ...]:
        return tuple(_without_weights(works, absent, cluster.devices[0]) for works in passes)

    read = [
        shares(passes_of(unit), absent_bytes(graph, unit, axes.ep)) if unit.routed_bytes else (1.0, 1.0, 1.0)
        for unit in graph.units
    ]
    waits = np.array([waits_s(sent_bytes(unit, len(ranks)) // alike) for unit in graph.units])
    return _waiting(times.times(*np.array(read).T).plus(waits, waits), waits, waits, cluster.devices[0])


@final
@dataclass(frozen=True, eq=False)
class WeightCollectives:
    """Prices the collectives among the replicas of a layout, by its axes; `cluster` are all devices of the
    kind that a stage has.

    `experts`: the share of a rank's weights that are its experts, where ranks divide them (ep). Each stage is
    taken to have that share. Ranks of ep hold the same other weights, so they take part in those alone.
    """

    layout: Layout
    cluster: Cluster
    experts: float = 0.0
    _known: dict[tuple[Collective, int, tuple[Axis, ...]], float] = field(default_factory=dict, init=False)
    _among: dict[tuple[Axis, ...], Callable[[Collective, int], float]] = field(
        default_factory=dict, init=False
    )

    def gather_s(self, weights_bytes: int) -> float:
        """Returns the seconds in which the weights of some units become whole (UNSHARD)."""
        return sum(
            self._seconds("all_gather", size, self._sharing(holders))
            for size, holders in self._parts(weights_bytes)
        )

    def reduce_s(self, gradients_bytes: int, *, last: bool) -> float:
        """Returns the seconds of one REDUCE_GRAD: the gradients are scattered over the shards, and with the
        last one of a step summed over all that have the same part.
        """
        return sum(self._reduce_s(*part, last=last) for part in self._parts(gradients_bytes))

    def owners_s(self, size_bytes: int) -> float:
        """Returns the seconds in which a rank gives so many bytes of its parts of tensors to their owners, or
        gets as many from them.
        """
        along = (*_PRODUCTS, *self._sharing(HOLDERS))
        return self._seconds("all_to_all", size_bytes, along) if size_bytes else 0.0

    def _parts(self, size_bytes: int) -> Sequence[tuple[int, tuple[Axis, ...]]]:
        """Returns the bytes of experts and of all else, each with the axes of ranks that hold the same."""
        experts_bytes = int(self.experts * size_bytes)
        parts = ((size_bytes - experts_bytes, HOLDERS), (experts_bytes, EXPERT_HOLDERS))
        return [part for part in parts if part[0]]

    def _sharing(self, holders: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Returns the axes over which weights are sharded that ranks along `holders` hold."""
        return tuple(axis for axis in holders if axis.shares_states) if self.layout.shards > 1 else ()

    def _reduce_s(self, size_bytes: int, holders: tuple[Axis, ...], *, last: bool) -> float:
        sharing = self._sharing(holders)
        scatter_s = self._scatter_s(size_bytes, sharing)
        part_bytes = -(-size_bytes // size_of(self._sizes, sharing))
        same = tuple(axis for axis in holders if axis not in sharing)
        return scatter_s + (self._seconds("all_reduce", part_bytes, same) if last else 0.0)

    def _scatter_s(self, gradients_bytes: int, sharing: tuple[Axis, ...]) -> float:
        """Returns the seconds in which each shard of the gradients is summed on its rank."""
        device, shards = self.cluster.devices[0], size_of(self._sizes, sharing)
        if shards == 1 or not default_of(device).sums_whole:
            return self._seconds("reduce_scatter", gradients_bytes, sharing)
        copied_bytes = gradients_bytes + gradients_bytes / shards
        copied_s = default_of(device).copied_s(copied_bytes, device)
        return self._seconds("all_reduce", gradients_bytes, sharing) + copied_s

    def _seconds(self, kind: Collective, size_bytes: int, along: tuple[Axis, ...]) -> float:
        """Returns the seconds of a collective among the ranks along some axes."""
        key = kind, size_bytes, along
        if key not in self._known:
            if along not in self._among:
                self._among[along] = collectives_among(ranks_along(self._sizes, along), self.cluster)
            self._known[key] = self._among[along](kind, size_bytes)
        return self._known[key]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Returns the sizes of the axes of the mesh."""
        return self.layout.axes.model_dump()


def _hiding(graph: ModelGraph) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields each unit that begins a collective in its backward, with the units whose weights' gradients are
    computed meanwhile: none of them comes before it.
    """
    users: dict[str, list[int]] = {}
    for unit in graph.units:
        for name in unit.parameters:
            users.setdefault(name, []).append(unit.index)
    for unit in graph.units:
        if names := unit.divided.beside:
            later = {user for name in names for user in users.get(name, ()) if user >= unit.index}
            yield unit.index, tuple(sorted(later))


def _split(sharing: Sharing, times: UnitSeconds, layout: Layout, cluster: Cluster) -> UnitSeconds:
    group, cp, device = range(layout.axes.tp), layout.axes.cp, cluster.devices[0]

    @cache
    def waits_s(summed: int, gathered: int) -> float:
        adding = collective_s("all_reduce", summed // cp, group, cluster)
        return adding + collective_s("all_gather", gathered // cp, group, cluster)

    def asks_s(maxima: int) -> float:
        return maxima * collective_s("all_reduce", _MAXIMA_BYTES, group, cluster) if maxima else 0.0

    forward = np.array(
        [
            waits_s(unit.forward_sum, unit.forward_gather) + asks_s(unit.forward_maxima)
            for unit in sharing.units
        ]
    )
    split, whole = (
        np.array([[_slower(works, ranks, device) for works in passes] for passes in sharing.passes])
        for ranks in (layout.microbatch_ranks, cp)
    )
    divided = sharing.divided[:, None]
    slower = divided * split[sharing.pass_of] + (1 - divided) * whole[sharing.pass_of]
    curves, (starts, backward_starts) = default_of(device), _collectives(sharing.units, len(group))
    launching = host_seconds(sharing.passes, device).taken(sharing.pass_of)
    own = _without_waits(sharing, times, launching, device).times(*slower.T)
    hiding = {} if layout.splits_backward else sharing.hiding
    backward = np.zeros(len(sharing.units))
    for index, unit in enumerate(sharing.units):
        hidden_by_s = float(own.backward_weight[[*hiding.get(index, ())]].sum())
        begun_s = waits_s(unit.begun_sum, unit.begun_gather)
        waited_s = waits_s(unit.backward_sum - unit.begun_sum, unit.backward_gather - unit.begun_gather)
        waited_s += asks_s(unit.backward_maxima)
        backward[index] = waited_s + curves.seen_s(begun_s, hidden_by_s)
    busy = own.plus(forward + curves.launch_s * starts, backward + curves.launch_s * backward_starts)
    launching = launching.plus(curves.host_s * starts, curves.host_s * backward_starts)
    late = curves.lateness(layout.microbatch_ranks)
    behind = busy.behind_host(launching, sharing.blocks, late)
    if host_link(device) is None:
        return behind
    # What a host that launches more slowly hides already is no wait.
    alone = own.plus(curves.launch_s * starts, curves.launch_s * backward_starts)
    alone = alone.behind_host(launching, sharing.blocks, late)
    seen = (behind.forward - alone.forward).clip(0.0, forward)
    return _waiting(behind, seen, (behind.backward - alone.backward).clip(0.0, backward), device)


def _waiting(
    times: UnitSeconds, forward: NDArray[np.float64], backward: NDArray[np.float64], device: Device
) -> UnitSeconds:
    """Returns the times with what they are of exchanges: as far as other work hides there, which is slower
    meanwhile. A CPU copies what its ranks exchange itself.
    """
    free = 0.0 if host_link(device) is None else max(0.0, 1 - default_of(device).crowded)
    return times.waiting(free * forward, free * backward) if free else times


def _collectives(
    units: Sequence[ShardedFraction], ranks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns how many collectives of so many tp ranks start in the forward and in the backward of each unit;
    one rank starts none.
    """
    forward = [(unit.forward_sum > 0) + (unit.forward_gather > 0) + unit.forward_maxima for unit in units]
    backward = [
        (unit.backward_sum > 0) + (unit.backward_gather > 0) + (unit.again_bytes > 0) + unit.backward_maxima
        for unit in units
    ]
    return np.array(forward, np.float64) * (ranks > 1), np.array(backward, np.float64) * (ranks > 1)


def _without_waits(
    sharing: Sharing, times: UnitSeconds, launching: UnitSeconds, device: Device
) -> UnitSeconds:
    """Returns the seconds on one device without those in which it waits for its host, by the roofline.

    A pass that was measured to be shorter than the roofline says waits for as large a share of it.
    """
    works = np.array([[seconds(works, device) for works in passes] for passes in sharing.passes])
    alone = UnitSeconds.from_rows(works[sharing.pass_of].tolist())
    waiting = alone.behind_host(launching, sharing.blocks, default_of(device).lateness(1))
    own, working, waited = (np.array(each.rows()) for each in (times, alone, waiting))
    fractions = np.divide(working, waited, out=np.ones_like(own), where=waited > 0)
    return UnitSeconds.from_rows(np.maximum(own - (waited - working), own * fractions).tolist())


def _with_gathers(sharing: Sharing, parts: UnitSeconds, layout: Layout, cluster: Cluster) -> UnitSeconds:
    """Adds the gathers of keys and values before attention, and the scatters of their gradients behind it."""
    tp, ranks = layout.axes.tp, range(0, layout.microbatch_ranks, layout.axes.tp)
    forward, backward_input = parts.forward.copy(), parts.backward_input.copy()
    for unit, size in sharing.keys.items():
        gathered_s = collective_s("all_gather", size // tp, ranks, cluster)
        forward[unit] += gathered_s
        backward_input[unit] += gathered_s if unit in sharing.in_pieces else 0.0
        backward_input[unit] += collective_s("reduce_scatter", size // tp, ranks, cluster)
    asks_s = collective_s("all_reduce", _MAXIMA_BYTES, ranks, cluster)
    for unit, asked in sharing.maxima.items():
        forward[unit] += asked * asks_s
        backward_input[unit] += asked * asks_s
    waits = forward - parts.forward, backward_input - parts.backward_input
    made = replace(parts, forward=forward, backward_input=backward_input)
    return _waiting(made, *waits, cluster.devices[0])


def _slower(works: Sequence[Work], shards: int, device: Device) -> float:
    """Returns the time of a share of the works over that of all: no less than 1 / shards."""
    whole = seconds(works, device)
    if not whole:
        return 1 / shards
    return seconds([_part(work, shards) for work in works], device) / whole


def _without_weights(works: Sequence[Work], absent: int, device: Device) -> float:
    """Returns the time of works whose products read so many bytes less of weights over that of all."""
    whole = seconds(works, device)
    fewer = [
        work.model_copy(update={"moved_bytes": max(0, work.moved_bytes - absent)})
        if work.family in MATMULS
        else work
        for work in works
    ]
    return seconds(fewer, device) / whole if whole else 1.0


def _part(work: Work, shards: int) -> Work:
    shared = ("flops", "moved_bytes", "instructions")
    return work.model_copy(update={name: getattr(work, name) // shards for name in shared})
