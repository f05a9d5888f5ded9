"""Prices units: what is the model that one rank of a layout has, and how long does each of its units compute?

A layout that divides work over devices has its own seconds (costs/parallel_times.py). A device of another
kind than the one on which the model was timed has those seconds times the ratio that the roofline predicts,
unit by unit. All is unit by unit here; stage_tables.py cuts models of very many units in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Device
from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.planner.bounds.step_time import PrefixTimes, made_for, prefix
from outsize.planner.costs.cache import Cache, Key
from outsize.planner.costs.device_scaling import on_kind
from outsize.planner.costs.parallel_times import Sharing, WeightCollectives, routed_times, split_times
from outsize.planner.costs.stage_edges import crossing_bytes, flows
from outsize.planner.costs.unit_times import UnitSeconds, fastest
from outsize.planner.evaluate.device_groups import DeviceGroups
from outsize.planner.layout.expert_parallel import experts_share, of_expert_rank
from outsize.planner.layout.layout import Layout
from outsize.planner.layout.tensor_parallel import of_rank, styled
from outsize.planner.memory.optimizer_states import OptimizerBytes, style_of
from outsize.planner.memory.update_work import UpdateWork
from outsize.planner.offload.host_traffic import StreamedBlocks, fetching

Model = tuple[ModelGraph, Profile]
Models = Mapping[int, Model]
"""Maps the microbatches of the whole batch to the model at that size, with its costs."""


@final
class UnitPrices:
    """Answers for the units of one model on the devices of one cluster."""

    def __init__(self, models: Models, groups: DeviceGroups, optimizer: OptimizerBytes, cache: Cache) -> None:
        self.models, self._groups, self._optimizer, self._cache = models, groups, optimizer, cache

    def graph(self, layout: Layout) -> ModelGraph:
        """Returns the model at the layout's microbatch size, unit by unit."""
        return self._of_expert_rank(layout)[0]

    def whole(self, layout: Layout, device: Device) -> tuple[ModelGraph, Profile, UnitSeconds]:
        """Returns the model unit by unit as one rank has it, with its seconds on such a device."""
        return *self.of_rank(layout), self.seconds(layout, device)

    def of_rank(self, layout: Layout) -> Model:
        """Returns the model as one tensor-parallel rank has it."""
        return self._cache.once(
            ("model of a rank", *model_key(layout)),
            lambda: of_rank(self._of_expert_rank(layout), layout.axes.product_parts, layout.sequence),
        )

    def _of_expert_rank(self, layout: Layout) -> Model:
        """Returns the model as one rank has it that holds some of the experts."""
        captured, ep = layout.captured, layout.axes.expert_parts
        return self._cache.once(
            ("model of experts", captured, ep), lambda: of_expert_rank(self.models[captured], ep)
        )

    def message_bytes(self, layout: Layout) -> NDArray[np.float64]:
        """Returns what crosses each cut for a microbatch, and before the first unit the gradients that come
        back to it.
        """
        return self._cache.once(("messages", *spread_key(layout)), lambda: self._message_bytes(layout))

    def _message_bytes(self, layout: Layout) -> NDArray[np.float64]:
        graph, _ = self.of_rank(layout)
        message_bytes = crossing_bytes(graph) / layout.axes.token_parts
        message_bytes[0] = sum(flow.size_bytes for flow in flows(graph) if flow.step and flow.gradient)
        return message_bytes

    def sharing(self, layout: Layout) -> Sharing:
        """Returns what ranks of tensor and context parallelism divide, and what they send each other."""
        graph, _ = self.models[layout.captured]  # What is divided is the same in ranks with experts.
        return self._cache.once(
            ("sharing", layout.captured, layout.sequence),
            lambda: Sharing.of(styled(graph, layout.sequence)),
        )

    def work(self, layout: Layout) -> PrefixTimes:
        """Returns the least seconds of all units, not of pieces, on the fastest devices."""
        kinds = self._groups.kinds_of(layout.group)

        def made() -> PrefixTimes:
            costs = [self.least(layout, device) for device in kinds]
            work = PrefixTimes.along(self.made_for(layout.captured), fastest(costs))
            if not layout.pairs or len(kinds) > 1:
                return work
            return replace(work, hidden=prefix(self.seconds(layout, kinds[0]).total - costs[0].total))

        key = *seconds_key(layout), layout.pairs, *(device.kind for device in kinds)
        return self._cache.once(("work", *key), made)

    def made_for(self, captured: int) -> NDArray[np.int64]:
        """Returns the first unit of each value's way backward (bounds/step_time.py)."""
        return self._cache.once(("made for", captured), lambda: made_for(self.models[captured][0]))

    def seconds(self, layout: Layout, device: Device) -> UnitSeconds:
        """Returns the seconds of each unit of a layout on such a device."""
        return self._cache.once(
            ("seconds", *seconds_key(layout), device.kind), lambda: self._seconds(layout, device)
        )

    def least(self, layout: Layout, device: Device) -> UnitSeconds:
        """Returns the seconds below which units are in no stage: where forwards run together with backwards,
        what ranks exchange may hide.
        """
        seconds = self.seconds(layout, device)
        return seconds.paired() if layout.pairs else seconds

    def _seconds(self, layout: Layout, device: Device) -> UnitSeconds:
        if not layout.hosted or layout.microbatch_ranks != 1:
            return self._routed(layout, device)
        # With recompute a unit computes for longer and waits for less: a lower bound takes the minimum of
        # both.
        blocks, cluster = self.blocks(layout, device), self._groups.cluster
        return fastest([fetching(blocks, layout, cluster, again) for again in (False, True)])

    def _routed(self, layout: Layout, device: Device) -> UnitSeconds:
        """Returns the seconds of a device of a group that divides layers, sequences or experts; layouts share
        them.
        """
        axes, times = layout.axes, self._shared(layout, device)
        if axes.expert_parts == 1:
            return times
        whole, _ = self.models[layout.captured]
        key = layout.captured, axes.within_stages, layout.splits_backward, device.kind
        return self._cache.once(
            ("seconds of experts", *key),
            lambda: routed_times(whole, times, axes, self._groups.alike(device)),
        )

    def _shared(self, layout: Layout, device: Device) -> UnitSeconds:
        """Returns the seconds of a device of a tensor- and context-parallel group."""
        alone = self.alone(layout.captured, device)
        axes, alike = layout.axes, self._groups.alike(device)
        if layout.microbatch_ranks == 1:
            return alone
        shared = axes.product_parts, axes.token_parts, layout.sequence
        key = layout.captured, *shared, layout.splits_backward, device.kind
        return self._cache.once(
            ("seconds of shared layers", *key),
            lambda: split_times(self.sharing(layout), alone, layout, alike),
        )

    def alone(self, captured: int, device: Device) -> UnitSeconds:
        """Returns the seconds on one device of this kind."""
        return self._cache.once(
            ("seconds alone", captured, device.kind),
            lambda: on_kind(*self.models[captured], self._groups.cluster.devices[0], device),
        )

    def blocks(self, layout: Layout, device: Device) -> StreamedBlocks:
        """Returns the blocks in which such a device gets weights from its host."""
        model, captured = self.models[layout.captured], layout.captured
        return self._cache.once(
            ("blocks", captured, device.kind),
            lambda: StreamedBlocks.of(*model, self.alone(captured, device), self._optimizer),
        )

    def collectives(self, layout: Layout, device: Device) -> WeightCollectives:
        """Returns the prices of collectives among the replicas of a stage on such a device."""

        def made() -> WeightCollectives:
            experts = experts_share(self.graph(layout)) if layout.axes.expert_parts > 1 else 0.0
            return WeightCollectives(layout, self._groups.alike(device), experts)

        key = layout.axes, layout.shards, device.kind, device.memory_bytes
        return self._cache.once(("collectives", *key), made)

    def update(self, layout: Layout, device: Device) -> UpdateWork:
        """Returns the work of the optimizer's step on such a device."""
        style = style_of(device.kind)
        return self._cache.once(
            ("update", layout.captured, style),
            lambda: UpdateWork.of(self.graph(layout), self._optimizer, style),
        )


def model_key(layout: Layout) -> Key:
    """Returns what changes the model of a rank."""
    return layout.captured, layout.axes.product_parts, layout.sequence, layout.axes.expert_parts


def seconds_key(layout: Layout) -> Key:
    """Returns what changes the seconds of a unit."""
    axes, hosted = layout.axes, layout.hosted
    where = (layout.weights, layout.schedule, axes.pp, layout.microbatches) if hosted else ()
    splits = axes.product_parts > 1 and layout.splits_backward
    return layout.captured, axes.within_stages, layout.sequence, splits, *where


def spread_key(layout: Layout) -> Key:
    """Returns what changes the seconds or the bytes of a unit."""
    return layout.weights, *seconds_key(layout)
