"""Prices a model on a cluster, for every layout that is asked for: each price is computed once, and only when
it is needed.

    pricing.units     the model of one rank, and the seconds of its units       unit_prices.py
    pricing.stages    seconds and bytes of every run of units                   stage_tables.py
    pricing.bounds    below what no step is, before a cut is priced             layout_bounds.py
    pricing.groups    the devices in groups, and their memory                   device_groups.py

Here are the pipelines of a layout: which group of devices has which stage, with the tables of each. All of it
is in one cache (costs/cache.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeVar, final

from outsize.ir.cluster import Cluster
from outsize.ir.hardware.links import Link
from outsize.planner.costs.cache import Cache, Key
from outsize.planner.costs.coarsening import refined_around
from outsize.planner.evaluate.device_groups import DeviceGroups
from outsize.planner.evaluate.layout_bounds import LayoutBounds
from outsize.planner.evaluate.stage_tables import Ends, StageTables
from outsize.planner.evaluate.unit_prices import Models, UnitPrices
from outsize.planner.heterogeneous.assignment import excess_bytes, first_of, orders, taken
from outsize.planner.heterogeneous.bounds import Fleet
from outsize.planner.heterogeneous.kinds_in_a_row import KindsInARow
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.partition.feasibility import fits_nowhere
from outsize.planner.partition.stage_prices import Pipeline, StagePrices
from outsize.planner.partition.stage_weights import Demand, demands
from outsize.policies.activations import WHOLE_STAGE, Recompute, any_offloads

Price = TypeVar("Price")
# Up to this many units every cut is tried; larger models are cut into this many pieces.
PIECES: Final = 400
# Where kinds in a row have a step this near to the lower bound, no other order is looked for.
NEAR: Final = 1.05
# A layout is arranged up to this often: each time with what the account found too much.
ATTEMPTS: Final = 3


@final
class Pricing:
    """Builds the pipelines of one model on one cluster, and answers what they cost."""

    def __init__(
        self,
        models: Models,
        cluster: Cluster,
        optimizer: str,
        most: int = PIECES,
        ends: Mapping[int, Ends] = MappingProxyType({}),
        idle: bool = False,
    ) -> None:
        """Takes the models by microbatches; `idle`: some unequal devices may be left out."""
        self.cluster, self._cache = cluster, Cache()
        self._optimizer_name, self._most, self._idle = optimizer, most, idle
        optimizer_kind = optimizer_bytes(optimizer)
        self.groups = DeviceGroups(cluster, self._cache)
        self.units = UnitPrices(models, self.groups, optimizer_kind, self._cache)
        self.stages = StageTables(self.units, self.groups, optimizer, most, ends, self._cache)
        self.bounds = LayoutBounds(self.units, self.stages, self.groups, optimizer_kind, self._cache)

    @property
    def unequal(self) -> bool:
        """Returns whether the order of the devices matters."""
        return self.groups.unequal

    def once(self, key: Key, make: Callable[[], Price]) -> Price:
        """Returns what was made of these prices under a key, which is made once."""
        return self._cache.once(key, make)

    def finer(self, layout: Layout, bounds: Sequence[int]) -> Pricing:
        """Returns prices that are unit by unit around the bounds that were found for a layout."""
        return self._with_ends(layout, refined_around(self.stages.ends(layout), bounds))

    def between_blocks(self, layout: Layout) -> Pricing:
        """Returns prices whose pieces are the model's repeated blocks."""
        return self._with_ends(layout, self.stages.between_blocks(layout))

    def _with_ends(self, layout: Layout, ends: Ends) -> Pricing:
        """Returns prices with other pieces; units have the same, so what is known of them stays."""
        finer, cache, optimizer = copy(self), Cache(), self._optimizer_name
        finer._cache, finer._idle = cache, False
        pieces = {layout.captured: ends}
        finer.stages = StageTables(self.units, self.groups, optimizer, self._most, pieces, cache)
        finer.bounds = LayoutBounds(self.units, finer.stages, self.groups, optimizer_bytes(optimizer), cache)
        return finer

    # -- which layouts have pipelines --

    def by_blocks(self, layout: Layout) -> bool:
        """Returns whether stages may be recomputed block by block besides as a whole: hosted ones
        always are.
        """
        return not layout.hosted and not self.unequal

    def has_pieces(self, layout: Layout) -> bool:
        """Returns whether the model is cut into enough pieces for the stages of a layout."""
        return self.is_arranged(layout) or layout.stages < len(self.stages.ends(layout))

    def is_arranged(self, layout: Layout) -> bool:
        """Returns whether the cuts follow from which kind of device takes which units."""
        return self.unequal and self._idle and layout.chunks == 1 and not self.stages.exact(layout)

    def may_be_arranged(self, layout: Layout) -> bool:
        """Returns whether it is seen at once that some order of kinds fits, where cuts follow from it."""
        fleet = self.bounds.fleet(layout, WHOLE_STAGE) if self.is_arranged(layout) else None
        return fleet is None or fleet.surely_fits

    def demands(self, layout: Layout) -> tuple[Demand | None, ...]:
        """Returns which weights the stages of a layout need, the preferred demand first."""
        if layout.hosted or layout.stages == 1 or self.is_arranged(layout):
            return (None,)
        ends, pp = self.stages.ends(layout), layout.axes.pp
        return self._cache.once(
            ("demands", layout.captured, pp, ends), lambda: demands(self.units.graph(layout), ends, pp)
        )

    # -- the pipelines of a layout --

    def pipeline(
        self, layout: Layout, recompute: Sequence[Recompute], places: Sequence[int] | None = None
    ) -> Pipeline | None:
        """Returns the pipeline of the layout with its tables, None without room; `places[stage]` is its rank
        among the groups.
        """
        room = self.groups.room(layout.group)
        if room is None:
            return None
        ranks = layout.ranks if places is None else tuple(places)
        groups = self.groups.of_size(layout.group)
        assert groups is not None, "the groups with usable memory exist"
        devices = [groups.devices[rank] for rank in ranks]
        options = tuple(
            tuple(self.stages.case(layout, device, again) for again in recompute) for device in devices
        )
        collectives = tuple(self.units.collectives(layout, device) for device in devices)
        ends, demand = self.stages.ends(layout), self.demands(layout)[0]
        return Pipeline(layout, groups, room, ranks, options, collectives, ends, demand=demand)

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
        groups = self.groups.of_size(layout.group)
        assert groups is not None, "there is a pipeline in rank order"
        cases = [self.stages.case(layout, device, recompute[-1]) for device in first_of(groups)]
        once = layout.chunks == 1
        for places in orders(layout.on(layout.axes.pp), groups, cases, self._idle and once):
            fewer = layout.on(len(places)) if once else layout
            ranks = tuple(places[rank] for rank in fewer.ranks)
            if ranks != layout.ranks and (pipeline := self.pipeline(fewer, recompute, ranks)):
                yield pipeline

    def stage_prices(self, pipeline: Pipeline, least_s: float = 0.0) -> StagePrices:
        """Returns the prices of a pipeline's runs, whose step takes `least_s` at least."""
        return StagePrices(pipeline, least_s, fits_nowhere=self._fits_nowhere(pipeline))

    def _fits_nowhere(self, pipeline: Pipeline) -> bool:
        """Returns whether it is seen at once that no cut of stages that share devices fits; of others
        `StepFloors.refuted` knows it, and no bound of theirs would end a search for one.
        """
        layout = pipeline.layout
        tried: tuple[Recompute, ...] = tuple(case.recompute for case in pipeline.options[0])
        if layout.chunks == 1 or layout.hosted or any_offloads(tried):
            return False
        key = layout, tried, pipeline.ranks, pipeline.ends, pipeline.even, pipeline.first_option
        return self._cache.once(
            ("fits nowhere", *key), lambda: fits_nowhere(pipeline, self.stages.whole(layout))
        )

    # -- pipelines of kinds of devices --

    def _arranged(self, layout: Layout, recompute: Sequence[Recompute]) -> Iterator[Pipeline]:
        """Yields a model of very many units, cut unit by unit as kinds are assigned, then in those pieces."""
        fleet, groups = self.bounds.fleet(layout, recompute), self.groups.of_size(layout.group)
        if fleet is None or groups is None:
            return
        floor_s, made, over = self.bounds.floor_s(layout, recompute), None, dict[int, float]()
        for _ in range(ATTEMPTS):
            if (arrangement := self._arrangement(layout, fleet, groups, floor_s, over)) is None:
                break
            fewer = layout.on(len(arrangement[0]))
            self.stages.arrange(fewer, arrangement[1])
            made = self.pipeline(fewer, recompute, taken(arrangement[0], groups))
            assert made is not None, "there are groups"
            if not (more := excess_bytes(made, arrangement[0])):
                break
            over = {kind: over.get(kind, 0.0) + more.get(kind, 0.0) for kind in {*over, *more}}
        yield from [made] if made is not None else []

    def _arrangement(
        self, layout: Layout, fleet: Fleet, groups: Cluster, floor_s: float, over: Mapping[int, float]
    ) -> tuple[tuple[int, ...], Ends] | None:
        """Returns the kinds of stages and their bounds: kinds in a row where that is near the floor, and
        otherwise the better of it and any order.
        """

        def links(kinds: Sequence[int]) -> Sequence[Link]:
            ranks = taken(kinds, groups)
            return [groups.link(ranks[stage - 1], rank) for stage, rank in enumerate(ranks)]

        fleet.spare(over)
        m = layout.microbatches
        in_a_row = KindsInARow(fleet, links, self.units.message_bytes(layout))
        row = in_a_row.best(floor_s / (m + layout.axes.pp))
        if row is not None and m * row.period_s <= NEAR * floor_s:
            return row.kinds, row.bounds
        mixed = fleet.arranged(floor_s, over)
        if row is None or (mixed is not None and in_a_row.period_s(*mixed) < row.period_s):
            return mixed
        return row.kinds, row.bounds
