"""Builds a model's tables for every layout that is asked for: each is built once, and only when it is needed.

A layout that divides work over devices has its own seconds and bytes (costs/parallel_times.py,
memory/sharded.py). A device of another kind than the one on which the model was timed has those seconds times
the ratio that the roofline predicts, unit by unit. Models of very many units are cut in pieces
(costs/coarsening.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Final, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster, Device
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.links import Link
from outsize.ir.profile import Profile
from outsize.planner.bounds.chain import Queue, Room
from outsize.planner.bounds.collectives import CollectiveBounds
from outsize.planner.bounds.memory import MemoryBounds
from outsize.planner.bounds.step_time import PrefixTimes, StepBound, made_for
from outsize.planner.costs.coarsening import (
    between_blocks,
    coarse_graph,
    coarse_profile,
    crossing_bytes,
    pieces,
    refined_around,
)
from outsize.planner.costs.device_scaling import on_kind
from outsize.planner.costs.efficiency import default_of
from outsize.planner.costs.parallel_times import Sharing, WeightCollectives, routed_times, split_times
from outsize.planner.costs.stage_edges import flows
from outsize.planner.costs.unit_times import UnitSeconds, fastest
from outsize.planner.heterogeneous.assignment import excess_bytes, first_of, numbers, orders, taken
from outsize.planner.heterogeneous.bounds import Crossing, Fleet, Groups
from outsize.planner.heterogeneous.kinds_in_a_row import KindsInARow
from outsize.planner.layout.expert_parallel import experts_share, of_expert_rank
from outsize.planner.layout.layout import Layout, grouped, of_kind
from outsize.planner.layout.tensor_parallel import of_rank, styled
from outsize.planner.memory.headroom import with_usable_memory
from outsize.planner.memory.optimizer_states import optimizer_bytes, style_of
from outsize.planner.memory.range_tables import owned_gradients, owners_update
from outsize.planner.memory.recomputed_blocks import block_ranges
from outsize.planner.memory.sharded import KeyBytes, UnshardedBytes, device_tables
from outsize.planner.memory.update_work import UpdateWork
from outsize.planner.offload.host_traffic import StreamedBlocks, fetching, hosted
from outsize.planner.partition.feasibility import none_fits
from outsize.planner.partition.stage_prices import Pipeline, PricedModel
from outsize.planner.partition.stage_weights import Demand, demands
from outsize.policies.activations import (
    KEEP,
    SELECTIVE,
    WHOLE_STAGE,
    Recompute,
    activation_policy,
    any_offloads,
    saves_memory,
    whole_stage,
)

Candidates = Mapping[int, tuple[ModelGraph, Profile]]
"""Maps the microbatches of the whole batch to the model at that size, with its costs."""
Key = tuple[object, ...]
Kept = TypeVar("Kept")
# Up to this many units every cut is tried; larger models are cut into this many pieces.
PIECES: Final = 400
# A layout whose lower bound exceeds another's likely step by this factor is unlikely to win.
BEYOND: Final = 1.08
# Where kinds in a row have a step this near to the lower bound, no other order is looked for.
NEAR: Final = 1.05
# A layout is arranged up to this often: each time with what the account found too much.
ATTEMPTS: Final = 3


@final
class CostTables:
    """Builds the cases and pipelines of one model on one cluster."""

    def __init__(
        self,
        candidates: Candidates,
        cluster: Cluster,
        optimizer: str,
        most: int = PIECES,
        ends: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        idle: bool = False,
    ) -> None:
        """Takes the models by microbatches; `idle`: some unequal devices may be left out."""
        self._candidates, self._cluster, self._optimizer = candidates, cluster, optimizer
        self._rooms, self._most = with_usable_memory(cluster), most
        self._unequal, self._idle = cluster.unequal, idle
        self._blocks: dict[Key, StreamedBlocks] = {}
        self._groups: dict[int, Cluster | None] = {}
        self._most_bytes: dict[int, tuple[int, ...]] = {}
        self._kinds = tuple({device.kind: device for device in cluster.devices}.values())
        self._ends = dict(ends)
        self._costs: dict[Key, UnitSeconds] = {}
        self._made: dict[int, NDArray[np.int64]] = {}
        self._updates: dict[Key, UpdateWork] = {}
        self._ranks: dict[Key, tuple[ModelGraph, Profile]] = {}
        self._expert_ranks: dict[Key, tuple[ModelGraph, Profile]] = {}
        self._shares: dict[tuple[int, bool], Sharing] = {}
        self._works: dict[Key, PrefixTimes] = {}
        self._cases: dict[Key, PricedModel] = {}
        self._alike: dict[Key, Cluster] = {}
        self._collectives: dict[Key, WeightCollectives] = {}
        self._fleets: dict[Key, Fleet | None] = {}
        self._crossing: dict[Key, Crossing] = {}
        self._cuts: dict[Layout, tuple[int, ...]] = {}
        self._demands: dict[Key, tuple[Demand | None, ...]] = {}
        self._kept: dict[Key, object] = {}
        self._reached_s = inf
        self._least = MemoryBounds(candidates, optimizer_bytes(optimizer), not self._unequal)
        self._collective_bounds = CollectiveBounds(candidates, self._least)

    def pipeline(
        self, layout: Layout, recompute: Sequence[Recompute], places: Sequence[int] | None = None
    ) -> Pipeline | None:
        """Returns the pipeline of the layout with its tables, None without room; `places[stage]` is its rank
        among the groups.
        """
        room = self._grouped(layout.group)
        if room is None:
            return None
        ranks = layout.ranks if places is None else tuple(places)
        groups = grouped(self._cluster, layout.group)
        assert groups is not None, "the groups with usable memory exist"
        devices = [groups.devices[rank] for rank in ranks]
        options = tuple(tuple(self.case(layout, device, again) for again in recompute) for device in devices)
        collectives = tuple(self._collectives_of(layout, device) for device in devices)
        return Pipeline(layout, groups, room, ranks, options, collectives, demand=self.demands(layout)[0])

    def demands(self, layout: Layout) -> tuple[Demand | None, ...]:
        """Returns which weights the stages of a layout need, the preferred demand first."""
        if layout.hosted or layout.stages == 1 or self.is_arranged(layout):
            return (None,)
        key = layout.captured, layout.axes.pp, self.ends(layout)
        if key not in self._demands:
            self._demands[key] = demands(self.graph(layout), self.ends(layout), layout.axes.pp)
        return self._demands[key]

    def _collectives_of(self, layout: Layout, device: Device) -> WeightCollectives:
        """Returns the prices of collectives among the replicas of a stage on such a device."""
        key = layout.axes, layout.shards, device.kind, device.memory_bytes
        if key not in self._collectives:
            experts = experts_share(self.graph(layout)) if layout.axes.ep > 1 else 0.0
            self._collectives[key] = WeightCollectives(layout, self._like(device), experts)
        return self._collectives[key]

    def _like(self, device: Device) -> Cluster:
        """Returns all devices of the same kind: a group is among them."""
        if not self.unequal:
            return self._cluster
        key = device.kind, device.memory_bytes
        if key not in self._alike:
            self._alike[key] = of_kind(self._cluster, *key)
        return self._alike[key]

    def _grouped(self, group: int) -> Cluster | None:
        """Returns a device for each group, with the memory that a peak may take."""
        if group not in self._groups:
            self._groups[group] = grouped(self._rooms, group)
        return self._groups[group]

    def _room_bytes(self, group: int) -> tuple[int, ...]:
        """Returns the bytes that peaks may take of the first device of each group, in descending order."""
        if group not in self._most_bytes:
            groups = self._grouped(group)
            devices = self._rooms.devices[::group] if groups is None else groups.devices
            self._most_bytes[group] = tuple(sorted((d.memory_bytes for d in devices), reverse=True))
        return self._most_bytes[group]

    @property
    def unequal(self) -> bool:
        """Returns whether the order of the devices matters."""
        return self._unequal

    def pipelines(self, layout: Layout, recompute: Sequence[Recompute]) -> Iterator[Pipeline]:
        """Yields the pipeline in rank order, and where devices differ in orders that are balanced."""
        if self.is_arranged(layout):
            yield from self._arranged(layout, recompute)
            return
        in_order = self.pipeline(layout, recompute)
        if in_order is None:
            return
        for pipeline in (in_order, *(self._ordered(layout, recompute) if self.unequal else ())):
            yield pipeline
            if layout.chunks > 1:
                yield replace(pipeline, even=False)
                yield from (
                    replace(pipeline, even=False, first_option=option) for option in range(1, len(recompute))
                )

    def _ordered(self, layout: Layout, recompute: Sequence[Recompute]) -> Iterator[Pipeline]:
        """Yields pipelines with other groups at the stages, or with fewer of them."""
        groups = grouped(self._cluster, layout.group)
        assert groups is not None, "there is a pipeline in rank order"
        cases = [self.case(layout, device, recompute[-1]) for device in first_of(groups)]
        once = layout.chunks == 1
        for places in orders(layout.on(layout.axes.pp), groups, cases, self._idle and once):
            fewer = layout.on(len(places)) if once else layout
            ranks = tuple(places[rank] for rank in fewer.ranks)
            if ranks != layout.ranks and (pipeline := self.pipeline(fewer, recompute, ranks)):
                yield pipeline

    def _arranged(self, layout: Layout, recompute: Sequence[Recompute]) -> Iterator[Pipeline]:
        """Yields a model of very many units, cut unit by unit as kinds are assigned, then in those pieces."""
        fleet, groups = self._fleet(layout, recompute), grouped(self._cluster, layout.group)
        if fleet is None or groups is None:
            return
        floor_s, made, over = self.floor_s(layout, recompute), None, dict[int, float]()
        for _ in range(ATTEMPTS):
            if (arrangement := self._arrangement(layout, fleet, groups, floor_s, over)) is None:
                break
            fewer = layout.on(len(arrangement[0]))
            self._cuts[fewer] = arrangement[1]
            made = self.pipeline(fewer, recompute, taken(arrangement[0], groups))
            assert made is not None, "there are groups"
            if not (more := excess_bytes(made, arrangement[0])):
                break
            over = {kind: over.get(kind, 0.0) + more.get(kind, 0.0) for kind in {*over, *more}}
        yield from [made] if made is not None else []

    def _arrangement(
        self, layout: Layout, fleet: Fleet, groups: Cluster, floor_s: float, over: Mapping[int, float]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Returns the kinds of stages and their bounds: kinds in a row where that is near the floor, and
        otherwise the better of it and any order.
        """

        def links(kinds: Sequence[int]) -> Sequence[Link]:
            ranks = taken(kinds, groups)
            return [groups.link(ranks[stage - 1], rank) for stage, rank in enumerate(ranks)]

        fleet.spare(over)
        m = layout.microbatches
        message_bytes = self.kept(("messages", *_spread_key(layout)), lambda: self._message_bytes(layout))
        in_a_row = KindsInARow(fleet, links, message_bytes)
        row = in_a_row.best(floor_s / (m + layout.axes.pp))
        if row is not None and m * row.period_s <= NEAR * floor_s:
            return row.kinds, row.bounds
        mixed = fleet.arranged(floor_s, over)
        if row is None or (mixed is not None and in_a_row.period_s(*mixed) < row.period_s):
            return mixed
        return row.kinds, row.bounds

    def _message_bytes(self, layout: Layout) -> NDArray[np.float64]:
        """Returns what crosses each cut for a microbatch, and before the first unit the gradients that come
        back to it.
        """
        graph, _ = self._of_rank(layout)
        message_bytes = crossing_bytes(graph) / layout.axes.cp
        message_bytes[0] = sum(flow.size_bytes for flow in flows(graph) if flow.step and flow.gradient)
        return message_bytes

    def finer(self, layout: Layout, bounds: Sequence[int]) -> CostTables:
        """Returns tables that are unit by unit around the bounds that were found for a layout."""
        return self._with_ends(layout, refined_around(self.ends(layout), bounds))

    def between_blocks(self, layout: Layout) -> CostTables:
        """Returns tables whose pieces are the model's repeated blocks."""
        return self._with_ends(layout, between_blocks(self.graph(layout)))

    def _with_ends(self, layout: Layout, ends: tuple[int, ...]) -> CostTables:
        pieces = {layout.captured: ends}
        return CostTables(self._candidates, self._cluster, self._optimizer, self._most, pieces)

    def graph(self, layout: Layout) -> ModelGraph:
        """Returns the model at the layout's microbatch size, unit by unit."""
        return self._model(layout)[0]

    def whole(self, layout: Layout, device: Device) -> tuple[ModelGraph, Profile, UnitSeconds]:
        """Returns the model unit by unit, with its seconds on such a device."""
        return *self._model(layout), self._seconds(layout, device)

    def kept(self, key: Key, make: Callable[[], Kept]) -> Kept:
        """Returns what was made of these tables under a key, which is made once."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(Kept, self._kept[key])

    def by_blocks(self, layout: Layout) -> bool:
        """Returns whether stages may be recomputed block by block besides as a whole: hosted ones
        always are.
        """
        return not layout.hosted and not self.unequal

    def exact(self, layout: Layout) -> bool:
        """Returns whether every cut of the model is tried."""
        return len(self.ends(layout)) == len(self.graph(layout).units) + 1

    def has_pieces(self, layout: Layout) -> bool:
        """Returns whether the model is cut into enough pieces for the stages of a layout."""
        return self.is_arranged(layout) or layout.stages < len(self.ends(layout))

    def is_arranged(self, layout: Layout) -> bool:
        """Returns whether the cuts follow from which kind of device takes which units."""
        return self.unequal and self._idle and layout.chunks == 1 and not self.exact(layout)

    def may_be_arranged(self, layout: Layout) -> bool:
        """Returns whether it is seen at once that some order of kinds fits, where cuts follow from it."""
        fleet = self._fleet(layout, WHOLE_STAGE) if self.is_arranged(layout) else None
        return fleet is None or fleet.surely_fits

    def ends(self, layout: Layout) -> tuple[int, ...]:
        """Returns the first unit of each piece, then the number of units."""
        if layout in self._cuts:
            return self._cuts[layout]
        if layout.captured not in self._ends:
            seconds = self._alone(layout.captured, self._cluster.devices[0])
            graph, _ = self._candidates[layout.captured]
            self._ends[layout.captured] = pieces(graph, seconds, self._most)
        return self._ends[layout.captured]

    def work(self, layout: Layout) -> PrefixTimes:
        """Returns the seconds of all units, not of pieces, on the fastest devices."""
        kinds = self._kinds_of(layout)
        key = *_seconds_key(layout), *(device.kind for device in kinds)
        if key not in self._works:
            costs = [self._seconds(layout, device) for device in kinds]
            self._works[key] = PrefixTimes.along(self._made_for(layout.captured), fastest(costs))
        return self._works[key]

    def may_fit(self, layout: Layout, recompute: Sequence[Recompute]) -> bool:
        """Returns whether all devices together have room, judged by sums: no table is needed."""
        return self._least.may_fit(layout, recompute, self._room_bytes(layout.group))

    def refuted(self, layout: Layout, recompute: Sequence[Recompute]) -> bool:
        """Returns whether no cut of a layout fits in these options, where that is seen at once: each of equal
        devices has one stage.
        """
        if layout.hosted or layout.chunks > 1 or layout.actions or self.unequal or any_offloads(recompute):
            return False
        options = tuple(recompute)
        return self.kept(("refuted", layout, options), lambda: self._none_fits(layout, options))

    def _none_fits(self, layout: Layout, recompute: Sequence[Recompute]) -> bool:
        room = self._grouped(layout.group)
        cases = [self.case(layout, self._cluster.devices[0], again) for again in recompute]
        return room is not None and none_fits(
            cases, layout.schedule, [room.devices[0].memory_bytes] * layout.stages
        )

    def least_s(self, layout: Layout) -> float:
        """Returns a lower bound of every step: all work, with the recompute that memory forces, on all
        devices.
        """
        m, pp, work = layout.microbatches, layout.axes.pp, self.work(layout)
        paced_s = (work.total_s + self.recompute_s(layout)) / pp
        fleet = self._fleet(layout, WHOLE_STAGE)
        if fleet is not None:
            self._reached_s = min(self._reached_s, BEYOND * fleet.likely_s)
        return max(work.least_s(pp, m), m * paced_s, fleet.least_s if fleet is not None else 0.0)

    def floor_without_memory_s(self, layout: Layout) -> float:
        """Returns a lower bound of the step of any cut on equal devices, whatever it holds."""
        pp = layout.axes.pp
        return self.work(layout).floor_s(layout.schedule, layout.stages, pp, layout.microbatches)

    def floor_s(self, layout: Layout, recompute: Sequence[Recompute], most_s: float = inf) -> float:
        """Returns a lower bound of the step of any cut that fits, with a stage on each device, in these
        options.

        On unequal devices it holds for any order; it is not sought above `most_s`, or above another layout's
        likely step.
        """
        fleet = self._fleet(layout, recompute)
        if fleet is None:
            return self.bound(layout, recompute).sharpened()
        if self._grouped(layout.group) is None:
            return inf
        floor_s = fleet.floor_s(self._reached_s if most_s == inf else most_s)
        self._reached_s = min(self._reached_s, BEYOND * floor_s)
        return floor_s

    def bound(self, layout: Layout, recompute: Sequence[Recompute]) -> StepBound:
        """Returns the same as a bound that is sharpened as far as it is needed; on unequal devices it is."""
        if self._fleet(layout, recompute) is not None:
            return StepBound(self.floor_s(layout, recompute))
        room, queue = self._room(layout, recompute), self._queue(layout)
        return self.work(layout).bound(
            layout.schedule, layout.stages, layout.axes.pp, layout.microbatches, room, queue
        )

    def _fleet(self, layout: Layout, recompute: Sequence[Recompute] = (KEEP.name,)) -> Fleet | None:
        """Returns unequal groups as a fleet; None where all are equal, or seconds depend on where a
        stage is.
        """
        if not self.unequal or layout.hosted:
            return None
        recompute = whole_stage(recompute)
        key = layout, *recompute
        if key not in self._fleets:
            self._fleets[key] = self._made_fleet(layout, recompute)
        return self._fleets[key]

    def _made_fleet(self, layout: Layout, recompute: Sequence[Recompute]) -> Fleet | None:
        groups, room = grouped(self._cluster, layout.group), self._grouped(layout.group)
        if groups is None or room is None:
            return None
        kinds = [
            Groups.of(number, self._seconds(layout, device), least.memory_bytes)
            for number, device, least in zip(numbers(groups), first_of(groups), first_of(room), strict=True)
        ]
        optimizer, graph = optimizer_bytes(self._optimizer), self.graph(layout)
        least, sharing = self._least.bytes_of(layout, slice(None)), layout.axes.tp * layout.shards
        graded, weights = least.fixed + least.gradients, least.weights
        style = style_of(groups.devices[0].kind)
        together = sum(map(optimizer.list_bytes, graph.parameters)) if style == "foreach" else None
        temporary = (
            optimizer.step_bytes(graph.parameters, style) if together is None else together
        ) / sharing
        updating = graded - least.casts + weights / max(float(weights[-1]), 1.0) * temporary
        model = layout.captured, layout.axes.tp, layout.sequence, layout.axes.ep
        if model not in self._crossing:
            self._crossing[model] = Crossing.of(self._of_rank(layout)[0])
        held = self._crossing[model].shared(layout.axes.cp, least.fixed, graded, least.saved, updating)
        how = layout.schedule, layout.microbatches
        return Fleet(kinds, held, self.work(layout), how, saves_memory(recompute))

    def _kinds_of(self, layout: Layout) -> Sequence[Device]:
        """Returns a device of each kind that has such groups."""
        groups = grouped(self._cluster, layout.group) if self.unequal else None
        return self._kinds if groups is None else first_of(groups)

    def _room(self, layout: Layout, recompute: Sequence[Recompute]) -> Room | None:
        """Returns what each stage may hold; None where weights or seconds depend on which device it is."""
        if layout.hosted or len(self._kinds) > 1 or any_offloads(recompute):
            return None
        return self._least.room(layout, recompute, self._room_bytes(layout.group)[0])

    def recompute_s(self, layout: Layout) -> float:
        """Returns a lower bound of the forward seconds of a microbatch that memory forces to be
        recomputed.
        """
        return self._least.recompute_s(layout, self.work(layout), self._room_bytes(layout.group))

    def collectives_s(self, layout: Layout) -> float:
        """Returns a lower bound of a step: its collectives of weights and gradients on an average rank."""
        if layout.hosted or layout.replicas * layout.axes.cp == 1 or layout.axes.ep > 1:
            return 0.0  # Experts are summed over fewer ranks than the rest.
        work, devices = self.work(layout), self._kinds_of(layout)
        return min(
            self._collective_bounds.average_s(layout, work, self._collectives_of(layout, device))
            for device in devices
        )

    def _queue(self, layout: Layout) -> Queue | None:
        """Returns the collectives of sharded weights along the stages."""
        if not layout.weight_policy.shards_weights or self.unequal or layout.axes.ep > 1:
            return None
        prices = self._collectives_of(layout, self._kinds_of(layout)[0])
        return self._collective_bounds.queue(
            layout, prices, self.ends(layout), self._made_for(layout.captured)
        )

    def update_s(self, layout: Layout) -> float:
        """Returns a lower bound of the optimizer's seconds: those of an average device."""
        if layout.hosted:
            return 0.0
        axes, pp = layout.axes, layout.axes.pp
        each = float(self._least.bytes_of(layout)[1]) / pp / layout.updaters
        works = [(device, self._update_work(layout, device)) for device in self._kinds_of(layout)]
        units = 0, len(self.graph(layout).units)
        return min(
            default_of(device).update_s(work.moved_per_gradient * each, device)
            + work.products_s(units, layout, device) / (pp * axes.tp * axes.ep)
            for device, work in works
        )

    def _update_work(self, layout: Layout, device: Device) -> UpdateWork:
        key = layout.captured, style_of(device.kind)
        if key not in self._updates:
            self._updates[key] = UpdateWork.of(self.graph(layout), optimizer_bytes(self._optimizer), key[1])
        return self._updates[key]

    def case(self, layout: Layout, device: Device, recompute: Recompute) -> PricedModel:
        """Returns tables of the layout's units on such a device; where a policy lists units, all of them are
        recomputed, block by block.
        """
        key = (*_spread_key(layout), layout.shards, layout.microbatches, device.kind, recompute)
        key, policy = (*key, self._cuts.get(layout)), activation_policy(recompute)
        if key not in self._cases:
            if layout.hosted:
                whole, blocks = self._whole(layout, device), self._blocks_of(layout, device)
                self._cases[key] = hosted(whole, blocks, self.ends(layout), layout, self._cluster, recompute)
            elif policy.keeps_all or policy.lists_units:
                self._cases[key] = self._built(layout, device, recompute)
            else:
                self._cases[key] = self.case(layout, device, KEEP.name).with_recompute(recompute, device)
        return self._cases[key]

    def _built(self, layout: Layout, device: Device, recompute: Recompute) -> PricedModel:
        base = (*_spread_key(layout), layout.shards, device.kind, recompute, self._cuts.get(layout))
        if base not in self._cases:
            whole, seconds = self._whole(layout, device), self._seconds(layout, device)
            if activation_policy(recompute).lists_units:
                whole, seconds = self._in_blocks(layout, device), seconds.recomputed()
            styled, gathered = self.graph(layout).tensor is not None, self._gathered(layout)
            ranges = device_tables(whole.ranges, layout, self._keys(layout, recompute), gathered, styled)
            optimizer = optimizer_bytes(self._optimizer)
            if optimizer.couples and layout.shards > 1:
                ranges = replace(ranges, update=owners_update(whole.graph, optimizer, layout.shards))
            self._cases[base] = replace(whole, ranges=ranges).with_seconds(seconds.merged(self.ends(layout)))
        return replace(self._cases[base], microbatches=layout.microbatches)

    def _keys(self, layout: Layout, recompute: Recompute) -> KeyBytes:
        """Returns what context parallelism gathers in each piece of the model, where the layout has it."""
        units, starts = self.graph(layout).units, self.ends(layout)[:-1]
        per_unit = np.zeros(len(units), np.int64)
        sums = np.array([u.weight_sum_bytes for u in units], np.int64)
        for unit, size in self._sharing(layout).keys.items() if layout.axes.cp > 1 else ():
            per_unit[unit] = size // layout.axes.tp
        whole = np.add.reduceat(per_unit, starts), np.maximum.reduceat(sums, starts)
        return KeyBytes(*whole, kept=activation_policy(recompute).keeps_all)

    def _gathered(self, layout: Layout) -> UnshardedBytes | None:
        """Returns what is gathered for a moment, where weights are sharded."""
        if not layout.weight_policy.shards_weights:
            return None
        graph, _ = self._of_rank(layout)
        left = layout.axes.tp if graph.tensor is None else 1
        return UnshardedBytes.of(graph, optimizer_bytes(self._optimizer), self.ends(layout), left)

    def _of_rank(self, layout: Layout) -> tuple[ModelGraph, Profile]:
        """Returns the model as one tensor-parallel rank has it."""
        key = layout.captured, layout.axes.tp, layout.sequence, layout.axes.ep
        if key not in self._ranks:
            self._ranks[key] = of_rank(self._model(layout), layout.axes.tp, layout.sequence)
        return self._ranks[key]

    def _model(self, layout: Layout) -> tuple[ModelGraph, Profile]:
        """Returns the model as one rank has it that holds some of the experts."""
        key = layout.captured, layout.axes.ep
        if key not in self._expert_ranks:
            self._expert_ranks[key] = of_expert_rank(self._candidates[layout.captured], layout.axes.ep)
        return self._expert_ranks[key]

    def _whole(self, layout: Layout, device: Device) -> PricedModel:
        """Returns the case of the model as one tensor-parallel rank runs it: bytes are divided from here."""
        key = "whole", layout.captured, layout.axes.tp, layout.axes.ep, layout.sequence, style_of(device.kind)
        key = (*key, self._cuts.get(layout))
        if key not in self._cases:
            ends = self.ends(layout)
            graph, profile = self._of_rank(layout)
            on_device = profile.model_copy(update={"device": device.kind})
            costs = coarse_profile(on_device, ends)
            case = PricedModel.of(coarse_graph(graph, ends), costs, layout.captured, self._optimizer)
            split = np.array([unit.backward_weight_s > 0 for unit in profile.units], np.int64)
            self._cases[key] = replace(case, split_units=np.add.reduceat(split, ends[:-1]))
        return self._cases[key]

    def _in_blocks(self, layout: Layout, device: Device) -> PricedModel:
        """Returns the same when all units are recomputed block by block."""
        key = "blocks", layout.captured, layout.axes.tp, layout.axes.ep, layout.sequence, device.kind
        key = (*key, self._cuts.get(layout))
        if key not in self._cases:
            whole = self._whole(layout, device)
            graph, profile = self._of_rank(layout)
            gradients = owned_gradients(graph, optimizer_bytes(self._optimizer))
            ranges = block_ranges(whole.ranges, graph, profile, gradients, self.ends(layout))
            self._cases[key] = replace(whole, ranges=ranges, recompute=SELECTIVE.name)
        return self._cases[key]

    def _seconds(self, layout: Layout, device: Device) -> UnitSeconds:
        key = (*_seconds_key(layout), device.kind)
        if key not in self._costs:
            seconds = self._split(layout, device)
            if layout.hosted and layout.microbatch_ranks == 1:
                # With recompute a unit computes for longer and waits for less: a lower bound takes the
                # minimum of both.
                blocks = self._blocks_of(layout, device)
                seconds = fastest([fetching(blocks, layout, self._cluster, again) for again in (False, True)])
            self._costs[key] = seconds
        return self._costs[key]

    def _split(self, layout: Layout, device: Device) -> UnitSeconds:
        """Returns the seconds of a device of a group that divides layers, sequences or experts; layouts share
        them.
        """
        axes, times = layout.axes, self._shared(layout, device)
        if axes.ep == 1:
            return times
        key = "experts", layout.captured, axes.ep, axes.tp, axes.cp, layout.splits_backward, device.kind
        if key not in self._costs:
            whole, _ = self._candidates[layout.captured]
            self._costs[key] = routed_times(whole, times, axes, self._like(device))
        return self._costs[key]

    def _shared(self, layout: Layout, device: Device) -> UnitSeconds:
        """Returns the seconds of a device of a tensor- and context-parallel group."""
        alone = self._alone(layout.captured, device)
        axes, alike = layout.axes, self._like(device)
        if layout.microbatch_ranks == 1:
            return alone
        splits = layout.splits_backward
        key = "split", layout.captured, axes.tp, axes.cp, layout.sequence, splits, device.kind
        if key not in self._costs:
            self._costs[key] = split_times(self._sharing(layout), alone, layout, alike)
        return self._costs[key]

    def _blocks_of(self, layout: Layout, device: Device) -> StreamedBlocks:
        key = layout.captured, device.kind
        if key not in self._blocks:
            model, seconds = self._candidates[layout.captured], self._alone(layout.captured, device)
            self._blocks[key] = StreamedBlocks.of(*model, seconds, optimizer_bytes(self._optimizer))
        return self._blocks[key]

    def _alone(self, captured: int, device: Device) -> UnitSeconds:
        """Returns the seconds on one device of this kind."""
        key = "alone", captured, device.kind
        if key not in self._costs:
            self._costs[key] = on_kind(*self._candidates[captured], self._cluster.devices[0], device)
        return self._costs[key]

    def _made_for(self, captured: int) -> NDArray[np.int64]:
        if captured not in self._made:
            self._made[captured] = made_for(self._candidates[captured][0])
        return self._made[captured]

    def _sharing(self, layout: Layout) -> Sharing:
        key = layout.captured, layout.sequence
        if key not in self._shares:
            graph, _ = self._candidates[layout.captured]  # What is divided is the same in ranks with experts.
            self._shares[key] = Sharing.of(styled(graph, layout.sequence))
        return self._shares[key]


def _seconds_key(layout: Layout) -> Key:
    """Returns what changes the seconds of a unit."""
    axes, hosted = layout.axes, layout.hosted
    where = (layout.weights, layout.schedule, axes.pp, layout.microbatches) if hosted else ()
    splits = axes.tp > 1 and layout.splits_backward
    return layout.captured, axes.tp, axes.cp, axes.ep, layout.sequence, splits, *where


def _spread_key(layout: Layout) -> Key:
    """Returns what changes the seconds or the bytes of a unit."""
    return layout.weights, *_seconds_key(layout)
