"""Bounds layouts: below which seconds is no step, and which layouts fit no device, whatever their cut is?

The bounds themselves are in planner/bounds, and for unequal devices in planner/heterogeneous; here they get
the seconds and bytes of a layout on a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, final

from outsize.ir.cluster import Device
from outsize.planner.bounds.chain import Queue, Room
from outsize.planner.bounds.collectives import CollectiveBounds
from outsize.planner.bounds.interleaved import InterleavedBound, RankShape
from outsize.planner.bounds.memory import MemoryBounds
from outsize.planner.bounds.step_time import StepBound
from outsize.planner.costs.cache import Cache
from outsize.planner.costs.efficiency import default_of
from outsize.planner.evaluate.device_groups import DeviceGroups
from outsize.planner.evaluate.stage_tables import StageTables
from outsize.planner.evaluate.unit_prices import UnitPrices, model_key
from outsize.planner.heterogeneous.assignment import first_of, numbers
from outsize.planner.heterogeneous.bounds import Crossing, Fleet, Groups
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.optimizer_states import OptimizerBytes, style_of
from outsize.policies.activations import (
    KEEP,
    WHOLE_STAGE,
    Recompute,
    any_offloads,
    by_units,
    saves_memory,
    whole_stage,
)
from outsize.schedules.families import family_of

# A layout whose lower bound exceeds another's likely step by this factor is unlikely to win.
BEYOND: Final = 1.08


@final
class LayoutBounds:
    """Answers for layouts before any cut of them is priced."""

    def __init__(
        self,
        units: UnitPrices,
        stages: StageTables,
        groups: DeviceGroups,
        optimizer: OptimizerBytes,
        cache: Cache,
    ) -> None:
        self._units, self._stages, self._groups = units, stages, groups
        self._optimizer, self._cache = optimizer, cache
        self._memory = MemoryBounds(units.models, optimizer, cache, together=not groups.unequal)
        self._collectives = CollectiveBounds(units.models, self._memory, cache)
        self._reached_s = inf

    # -- memory --

    def may_fit(self, layout: Layout, recompute: Sequence[Recompute]) -> bool:
        """Returns whether all devices together have room, judged by sums: no table is needed."""
        return self._memory.may_fit(layout, recompute, self._groups.room_bytes(layout.group))

    def refuted(self, layout: Layout, recompute: Sequence[Recompute]) -> bool:
        """Returns whether no cut of a layout fits in these options, where that is seen at once: each of equal
        devices has one stage.
        """
        is_unknown = layout.hosted or layout.chunks > 1 or layout.actions or self._groups.unequal
        if is_unknown or any_offloads(recompute):
            return False
        return self._stages.refuted(layout, tuple(recompute))

    def _room(self, layout: Layout, recompute: Sequence[Recompute]) -> Room | None:
        """Returns what each stage may hold; None where weights or seconds depend on which device it is."""
        if layout.hosted or len(self._groups.kinds) > 1 or any_offloads(recompute):
            return None
        return self._memory.room(layout, recompute, self._groups.room_bytes(layout.group)[0])

    # -- seconds --

    def least_s(self, layout: Layout) -> float:
        """Returns a lower bound of every step: all work, with the recompute that memory forces, on all
        devices.
        """
        m, pp, work = layout.microbatches, layout.axes.pp, self._units.work(layout)
        paced_s = (work.total_s + self.recompute_s(layout)) / pp
        fleet = self.fleet(layout, WHOLE_STAGE)
        if fleet is not None:
            self._reached_s = min(self._reached_s, BEYOND * fleet.likely_s)
        return max(work.least_s(pp, m), m * paced_s, fleet.least_s if fleet is not None else 0.0)

    def floor_without_memory_s(self, layout: Layout) -> float:
        """Returns a lower bound of the step of any cut on equal devices, whatever it holds."""
        pp = layout.axes.pp
        return self._units.work(layout).floor_s(layout.schedule, layout.stages, pp, layout.microbatches)

    def floor_s(self, layout: Layout, recompute: Sequence[Recompute], most_s: float = inf) -> float:
        """Returns a lower bound of the step of any cut that fits, with a stage on each device, in these
        options.

        On unequal devices it holds for any order; it is not sought above `most_s`, or above another layout's
        likely step.
        """
        fleet = self.fleet(layout, recompute)
        if fleet is None:
            return self.bound(layout, recompute).sharpened()
        if self._groups.room(layout.group) is None:
            return inf
        floor_s = fleet.floor_s(self._reached_s if most_s == inf else most_s)
        self._reached_s = min(self._reached_s, BEYOND * floor_s)
        return floor_s

    def bound(self, layout: Layout, recompute: Sequence[Recompute]) -> StepBound:
        """Returns the same as a bound that is sharpened as far as it is needed; on unequal devices it is."""
        if self.fleet(layout, recompute) is not None:
            return StepBound(self.floor_s(layout, recompute))
        room, queue = self._room(layout, recompute), self._queue(layout)
        return self._units.work(layout).bound(
            layout.schedule, layout.stages, layout.axes.pp, layout.microbatches, room, queue
        )

    def recompute_s(self, layout: Layout) -> float:
        """Returns a lower bound of the forward seconds of a microbatch that memory forces to be
        recomputed.
        """
        room_bytes = self._groups.room_bytes(layout.group)
        return self._memory.recompute_s(layout, self._units.work(layout), room_bytes)

    def interleaved_s(self, layout: Layout, recompute: Sequence[Recompute]) -> float:
        """Returns a lower bound of any cut of an interleaved layout in these options, with the stages of each
        rank in its memory; 0 where it is not known what they hold.
        """
        law, room = family_of(layout.schedule).of_each_chunk, self._room(layout, recompute)
        if law is None or room is None or layout.actions:
            return 0.0
        m, pp = layout.microbatches, layout.axes.pp
        held = tuple(law(pp - rank, pp, m) for rank in range(pp))
        shape = RankShape(layout.chunks, m, held, graded=m % pp == 0 and m >= 3 * pp)
        # Stages recompute some of their units where the bytes of each are known (recompute_and_cut.py).
        some = self._stages.whole_of_rank(layout) and by_units(recompute)
        return InterleavedBound(self._units.work(layout), room, shape, by_unit=some).floor_s()

    def balanced_s(self, layout: Layout) -> float:
        """Returns the step of a balanced cut of an interleaved layout: a lower bound would rank it first."""
        m, pp = layout.microbatches, layout.axes.pp
        recompute_s = self.recompute_s(layout) * m / pp
        return self._units.work(layout).balanced_s(layout.schedule, layout.stages, pp, m) + recompute_s

    def collectives_s(self, layout: Layout) -> float:
        """Returns a lower bound of a step: its collectives of weights and gradients on an average rank."""
        if layout.hosted or layout.axes.weight_holders == 1 or layout.axes.expert_parts > 1:
            return 0.0  # Experts are summed over fewer ranks than the rest.
        work = self._units.work(layout)
        return min(
            self._collectives.average_s(layout, work, self._units.collectives(layout, device))
            for device in self._groups.kinds_of(layout.group)
        )

    def _queue(self, layout: Layout) -> Queue | None:
        """Returns the collectives of sharded weights along the stages."""
        if not layout.weight_policy.shards_weights or self._groups.unequal or layout.axes.expert_parts > 1:
            return None
        prices = self._units.collectives(layout, self._groups.kinds_of(layout.group)[0])
        made_for = self._units.made_for(layout.captured)
        return self._collectives.queue(layout, prices, self._stages.ends(layout), made_for)

    def update_s(self, layout: Layout) -> float:
        """Returns a lower bound of the optimizer's seconds: those of an average device."""
        if layout.hosted:
            return 0.0
        axes, pp = layout.axes, layout.axes.pp
        each = float(self._memory.bytes_of(layout)[1]) / pp / layout.updaters
        works = [
            (device, self._units.update(layout, device)) for device in self._groups.kinds_of(layout.group)
        ]
        units = 0, len(self._units.graph(layout).units)
        return min(
            default_of(device).update_s(work.moved_per_gradient * each, device)
            + work.products_s(units, layout, device) / (pp * axes.product_parts * axes.expert_parts)
            for device, work in works
        )

    # -- unequal devices --

    def fleet(self, layout: Layout, recompute: Sequence[Recompute] = (KEEP.name,)) -> Fleet | None:
        """Returns unequal groups as a fleet; None where all are equal, or seconds depend on where a
        stage is.
        """
        if not self._groups.unequal or layout.hosted:
            return None
        options = whole_stage(recompute)
        return self._cache.once(("fleet", layout, *options), lambda: self._made_fleet(layout, options))

    def _made_fleet(self, layout: Layout, recompute: Sequence[Recompute]) -> Fleet | None:
        groups, room = self._groups.of_size(layout.group), self._groups.room(layout.group)
        if groups is None or room is None:
            return None
        kinds = [
            Groups.of(number, self._units.least(layout, device), least.memory_bytes)
            for number, device, least in zip(numbers(groups), first_of(groups), first_of(room), strict=True)
        ]
        least = self._memory.bytes_of(layout, slice(None))
        graded, weights = least.fixed + least.gradients, least.weights
        temporary = self._temporary_bytes(layout, groups.devices[0])
        updating = graded - least.casts + weights / max(float(weights[-1]), 1.0) * temporary
        crossing = self._cache.once(
            ("crossing", *model_key(layout)), lambda: Crossing.of(self._units.of_rank(layout)[0])
        )
        held = crossing.shared(layout.axes.token_parts, least.fixed, graded, least.saved, updating)
        how = layout.schedule, layout.microbatches
        return Fleet(kinds, held, self._units.work(layout), how, saves_memory(recompute))

    def _temporary_bytes(self, layout: Layout, device: Device) -> float:
        """Returns what the optimizer's step takes besides states, on all devices of a pipeline together."""
        parameters, style = self._units.graph(layout).parameters, style_of(device.kind)
        if style == "foreach":
            size = sum(map(self._optimizer.list_bytes, parameters))
        else:
            size = self._optimizer.step_bytes(parameters, style)
        return size / (layout.axes.product_parts * layout.shards)
