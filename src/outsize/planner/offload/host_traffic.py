"""Problem: weights, gradients and states are in host memory; how long is a step, and what does the device
hold?

A device has room for two blocks: the one it computes, and the next one, whose weights come over the host's
link meanwhile (double buffering). Blocks are neighbouring units of about equal work that end where few bytes
cross (costs/coarsening.py). Let W_b, G_b be the weights and gradients of block b, and F_b, B_b the seconds of
its passes:

    forward     sum over b of max(F_b, move(W_b+1)),  and move(W_0) before
    backward    sum over b of max(B_b, move(W_b-1 in, G_b+1 out)),  and move(G_0) after
    move        max(larger direction / link, both / the device's share of its host's memory)
    optimizer   on the CPU, at the speed of the host's memory: gradients read, weights and states read and
                written; in these sums after the last backward

Where only the optimizer is on the host ("host-optimizer", ZeRO-Offload), weights come once, one block after
the other from the beginning of the step, and stay; gradients go with the last microbatch of their block:

    forward     a block begins when the one before has ended and its weights have arrived
    backward    sum over b of max(B_b, move(G_b+1 out)),  and move(G_0) after

With one stage under gpipe a block does all m microbatches before the next one (layer by layer): F_b and B_b
are those of m, and weights move once for each pass. Otherwise they move for every microbatch, and the host
adds up gradients: 4 G_b instead of G_b through its memory. A device holds

    weights     of the two largest neighbouring blocks, or all of them, and buffers; where autocast's copy is
                all that is read of a weight, that copy alone, which the host has cast once a step
    gradients   of two: the sum over microbatches of one block, and of the one being copied out; all of them
                where weights stay and microbatches come one by one
    activations as a resident stage; layer by layer also what m microbatches have at the end of the block
    recomputed  inputs of blocks instead of what they save, and one block being computed, whose weights
                are on the device; "host-activations" copies inputs to the host: boundary_traffic.py

Sources: ZeRO-Offload (arXiv 2101.06840, sec. 4: gradients are copied during the backward, Adam on the CPU),
ZeRO-Infinity (arXiv 2104.07857, sec. 6.2: prefetch, overlap), layer by layer as in L2L (arXiv 2002.05645).
Deviations: these sums have no optimizer step during the backward (what is played has it), no weights are
kept from forward to backward (schedules/offload.py keeps two blocks). The host's memory is unknown. One
device runs it (strategies/host_one_device.py), or a pipeline of them (strategies/host_round_robin.py). The
search compares candidates by these sums; what a plan says is played (evaluate/hosted_step.py). Complexity:
O(units + blocks^2). Oracle: tests/unit/planner/offload/test_offload_host_traffic.py simulates the two
buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster
from outsize.ir.findings import HostStates, WeightsOnHost
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import host_bytes_per_s, host_link
from outsize.ir.hardware.links import Link
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.planner.costs.coarsening import coarse_graph, coarse_profile, pieces
from outsize.planner.costs.stage_edges import crossing_bytes
from outsize.planner.costs.unit_times import Seconds, UnitSeconds
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.optimizer_states import OptimizerBytes, ParameterBytes, optimizer_bytes
from outsize.planner.memory.range_tables import Bytes, Number, RangeTables
from outsize.planner.memory.sharded import largest_adjacent_blocks, single_units
from outsize.planner.offload.boundary_traffic import BoundaryTraffic
from outsize.planner.partition.stage_prices import PricedModel
from outsize.policies.activations import KEEP, RECOMPUTE, Recompute, activation_policy
from outsize.schedules.families import family_of

BLOCKS: Final = 64
# Each byte of a gradient that is added moves this many bytes through the host's memory.
ADDING: Final = 4


@final
@dataclass(frozen=True, slots=True)
class Host:
    """Describes what one device has of its host: a link, and bytes per second of its memory."""

    link: Link
    bytes_per_s: float

    @classmethod
    def of(cls, cluster: Cluster, working: int) -> Self:
        """Returns the share of the device that has least, when `working` devices are active."""
        links = [link for device in cluster.devices if (link := host_link(device)) is not None]
        nodes = [part.devices_per_node for part in cluster.parts] or [cluster.devices_per_node]
        sharing = min(working, max(nodes))
        assumed = min(host_bytes_per_s(device.kind) for device in cluster.devices)
        memory_bytes_per_s = cluster.host_bytes_per_s or assumed
        return cls(min(links, key=lambda link: link.bytes_per_s), memory_bytes_per_s / sharing)

    def move_s(self, in_bytes: int, out_bytes: int = 0, adding: int = 1) -> float:
        """Returns the seconds to copy weights in and gradients out at the same time."""
        memory_s = (in_bytes + adding * out_bytes) / self.bytes_per_s
        return max(self.link.seconds(max(in_bytes, out_bytes)), memory_s)


def layerwise(layout: Layout) -> bool:
    """Returns whether a block does all microbatches before the next one."""
    return family_of(layout.schedule).layer_by_layer


@final
@dataclass(frozen=True, slots=True)
class BlockTraffic:
    """Holds the first unit of each block, then their number; and the bytes that come of the weights that each
    block uses, those of the gradients that it makes, and those that come as casts.
    """

    cut: Sequence[int]
    weights: Sequence[int]
    gradients: Sequence[int]
    cast: Sequence[int] = ()


@final
@dataclass(frozen=True, slots=True, eq=False)
class StreamedBlocks:
    """Holds the blocks that are streamed, the same for every layout.

    `alone`: seconds of units on one device. `ranges`: bytes of runs of blocks. `updated`: bytes that the
    optimizer's step reads and writes of each unit. `boundary`: boundary values of the blocks.
    """

    alone: UnitSeconds
    traffic: BlockTraffic
    ranges: RangeTables
    updated: Seconds
    boundary: BoundaryTraffic

    @classmethod
    def of(cls, graph: ModelGraph, profile: Profile, alone: UnitSeconds, optimizer: OptimizerBytes) -> Self:
        """Cuts blocks of about equal work; `alone`: seconds of units on one device."""
        cut = block_ends(graph, alone, BLOCKS)
        coarse = coarse_graph(graph, cut)
        ranges = RangeTables.of(coarse, coarse_profile(profile, cut), optimizer)
        boundary = BoundaryTraffic.of(coarse, ranges)
        return cls(alone, _traffic(graph, cut, optimizer), ranges, updated(graph, optimizer), boundary)

    @classmethod
    def of_stages(cls, graph: ModelGraph, profile: Profile, optimizer: str) -> Self:
        """Returns the blocks of a plan, whose stages are the units of `graph`."""
        held, ranges = optimizer_bytes(optimizer), RangeTables.of(graph, profile, optimizer_bytes(optimizer))
        traffic = _traffic(graph, range(len(graph.units) + 1), held)
        boundary = BoundaryTraffic.of(graph, ranges)
        return cls(UnitSeconds.of(profile), traffic, ranges, updated(graph, held), boundary)


def block_ends(graph: ModelGraph, alone: UnitSeconds, most: int) -> tuple[int, ...]:
    """Returns the first unit of each of at most about `most` blocks, then the number of units.

    A block ends where no fewer bytes cross one unit earlier or later: layer by layer a device holds what
    crosses of all microbatches, and before a language model's loss that would be its logits.
    """
    crossing, n = crossing_bytes(graph), len(graph.units)
    inner = [c for c in range(1, n) if crossing[c] <= min(crossing[max(1, c - 1) : min(c + 1, n - 1) + 1])]
    quiet = (0, *inner, n)
    return tuple(quiet[end] for end in pieces(coarse_graph(graph, quiet), alone.merged(quiet), most))


def hosted(
    whole: PricedModel,
    blocks: StreamedBlocks,
    ends: Sequence[int],
    layout: Layout,
    cluster: Cluster,
    recompute: Recompute,
) -> PricedModel:
    """Returns the case of a layout with weights on the host.

    `whole` is the model on one device, in pieces that begin at `ends`. Recompute is block by block.
    """
    recomputes = activation_policy(recompute).recomputes
    return replace(
        whole,
        ranges=_on_device(whole.ranges, blocks, ends, layout, recomputes),
        microbatches=layout.microbatches,
        recompute=RECOMPUTE.name if recomputes else KEEP.name,
        after_s=_sums(np.add.reduceat(blocks.updated / Host.of(cluster, 1).bytes_per_s, np.array(ends[:-1]))),
    ).with_seconds(fetching(blocks, layout, cluster, recomputes).merged(ends))


def fetching(blocks: StreamedBlocks, layout: Layout, cluster: Cluster, again: bool = False) -> UnitSeconds:
    """Returns the seconds of units with the weights that they wait for; `again`: a backward begins with a
    forward.
    """
    compute = blocks.alone.recomputed() if again else blocks.alone
    host = Host.of(cluster, 1)
    policy = layout.weight_policy
    if policy.stays_loaded:
        return staying(compute, blocks.traffic, layout, host)
    boundary = blocks.boundary if policy.values_on_host else None
    return streamed(compute, blocks.traffic, layout, host, boundary)


def streamed(
    compute: UnitSeconds,
    traffic: BlockTraffic,
    layout: Layout,
    host: Host,
    boundary: BoundaryTraffic | None = None,
) -> UnitSeconds:
    """Returns the seconds of units for one microbatch; the wait of a block is added to its first unit.

    `boundary`: boundary values that move with each microbatch.
    """
    cut, weights, gradients = traffic.cut, traffic.weights, traffic.gradients
    m, once = layout.microbatches, layerwise(layout)
    times, adding = (m, 1) if once else (1, ADDING if m > 1 else 1)
    nothing = np.zeros((2, len(weights)), np.int64)
    comes, goes = (nothing, nothing) if boundary is None else (boundary.comes, boundary.goes)
    next_block = zip((*weights[1:], 0), times * comes[0], times * goes[0], strict=True)
    next_s = [host.move_s(size + come, go) / times for size, come, go in next_block]
    previous_block = zip(
        times * comes[1] + (0, *weights[:-1]), times * goes[1] + (*gradients[1:], 0), strict=True
    )
    before_s = [host.move_s(come, go, adding) / times for come, go in previous_block]
    blocks, first = compute.merged(cut), np.array(cut[:-1])
    # A block's compute hides the copies of its neighbour: in a forward those of the next block, in a
    # backward, which runs the other way, those of the one before. What is not hidden is waited for.
    forward, backward = np.zeros(cut[-1]), np.zeros(cut[-1])
    forward[first] = np.maximum(0.0, next_s - blocks.forward)
    backward[first] = np.maximum(0.0, before_s - blocks.backward)
    # Nothing computes before the first weights are there, nor while the last gradients leave: once in a step.
    forward[0] += host.move_s(weights[0]) / m
    backward[0] += host.move_s(0, gradients[0]) / m
    return compute.plus(forward, backward)


def staying(compute: UnitSeconds, traffic: BlockTraffic, layout: Layout, host: Host) -> UnitSeconds:
    """Returns the same as `streamed` where weights come once a step and stay, and only gradients leave."""
    cut, weights, gradients = traffic.cut, traffic.weights, traffic.gradients
    m = layout.microbatches
    together = m if layerwise(layout) else 1
    blocks, first = compute.merged(cut), np.array(cut[:-1])
    begin_s = together * (np.cumsum(blocks.forward) - blocks.forward)
    # All weights come one behind the other without a pause, so a block that had to wait delays those after it
    # no further than to its own end: the delay is a running maximum, and a block waits for its increase.
    late_s = np.maximum.accumulate(np.cumsum([host.move_s(size) for size in weights]) - begin_s)
    copy_out_s = np.array([host.move_s(0, size) for size in (*gradients[1:], 0)])
    forward, backward = np.zeros(cut[-1]), np.zeros(cut[-1])
    forward[first] = np.diff(late_s, prepend=0.0) / m
    backward[first] = np.maximum(0.0, copy_out_s - together * blocks.backward) / m
    backward[0] += host.move_s(0, gradients[0]) / m
    return compute.plus(forward, backward)


def host_reason(graph: ModelGraph, layout: Layout, cluster: Cluster, optimizer: str) -> WeightsOnHost:
    """Returns what is on the host, and which of its figures were assumed."""
    held = [optimizer_bytes(optimizer).held(p) for p in graph.parameters]
    host, times = Host.of(cluster, layout.axes.world_size), 1 if layerwise(layout) else layout.microbatches
    times = 1 if layout.weight_policy.stays_loaded else times
    cast = sum(graph.cast_alone_bytes)
    return WeightsOnHost(
        weights=layout.weights,
        host_bytes=sum(h.total_bytes for h in held) + cast,
        moved_bytes=times * (sum(h.weight for h in held) - cast),
        link=host.link.source,
        host_memory_known=cluster.host_memory_bytes is not None,
        host_bytes_per_s=host.bytes_per_s,
        is_assumed=cluster.host_bytes_per_s is None,
        cast_bytes=times * cast,
    )


def host_bytes(graph: ModelGraph, plan: Plan) -> int:
    """Returns the bytes of a plan's weights, states and gradients on the host, and of what it casts.

    Where the optimizer steps as gradients arrive, the gradients are those of two stages in turn on each
    device (run/host/optimizer_step.py); otherwise all of them, also where stages are loaded for each
    microbatch.
    """
    optimizer, bounds = optimizer_bytes(plan.optimizer), pairwise(plan.bounds(graph))
    held = [[optimizer.held(p) for p in graph.owned_parameters(a, b - 1)] for a, b in bounds]
    gradients = [sum(h.gradient for h in stage) for stage in held]
    rows = [
        [g for g, at in zip(gradients, plan.ranks, strict=True) if at == rank] for rank in set(plan.ranks)
    ]
    turns = ([size for size in row if size][first::2] for row in rows for first in (0, 1))
    by_layers = family_of(plan.schedule).layer_by_layer
    last = plan.weight_policy.stays_loaded or by_layers or plan.microbatches == 1
    ring = sum(max(turn, default=0) for turn in turns)
    landing = ring if last and optimizer.in_parts else sum(gradients)
    cast = sum(graph.cast_alone_bytes)
    return cast + landing - sum(gradients) + sum(h.total_bytes for stage in held for h in stage)


def host_states(graph: ModelGraph, plan: Plan) -> HostStates:
    """Returns the same bytes as a finding for `Plan.why`."""
    held, parameters = host_bytes(graph, plan), sum(p.numel for p in graph.parameters)
    return HostStates(
        host_bytes=held,
        bytes_per_parameter=held / max(1, parameters),
        optimizer=plan.optimizer,
        in_parts=optimizer_bytes(plan.optimizer).in_parts,
    )


def _traffic(graph: ModelGraph, cut: Sequence[int], optimizer: OptimizerBytes) -> BlockTraffic:
    """Returns the bytes of the weights that each block uses, and of the gradients that it makes."""
    used: list[dict[str, ParameterBytes]] = [{} for _ in cut[:-1]]
    for block, (first, end) in enumerate(pairwise(cut)):
        for name in (name for unit in graph.units[first:end] for name in unit.parameters):
            parameter = graph.parameter_of[name]
            used[block][parameter.name] = optimizer.held(parameter)
    alone = np.add.reduceat(np.array(graph.cast_alone_bytes), np.array(cut[:-1])).tolist()
    weights = tuple(sum(h.weight for h in u.values()) - size for u, size in zip(used, alone, strict=True))
    return BlockTraffic(cut, weights, tuple(sum(h.gradient for h in u.values()) for u in used), tuple(alone))


def _resident_inputs(staying: Bytes, cut: Sequence[int], ends: Sequence[int]) -> Bytes:
    """Returns the inputs of blocks that stay on the device, for all runs of pieces."""
    received = np.zeros(ends[-1], np.int64)
    received[np.array(cut[:-1])] = staying
    return _sums(np.add.reduceat(received, np.array(ends[:-1])))


def _on_device(
    whole: RangeTables, streamed: StreamedBlocks, ends: Sequence[int], layout: Layout, again: bool
) -> RangeTables:
    """Returns the device's bytes for all runs: two blocks, or all weights, and activations."""
    blocks, nothing = streamed.ranges, np.zeros_like(whole.saved)
    stay, inputs_leave = layout.weight_policy.stays_loaded, layout.weight_policy.values_on_host and again
    weights, gradients = whole.weights - whole.buffers - whole.cast_alone + whole.replicas, whole.gradients
    if not stay:
        of_blocks = single_units(blocks.weights - blocks.buffers - blocks.cast_alone + blocks.replicas)
        weights = np.minimum(weights, two_places(of_blocks))
    if layerwise(layout) or not stay:
        of_blocks = single_units(blocks.gradients + blocks.replicas)
        gradients = np.minimum(gradients, largest_adjacent_blocks(of_blocks)[0, -1])
    ended = 0 if inputs_leave else int(single_units(blocks.sent).max()) * layerwise(layout)
    casts = whole.casts - whole.cast_alone
    if again and not stay:  # A block's copies leave with its weights; otherwise the graph holds them.
        casts = np.minimum(casts, two_places(single_units(blocks.casts - blocks.cast_alone)))
    saved, forward, backward = whole.saved, whole.forward, whole.backward - whole.gradients
    if again:
        saved, forward, backward = _recomputed(streamed, ends, inputs_leave)
    return replace(
        whole,
        weights=weights + whole.buffers - whole.casts + casts,
        casts=casts,
        gradients=gradients,
        saved=saved + ended,
        saved_boundary=nothing if again else whole.saved_boundary,
        forward=forward + ended,
        backward=backward + gradients + ended,
        first_backward=backward + gradients + ended,
        **dict.fromkeys(("replicas", "optimizer", "master", "update", "saved_sent"), nothing),
    )


def _recomputed(
    streamed: StreamedBlocks, ends: Sequence[int], inputs_leave: bool
) -> tuple[Bytes, Bytes, Bytes]:
    """Returns what is saved, and the most that a forward and a backward hold, for all runs of pieces, where
    each block is computed again; with `inputs_leave` the inputs of blocks are on the host.
    """
    blocks, boundary = streamed.ranges, streamed.boundary
    crossing = single_units(blocks.received + blocks.sent + blocks.gradient_in + blocks.gradient_out)
    backward = single_units(blocks.backward - blocks.gradients + blocks.saved_sent) + crossing
    forward, staying_inputs = single_units(blocks.forward + blocks.sent), single_units(blocks.received)
    if inputs_leave:
        forward = forward + single_units(blocks.received) + boundary.moving[0]
        backward, staying_inputs = backward + boundary.moving[1], boundary.small
    saved = _resident_inputs(staying_inputs, streamed.traffic.cut, ends)
    return saved, saved + forward.max(), saved + backward.max()


def two_places(weights: Bytes) -> int:
    """Returns the bytes of the two buffers that a device's blocks use in turn (schedules/offload.py)."""
    return sum(int(weights[first::2].max(initial=0)) for first in (0, 1))


def updated(graph: ModelGraph, optimizer: OptimizerBytes) -> Seconds:
    """Returns for each unit the bytes that the optimizer reads and writes."""
    moved = np.zeros(len(graph.units))
    trained = (p for p in graph.parameters if p.trainable and p.name in graph.owner_of)
    for parameter in trained:
        moved[graph.owner_of[parameter.name]] += optimizer.moved_bytes(
            parameter, optimizer.held(parameter), "fused"
        )
    return moved


def _sums(per_piece: NDArray[Number]) -> NDArray[Number]:
    """Returns the sums over all runs."""
    prefix = np.append(per_piece[:1] * 0, np.cumsum(per_piece))
    return np.subtract(prefix, prefix[:, None])
