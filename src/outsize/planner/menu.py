"""A model's tables for every layout that is asked for: each is built once, and only when it is wanted.

A layout that shares work between devices has seconds and bytes of its own (spread.py, sharding.py). A
device of another kind than the one the model was timed on has the seconds of that one, times what the
roofline says the two kinds differ by, unit by unit. Models of very many units are looked at in pieces
(coarse.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster, Device
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Recompute
from outsize.ir.profile import Profile
from outsize.planner.blockwise import block_ranges
from outsize.planner.coarse import around, coarse_graph, coarse_profile, pieces
from outsize.planner.divided import of_rank, styled
from outsize.planner.fleet import Crossing, Fleet, Groups
from outsize.planner.floor import Work, made_for
from outsize.planner.kinds import on_kind
from outsize.planner.layout import Layout, grouped, of_kind
from outsize.planner.least import Least
from outsize.planner.margin import rooms
from outsize.planner.offload import Blocks, fetching, hosted
from outsize.planner.optimizer import optimizer_bytes, style_of
from outsize.planner.order import excess_bytes, first_of, numbers, orders, taken
from outsize.planner.ranges import owned_gradients
from outsize.planner.reach import Room
from outsize.planner.seconds import UnitSeconds, fastest
from outsize.planner.sharding import Whole, shared
from outsize.planner.split import Case, Pipeline
from outsize.planner.spread import Sharing, spread, sync_s

Candidates = Mapping[int, tuple[ModelGraph, Profile]]
"""Microbatches of the whole batch -> the model at that size, with its costs."""
Key = tuple[object, ...]
# Units up to which every cut is looked at; beyond, so many pieces of them.
PIECES: Final = 400
# Times what another layout may take: no layout whose floor is above that is likely to win.
BEYOND: Final = 1.08
# Arrangements of a layout: each knows what the account of the one before found too much.
ATTEMPTS: Final = 3


@final
class Menu:
    """Cases and pipelines of one model on one cluster."""

    def __init__(
        self,
        candidates: Candidates,
        cluster: Cluster,
        optimizer: str,
        most: int = PIECES,
        ends: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        idle: bool = False,
    ) -> None:
        """`idle`: of unequal devices some may be left out."""
        self._candidates, self._cluster, self._optimizer = candidates, cluster, optimizer
        self._rooms, self._most = rooms(cluster), most
        self._unequal, self._idle = cluster.unequal, idle
        self._blocks: dict[Key, Blocks] = {}
        self._groups: dict[int, Cluster | None] = {}
        self._most_bytes: dict[int, tuple[int, ...]] = {}
        self._kinds = tuple({device.kind: device for device in cluster.devices}.values())
        self._ends = dict(ends)
        self._costs: dict[Key, UnitSeconds] = {}
        self._made: dict[int, NDArray[np.int64]] = {}
        self._shares: dict[tuple[int, bool], Sharing] = {}
        self._works: dict[Key, Work] = {}
        self._cases: dict[Key, Case] = {}
        self._alike: dict[Key, Cluster] = {}
        self._fleets: dict[Key, Fleet | None] = {}
        self._crossing: dict[int, Crossing] = {}
        self._cuts: dict[Layout, tuple[int, ...]] = {}
        self._reached_s = inf
        self._least = Least(candidates, optimizer_bytes(optimizer), not self._unequal)

    def pipeline(
        self, layout: Layout, recompute: Sequence[Recompute], places: Sequence[int] | None = None
    ) -> Pipeline | None:
        """The layout, if there is room, with its tables; `places[stage]` is its rank among the groups."""
        room = self._grouped(layout.group)
        if room is None:
            return None
        ranks = layout.ranks if places is None else tuple(places)
        groups = grouped(self._cluster, layout.group)
        assert groups is not None, "as there is room"
        devices = [groups.devices[rank] for rank in ranks]
        ways = tuple(tuple(self.case(layout, device, again) for again in recompute) for device in devices)
        return Pipeline(layout, groups, room, ranks, ways, tuple(map(self._like, devices)))

    def _like(self, device: Device) -> Cluster:
        """All devices of its kind: a group is among them."""
        if not self.unequal:
            return self._cluster
        key = device.kind, device.memory_bytes
        if key not in self._alike:
            self._alike[key] = of_kind(self._cluster, *key)
        return self._alike[key]

    def _grouped(self, group: int) -> Cluster | None:
        """A device for each group, with what a peak may take of it."""
        if group not in self._groups:
            self._groups[group] = grouped(self._rooms, group)
        return self._groups[group]

    def _room_bytes(self, group: int) -> tuple[int, ...]:
        """What peaks may take of the first device of each group, in descending order."""
        if group not in self._most_bytes:
            groups = self._grouped(group)
            devices = self._rooms.devices[::group] if groups is None else groups.devices
            self._most_bytes[group] = tuple(sorted((d.memory_bytes for d in devices), reverse=True))
        return self._most_bytes[group]

    @property
    def unequal(self) -> bool:
        """Whether the order of the devices matters."""
        return self._unequal

    def pipelines(self, layout: Layout, recompute: Sequence[Recompute]) -> Iterator[Pipeline]:
        """In rank order, and where devices differ in orders that are balanced."""
        if self.unequal and self._idle and layout.chunks == 1 and not self.exact(layout):
            yield from self._arranged(layout, recompute)
            return
        given = self.pipeline(layout, recompute)
        if given is None:
            return
        for found in (given, *(self._ordered(layout, recompute) if self.unequal else ())):
            yield found
            if layout.chunks > 1:
                yield replace(found, even=False)
                yield from (replace(found, even=False, first_way=way) for way in range(1, len(recompute)))

    def _ordered(self, layout: Layout, recompute: Sequence[Recompute]) -> Iterator[Pipeline]:
        """Other groups at the stages, or fewer of them."""
        groups = grouped(self._cluster, layout.group)
        assert groups is not None, "there is a pipeline in rank order"
        cases = [self.case(layout, device, recompute[-1]) for device in first_of(groups)]
        once = layout.chunks == 1
        for places in orders(layout.on(layout.axes.pp), groups, cases, self._idle and once):
            fewer = layout.on(len(places)) if once else layout
            ranks = tuple(places[rank] for rank in fewer.ranks)
            if ranks != layout.ranks and (found := self.pipeline(fewer, recompute, ranks)):
                yield found

    def _arranged(self, layout: Layout, recompute: Sequence[Recompute]) -> Iterator[Pipeline]:
        """Of a model of very many units: cut unit by unit as kinds are laid, then taken in those pieces."""
        fleet, groups = self._fleet(layout, recompute), grouped(self._cluster, layout.group)
        if fleet is None or groups is None:
            return
        floor_s, made, over = self.floor_s(layout, recompute), None, dict[int, float]()
        for _ in range(ATTEMPTS):
            if (found := fleet.arranged(floor_s, over)) is None:
                break
            fewer = layout.on(len(found[0]))
            self._cuts[fewer] = found[1]
            made = self.pipeline(fewer, recompute, taken(found[0], groups))
            assert made is not None, "there are groups"
            if not (more := excess_bytes(made, found[0])):
                break
            over = {kind: over.get(kind, 0.0) + more.get(kind, 0.0) for kind in {*over, *more}}
        yield from [made] if made is not None else []

    def finer(self, layout: Layout, bounds: Sequence[int]) -> Menu:
        """The same, unit by unit around the bounds that were found for a layout."""
        ends = {layout.captured: around(self.ends(layout), bounds)}
        return Menu(self._candidates, self._cluster, self._optimizer, self._most, ends)

    def graph(self, layout: Layout) -> ModelGraph:
        """The model at the layout's microbatch size, unit by unit."""
        return self._candidates[layout.captured][0]

    def whole(self, layout: Layout, device: Device) -> tuple[ModelGraph, Profile, UnitSeconds]:
        """The model unit by unit, with its seconds on such a device."""
        return *self._candidates[layout.captured], self._seconds(layout, device)

    def by_blocks(self, layout: Layout) -> bool:
        """Whether stages may be recomputed block by block beside as a whole: hosted ones are in any case."""
        return not layout.hosted and not self.unequal

    def exact(self, layout: Layout) -> bool:
        """Whether every cut of the model is looked at."""
        return len(self.ends(layout)) == len(self.graph(layout).units) + 1

    def ends(self, layout: Layout) -> tuple[int, ...]:
        """First unit of each piece, then the number of units."""
        if layout in self._cuts:
            return self._cuts[layout]
        if layout.captured not in self._ends:
            alone = self._alone(layout.captured, self._cluster.devices[0])
            self._ends[layout.captured] = pieces(self.graph(layout), alone, self._most)
        return self._ends[layout.captured]

    def work(self, layout: Layout) -> Work:
        """Seconds of all units, not of pieces, on the fastest devices."""
        kinds = self._kinds_of(layout)
        key = *_spread_key(layout), *(device.kind for device in kinds)
        if key not in self._works:
            costs = [self._seconds(layout, device) for device in kinds]
            self._works[key] = Work.along(self._made_for(layout.captured), fastest(costs))
        return self._works[key]

    def may_fit(self, layout: Layout, recompute: Sequence[Recompute]) -> bool:
        """Whether all devices together have room for it, as far as sums tell: no table needed."""
        return self._least.may_fit(layout, recompute, self._room_bytes(layout.group))

    def least_s(self, layout: Layout) -> float:
        """Below every step of the layout: all work, with what memory wants computed twice, on all devices."""
        m, pp, work = layout.microbatches, layout.axes.pp, self.work(layout)
        paced_s = (work.total_s + self.twice_s(layout)) / pp
        fleet = self._fleet(layout, ("none", "full"))
        if fleet is not None:
            self._reached_s = min(self._reached_s, BEYOND * fleet.likely_s)
        return max(work.least_s(pp, m), m * paced_s, fleet.least_s if fleet is not None else 0.0)

    def floor_s(self, layout: Layout, recompute: Sequence[Recompute], most_s: float = inf) -> float:
        """No cut that fits makes a shorter step with a stage on each device, in these ways.

        Of unequal devices in no order; not sought above `most_s`, or what another layout is likely to take.
        """
        fleet = self._fleet(layout, recompute)
        if fleet is None:
            how = layout.schedule, layout.stages, layout.axes.pp, layout.microbatches
            return self.work(layout).floor_s(*how, self._room(layout, recompute))
        if self._grouped(layout.group) is None:
            return inf
        floor_s = fleet.floor_s(self._reached_s if most_s == inf else most_s)
        self._reached_s = min(self._reached_s, BEYOND * floor_s)
        return floor_s

    def _fleet(self, layout: Layout, recompute: Sequence[Recompute] = ("none",)) -> Fleet | None:
        """Unequal groups as they are; None where all are alike, or seconds depend on where a stage is."""
        if not self.unequal or layout.hosted:
            return None
        recompute = tuple(again for again in recompute if again != "selective")
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
        weights, gradients, states, saved = self._least.bytes_of(layout, slice(None))
        graded, ways = weights + gradients + states, layout.axes.tp * layout.axes.dp_shard
        temporary = optimizer.step_bytes(graph.parameters, style_of(groups.devices[0].kind)) / ways
        updating = graded + weights / max(float(weights[-1]), 1.0) * temporary
        if layout.captured not in self._crossing:
            self._crossing[layout.captured] = Crossing.of(graph)
        crossing = self._crossing[layout.captured]
        held = crossing.shared(layout.ways, weights + states, graded, saved, updating)
        again = tuple(dict.fromkeys(way != "none" for way in recompute))
        return Fleet(kinds, held, self.work(layout), (layout.schedule, layout.microbatches), again)

    def _groups_like(self, layout: Layout) -> list[Cluster]:
        """For each kind that has such groups all devices of it."""
        return [self._like(device) for device in self._kinds_of(layout)] if self.unequal else [self._cluster]

    def _kinds_of(self, layout: Layout) -> Sequence[Device]:
        """A device of each kind that has such groups."""
        groups = grouped(self._cluster, layout.group) if self.unequal else None
        return self._kinds if groups is None else first_of(groups)

    def _room(self, layout: Layout, recompute: Sequence[Recompute]) -> Room | None:
        """What each stage may hold; None where weights or seconds depend on which device it is."""
        if layout.hosted or len(self._kinds) > 1 or "offload" in recompute:
            return None
        return self._least.room(layout, recompute, self._room_bytes(layout.group)[0])

    def twice_s(self, layout: Layout) -> float:
        """Seconds of a microbatch's forward that memory wants computed twice, at least."""
        return self._least.twice_s(layout, self.work(layout), self._room_bytes(layout.group))

    def together_s(self, layout: Layout) -> float:
        """Seconds that replicas take to add up the gradients of an average stage."""
        if layout.hosted:
            return 0.0
        size = int(self._least.bytes_of(layout)[1]) // layout.stages
        return min(sync_s((0, size), (0.0, 0.0), layout, like) for like in self._groups_like(layout))

    def case(self, layout: Layout, device: Device, recompute: Recompute) -> Case:
        """Tables of the layout's units on such a device; `selective`: all of them, block by block."""
        key = (*_spread_key(layout), layout.axes.dp_shard, layout.microbatches, device.kind, recompute)
        key = (*key, self._cuts.get(layout))
        if key not in self._cases:
            if layout.hosted:
                whole, alone = self._whole(layout, device), self._alone(layout.captured, device)
                blocks, where = self._blocks_of(layout, device), (self.ends(layout), layout, self._cluster)
                self._cases[key] = hosted(whole, blocks, alone, *where, recompute)
            elif recompute in ("full", "offload"):
                self._cases[key] = self.case(layout, device, "none").otherwise(recompute, device)
            else:
                self._cases[key] = self._built(layout, device, recompute)
        return self._cases[key]

    def _built(self, layout: Layout, device: Device, recompute: Recompute) -> Case:
        base = (*_spread_key(layout), layout.axes.dp_shard, device.kind, recompute, self._cuts.get(layout))
        if base not in self._cases:
            whole, seconds = self._whole(layout, device), self._seconds(layout, device)
            if recompute == "selective":
                whole, seconds = self._in_blocks(layout, device), seconds.recomputed()
            turning = max(self._sharing(layout).rings.values(), default=0) if layout.axes.cp > 1 else 0
            styled, gathered = self.graph(layout).tensor is not None, self._gathered(layout)
            ranges = shared(whole.ranges, layout, turning // layout.axes.cp, gathered, styled)
            self._cases[base] = replace(whole, ranges=ranges).lasting(seconds.merged(self.ends(layout)))
        return replace(self._cases[base], microbatches=layout.microbatches)

    def _gathered(self, layout: Layout) -> Whole | None:
        """What is whole for a moment, where weights are sharded."""
        if layout.weights != "sharded":
            return None
        graph, _ = of_rank(self._candidates[layout.captured], layout.axes.tp, layout.sequence)
        left = layout.axes.tp if graph.tensor is None else 1
        return Whole.of(graph, optimizer_bytes(self._optimizer), self.ends(layout), left)

    def _whole(self, layout: Layout, device: Device) -> Case:
        """Of the model as one tensor parallel rank runs it: bytes are shared out from here."""
        key = "whole", layout.captured, layout.axes.tp, layout.sequence, style_of(device.kind)
        key = (*key, self._cuts.get(layout))
        if key not in self._cases:
            ends = self.ends(layout)
            graph, profile = of_rank(self._candidates[layout.captured], layout.axes.tp, layout.sequence)
            there = profile.model_copy(update={"device": device.kind})
            costs = coarse_profile(there, ends)
            case = Case.of(coarse_graph(graph, ends), costs, layout.captured, self._optimizer)
            self._cases[key] = case
        return self._cases[key]

    def _in_blocks(self, layout: Layout, device: Device) -> Case:
        """The same when all is recomputed block by block."""
        key = "blocks", layout.captured, layout.axes.tp, layout.sequence, device.kind, self._cuts.get(layout)
        if key not in self._cases:
            whole = self._whole(layout, device)
            graph, profile = of_rank(self._candidates[layout.captured], layout.axes.tp, layout.sequence)
            gradients = owned_gradients(graph, optimizer_bytes(self._optimizer))
            ranges = block_ranges(whole.ranges, graph, profile, gradients, self.ends(layout))
            self._cases[key] = replace(whole, ranges=ranges, recompute="selective")
        return self._cases[key]

    def _seconds(self, layout: Layout, device: Device) -> UnitSeconds:
        key = (*_spread_key(layout), device.kind)
        if key not in self._costs:
            alone = self._alone(layout.captured, device)
            if layout.ways > 1 or layout.weights == "sharded":
                alone = spread(self._sharing(layout), alone, layout, self._like(device))
            elif layout.hosted:
                # Recomputed, a unit works for longer and waits for less: a floor has the less of the two.
                where = self._blocks_of(layout, device), alone, layout, self._cluster
                alone = fastest([fetching(*where, again) for again in (False, True)])
            self._costs[key] = alone
        return self._costs[key]

    def _blocks_of(self, layout: Layout, device: Device) -> Blocks:
        key = layout.captured, device.kind
        if key not in self._blocks:
            model, alone = self._candidates[layout.captured], self._alone(layout.captured, device)
            self._blocks[key] = Blocks.of(*model, alone, optimizer_bytes(self._optimizer))
        return self._blocks[key]

    def _alone(self, captured: int, device: Device) -> UnitSeconds:
        """Seconds on one device of such a kind."""
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
            self._shares[key] = Sharing.of(styled(self.graph(layout), layout.sequence))
        return self._shares[key]


def _spread_key(layout: Layout) -> Key:
    """What changes the seconds of a unit."""
    ways = layout.axes.dp_shard if layout.weights == "sharded" else 1
    where = (layout.schedule, layout.axes.pp, layout.microbatches) if layout.hosted else ()
    return layout.captured, layout.axes.tp, layout.axes.cp, layout.sequence, layout.weights, ways, *where
