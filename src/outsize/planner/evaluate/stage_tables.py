"""Prices runs of units: tables of the seconds and bytes of every stage that a cut of a layout may have.

Bytes are divided over the devices of a group by memory/sharded.py. Models of very many units are cut in
pieces (costs/coarsening.py), between which stages begin.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import final

import numpy as np

from outsize.ir.cluster import Device
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import host_link
from outsize.planner.costs.cache import Cache, Key
from outsize.planner.costs.coarsening import between_blocks, coarse_graph, coarse_profile, pieces
from outsize.planner.costs.roofline import attention_shares, late_seconds
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.evaluate.device_groups import DeviceGroups
from outsize.planner.evaluate.unit_prices import UnitPrices, model_key, spread_key
from outsize.planner.layout.layout import Layout
from outsize.planner.layout.slice_model import gradient_share, kept_bytes, most_open
from outsize.planner.memory.in_flight_states import states_by_stage
from outsize.planner.memory.optimizer_states import optimizer_bytes, style_of
from outsize.planner.memory.range_tables import Bytes, RangeTables, owned_gradients, owners_update
from outsize.planner.memory.recomputed_blocks import StreamedBytes, block_ranges, streamed_ranges
from outsize.planner.memory.sharded import GatheredBytes, KeyBytes, UnshardedBytes, WholeBytes, device_tables
from outsize.planner.offload.host_traffic import hosted
from outsize.planner.partition.feasibility import none_fits
from outsize.planner.partition.stage_prices import PricedModel, copy_link
from outsize.policies.activations import KEEP, Recompute, activation_policy
from outsize.policies.heads import TIMES_A_PIECE, piece_bytes

Ends = tuple[int, ...]
"""Holds the first unit of each piece, then the number of units."""


@final
class StageTables:
    """Answers for runs of pieces, on each kind of device and in each policy of activations."""

    def __init__(
        self,
        units: UnitPrices,
        groups: DeviceGroups,
        optimizer: str,
        most_pieces: int,
        ends: Mapping[int, Ends],
        cache: Cache,
    ) -> None:
        """Takes the `ends` of models whose pieces are given; others are cut in at most `most_pieces`."""
        self._units, self._groups, self._cache = units, groups, cache
        self._optimizer_name, self._optimizer = optimizer, optimizer_bytes(optimizer)
        self._most_pieces, self._given_ends = most_pieces, ends
        self._arranged_ends: dict[Layout, Ends] = {}

    def ends(self, layout: Layout) -> Ends:
        """Returns the first unit of each piece, then the number of units."""
        if layout in self._arranged_ends:
            return self._arranged_ends[layout]
        captured = layout.captured
        if captured in self._given_ends:
            return self._given_ends[captured]
        return self._cache.once(("pieces", captured), lambda: self._pieces(captured))

    def _pieces(self, captured: int) -> Ends:
        seconds = self._units.alone(captured, self._groups.cluster.devices[0])
        return pieces(self._units.models[captured][0], seconds, self._most_pieces)

    def arrange(self, layout: Layout, ends: Ends) -> None:
        """Makes stages of a layout those that kinds of devices were assigned to."""
        self._arranged_ends[layout] = ends

    def between_blocks(self, layout: Layout) -> Ends:
        """Returns the ends of the model's repeated blocks."""
        return between_blocks(self._units.graph(layout))

    def exact(self, layout: Layout) -> bool:
        """Returns whether every cut of the model is tried."""
        return len(self.ends(layout)) == len(self._units.graph(layout).units) + 1

    def refuted(self, layout: Layout, options: tuple[Recompute, ...]) -> bool:
        """Returns whether no run fits as any stage of equal devices, in any of these options."""
        return self._cache.once(("refuted", layout, options), lambda: self._none_fits(layout, options))

    def _none_fits(self, layout: Layout, options: tuple[Recompute, ...]) -> bool:
        room = self._groups.room(layout.group)
        cases = [self.case(layout, self._groups.cluster.devices[0], again) for again in options]
        return room is not None and none_fits(
            cases, layout.schedule, [room.devices[0].memory_bytes] * layout.stages, self.whole(layout)
        )

    def whole(self, layout: Layout) -> WholeBytes | None:
        """Returns what stages have whole for a moment, where weights are sharded."""
        if layout.shards == 1 or layout.axes.token_parts > 1:
            return None
        key = *model_key(layout), self._arranged_ends.get(layout)
        unsharded = self._unsharded(layout)
        return unsharded and self._cache.once(("whole bytes", *key), lambda: WholeBytes.of(unsharded))

    def case(self, layout: Layout, device: Device, recompute: Recompute) -> PricedModel:
        """Returns tables of the layout's units on such a device; where a policy lists units, all of them are
        recomputed, block by block.
        """
        alone = self._in_turn(layout, device, recompute)
        if not layout.pairs:
            return alone
        return self._cache.once(("case in pairs", *self._key(layout, device, recompute)), alone.in_pairs)

    def _in_turn(self, layout: Layout, device: Device, recompute: Recompute) -> PricedModel:
        """Returns the same where forwards and backwards follow each other."""
        key = self._key(layout, device, recompute)
        return self._cache.once(("case", *key), lambda: self._case(layout, device, recompute))

    def _key(self, layout: Layout, device: Device, recompute: Recompute) -> Key:
        key = *spread_key(layout), layout.shards, layout.microbatches, device.kind, recompute
        return *key, self._arranged_ends.get(layout)

    def _case(self, layout: Layout, device: Device, recompute: Recompute) -> PricedModel:
        policy = activation_policy(recompute)
        if layout.hosted:
            whole, blocks = self._undivided_case(layout, device), self._units.blocks(layout, device)
            return hosted(whole, blocks, self.ends(layout), layout, self._groups.cluster, recompute)
        if policy.keeps_all or policy.in_blocks:
            key = *spread_key(layout), layout.shards, device.kind, recompute, self._arranged_ends.get(layout)
            key = *key, self._replicas_returned(layout), layout.slices > 1 and layout.schedule_key()
            made = self._cache.once(
                ("case of a microbatch", *key), lambda: self._divided(layout, device, recompute)
            )
            return replace(made, microbatches=layout.microbatches)
        made = self._in_turn(layout, device, KEEP.name).with_recompute(recompute, device)
        return (
            made
            if layout.slices == 1
            else _keeping_again(made, self._units.graph(layout), self.ends(layout), layout)
        )

    def _divided(self, layout: Layout, device: Device, recompute: Recompute) -> PricedModel:
        """Returns the tables with what each device of a group holds of a rank's bytes."""
        whole, seconds = self._undivided_case(layout, device), self._units.seconds(layout, device)
        policy = activation_policy(recompute)
        if policy.in_blocks:
            whole = self._in_blocks(layout, device, recompute)
            seconds = self._streamed(layout, device) if policy.streams_blocks else seconds.recomputed()
        styled, gathered = self._units.graph(layout).tensor is not None, self._unsharded(layout)
        ranges = device_tables(whole.ranges, layout, self._keys(layout, recompute), gathered, styled)
        if self._optimizer.couples and layout.shards > 1:
            ranges = replace(ranges, update=owners_update(whole.graph, self._optimizer, layout.shards))
        made = replace(whole, ranges=ranges).with_seconds(seconds.merged(self.ends(layout)))
        return (
            made if layout.slices == 1 else _in_slices(made, self._units, self.ends(layout), layout, device)
        )

    def read_again(self, layout: Layout, units: Collection[int]) -> int:
        """Returns the bytes for each microbatch of the keys and values that slices read of units that are
        recomputed; these are in no activations.
        """
        if layout.slices == 1:
            return 0
        chosen = _read_again(self._units.graph(layout), layout)[sorted(units)]
        return -(-int(chosen.sum()) // layout.microbatches)

    def _keys(self, layout: Layout, recompute: Recompute) -> KeyBytes:
        """Returns what context parallelism gathers in each piece of the model, where the layout has it."""
        units, starts = self._units.graph(layout).units, self.ends(layout)[:-1]
        per_unit, lasting = (np.zeros(len(units), np.int64) for _ in range(2))
        sums, tp = np.array([u.weight_sum_bytes for u in units], np.int64), layout.axes.product_parts
        keeps_all = activation_policy(recompute).keeps_all
        for unit, size in self._units.sharing(layout).keys.items() if layout.axes.token_parts > 1 else ():
            heads = units[unit].row_heads // tp
            per_unit[unit] = size // tp if heads <= 1 else TIMES_A_PIECE * piece_bytes(heads, size // tp)
            lasting[unit] = size // tp if heads <= 1 and keeps_all else 0
        whole, kept = (np.add.reduceat(sizes, starts) for sizes in (per_unit, lasting))
        return KeyBytes(whole, np.maximum.reduceat(sums, starts), kept)

    def _unsharded(self, layout: Layout) -> UnshardedBytes | None:
        """Returns what is gathered for a moment, where weights are sharded."""
        if not layout.weight_policy.shards_weights:
            return None
        graph, _ = self._units.of_rank(layout)
        left = layout.axes.product_parts if graph.tensor is None else 1
        return UnshardedBytes.of(graph, self._optimizer, self.ends(layout), left)

    def gathered(self, layout: Layout, device: Device) -> GatheredBytes | None:
        """Returns what is whole for a moment beside a microbatch, where weights are sharded."""
        if layout.shards == 1 or not layout.weight_policy.shards_weights:
            return None
        sharded = self.case(layout, device, KEEP.name).ranges
        return GatheredBytes.of(sharded, self._undivided_case(layout, device).ranges)

    def whole_of_rank(self, layout: Layout) -> bool:
        """Returns whether a microbatch has the same bytes on a device as in the graph of its rank: tables of
        ranks that share tokens, or layers of a graph that does not say what is divided, are shares.
        """
        axes = layout.axes
        ranked = axes.product_parts == 1 or self._units.graph(layout).tensor is not None
        return axes.token_parts == 1 and ranked

    def _undivided_case(self, layout: Layout, device: Device) -> PricedModel:
        """Returns the case of the model as one tensor-parallel rank runs it: bytes are divided from here."""
        key = *model_key(layout), style_of(device.kind), self._arranged_ends.get(layout)
        key = *key, self._replicas_returned(layout)
        return self._cache.once(("undivided case", *key), lambda: self._undivided(layout, device))

    def _replicas_returned(self, layout: Layout) -> int:
        """Returns the number of replicas whose outputs a device has; one in a step of an engine."""
        return layout.replicas if self._units.graph(layout).in_loop else 1

    def _undivided(self, layout: Layout, device: Device) -> PricedModel:
        ends = self.ends(layout)
        graph, profile = self._units.of_rank(layout)
        on_device = profile.model_copy(update={"device": device.kind})
        costs = coarse_profile(on_device, ends)
        graph = coarse_graph(graph.of_replicas(self._replicas_returned(layout)), ends)
        case = PricedModel.of(graph, costs, layout.captured, self._optimizer_name)
        split = np.array([unit.backward_weight_s > 0 for unit in profile.units], np.int64)
        return replace(case, split_units=np.add.reduceat(split, ends[:-1]))

    def _in_blocks(self, layout: Layout, device: Device, recompute: Recompute) -> PricedModel:
        """Returns the same when all units are recomputed block by block."""
        tables = streamed_ranges if activation_policy(recompute).streams_blocks else block_ranges

        def made() -> PricedModel:
            whole = self._undivided_case(layout, device)
            graph, profile = self._units.of_rank(layout)
            gradients = owned_gradients(graph, self._optimizer)
            ranges = tables(whole.ranges, graph, profile, gradients, self.ends(layout))
            return replace(whole, ranges=ranges, recompute=recompute)

        key = *model_key(layout), device.kind, self._arranged_ends.get(layout)
        key = *key, self._replicas_returned(layout), recompute
        return self._cache.once(("undivided case in blocks", *key), made)

    def _streamed(self, layout: Layout, device: Device) -> UnitSeconds:
        """Returns the seconds of units whose blocks are streamed: attention is computed once, and copies are
        seen as far as a block computes for a shorter time.
        """
        graph, _ = self._units.of_rank(layout)
        axes, link, once = layout.axes, copy_link(device), self._units.seconds(layout, device)
        waits = 0.0 if once.waits is None else once.waits[0]
        again = once.recomputed(attention_shares(graph, device) * (once.forward - waits))
        away, beside = StreamedBytes.of(graph), host_link(device) is not None
        left = axes.token_parts * (1 if graph.tensor is not None else axes.product_parts)
        seen = np.zeros((2, len(graph.units)))
        for (a, b), size_bytes in zip(away.parts, (away.kept // left).tolist(), strict=True):
            copied_s = link.seconds(size_bytes) if size_bytes else 0.0
            for row, passed_s in zip(seen, (again.forward, again.backward), strict=True):
                row[b - 1] = max(0.0, copied_s - float(passed_s[a:b].sum()) * beside)
        return again.plus(*seen)


def _lasting(ranges: RangeTables, per_piece: Bytes, microbatches: int) -> RangeTables:
    """Returns the tables with so many bytes of each piece for the whole step."""
    sums = np.append(0, np.cumsum(per_piece))
    lasting = np.triu(sums[None, :] - sums[:, None])
    return replace(ranges, inputs=ranges.inputs + -(-lasting // microbatches))


# -- what slices of sequences have beside the bytes and seconds of as many microbatches --


def _in_slices(
    case: PricedModel, units: UnitPrices, ends: Ends, layout: Layout, device: Device
) -> PricedModel:
    """Returns the case with the gradients of keys and values of a microbatch, and with the keys where units
    are recomputed, and the seconds by which last slices are longer.
    """
    graph, starts = units.graph(layout), ends[:-1]
    kept = np.array(kept_bytes(graph.units, layout.axes.product_parts), np.int64)
    sums = np.add.reduceat(gradient_share(graph.units) * kept, starts)
    late = late_seconds(graph, units.seconds(layout, device), device, layout.slices)
    merged = np.add.reduceat(late[0], starts), np.add.reduceat(late[1], starts)
    lasting = _lasting(case.ranges, sums, layout.microbatches)
    made = replace(case, ranges=lasting, late=merged, slices=layout.slices)
    return _keeping_again(made, graph, ends, layout) if made.activation_policy.recomputes else made


def _keeping_again(case: PricedModel, graph: ModelGraph, ends: Ends, layout: Layout) -> PricedModel:
    """Returns the case of recomputed units with the keys and values that slices read."""
    again = np.add.reduceat(_read_again(graph, layout), ends[:-1])
    return replace(case, ranges=_lasting(case.ranges, again, layout.microbatches))


def _read_again(graph: ModelGraph, layout: Layout) -> Bytes:
    """Returns the bytes of keys and values of each unit that a recomputing stage has at its worst moment."""
    states = states_by_stage(*layout.schedule_key().of_single_stages)[0]
    in_flight = max(state.in_flight for state in states)
    count = most_open(in_flight, layout.whole_microbatches, layout.slices)
    return count * np.array(kept_bytes(graph.units, layout.axes.product_parts), np.int64)
