"""Problem: weights, gradients and states live in the memory of the host; what does a step take, and hold?

A device has room for two blocks: the one it works on, and the next one, whose weights come over the host's
link meanwhile (double buffering). Blocks are neighbouring units of about equal work that end where little
crosses (coarse.py). With W_b, G_b the weights and gradients of block b, F_b, B_b the seconds of its passes:

    forward     sum over b of max(F_b, move(W_b+1)),  and move(W_0) before
    backward    sum over b of max(B_b, move(W_b-1 in, G_b+1 out)),  and move(G_0) behind
    move        max(larger direction / link, both / the device's share of its host's memory)
    optimizer   after the last backward, on the CPU, at the speed of the host's memory: gradients read,
                weights and states read and written

Where only the optimizer is on the host ("host-optimizer", ZeRO-Offload), weights come once, one block behind
the other from the beginning of the step, and stay; gradients go with the last microbatch of their block:

    forward     a block begins when the one before has ended and its weights are there
    backward    sum over b of max(B_b, move(G_b+1 out)),  and move(G_0) behind

With one stage under gpipe a block does all m microbatches before the next one (layer by layer): F_b and B_b
are those of m, and weights move once for each pass. Otherwise they move for every microbatch, and the host
adds up gradients: 4 G_b instead of G_b through its memory. A device holds

    weights     of the two largest neighbouring blocks, or all of them, and buffers
    gradients   of two: the sum over microbatches of one block, and of the one on its way out; all of them
                where weights stay and microbatches come one by one
    activations as a resident stage; layer by layer also what m microbatches have at the end of the block
    recomputed  what blocks receive instead of what they save, and one block at work, whose weights are there
    on the host ("host-activations") that goes there with each microbatch: handed.py

Sources: ZeRO-Offload (arXiv 2101.06840, sec. 4: gradients out beside the backward, Adam on the CPU),
ZeRO-Infinity (arXiv 2104.07857, sec. 6.2: prefetch, overlap), layer by layer as in L2L (arXiv 2002.05645).
Deviations: no optimizer step beside the backward (run/landing.py has it on GPUs), no weights are kept from
forward to backward (schedules/offload.py keeps two blocks). How much memory the host has nobody says. One
device runs it (streamed.py), and a pipeline of them (looped.py).
Complexity: O(units + blocks^2). Oracle: tests/unit/planner/test_offload.py plays the two buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster
from outsize.ir.devices import HOST_BYTES_PER_S, host_link
from outsize.ir.graph import ModelGraph
from outsize.ir.links import Link
from outsize.ir.plan import Plan, Recompute
from outsize.ir.profile import Profile
from outsize.ir.text import bytes_text
from outsize.planner.coarse import coarse_graph, coarse_profile, crossing_bytes, pieces
from outsize.planner.handed import Handed
from outsize.planner.layout import Layout
from outsize.planner.optimizer import Held, OptimizerBytes, optimizer_bytes
from outsize.planner.ranges import Bytes, Number, Ranges
from outsize.planner.seconds import Seconds, UnitSeconds
from outsize.planner.sharding import each, neighbours
from outsize.planner.split import Case

BLOCKS: Final = 64
# Bytes through the host's memory for each byte of a gradient that is added to what is there.
ADDING: Final = 4


@final
@dataclass(frozen=True, slots=True)
class Host:
    """What one device has of its host: a link, and bytes per second of its memory."""

    link: Link
    bytes_per_s: float

    @classmethod
    def of(cls, cluster: Cluster, working: int) -> Self:
        """Of the device that has least, when so many are at work."""
        links = [link for device in cluster.devices if (link := host_link(device)) is not None]
        nodes = [part.devices_per_node for part in cluster.parts] or [cluster.devices_per_node]
        sharing = min(working, max(nodes))
        return cls(min(links, key=lambda link: link.bytes_per_s), HOST_BYTES_PER_S / sharing)

    def move_s(self, taken: int, given: int = 0, adding: int = 1) -> float:
        """Seconds to take weights and give gradients at the same time."""
        memory_s = (taken + adding * given) / self.bytes_per_s
        return max(self.link.seconds(max(taken, given)), memory_s)


def layerwise(layout: Layout) -> bool:
    """Whether a block does all microbatches before the next one."""
    return layout.schedule == "gpipe"


@final
@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """What is streamed, the same for every layout: first unit of each block of a model, then their number;
    bytes of runs of blocks; weights that each uses, gradients that it makes; what the optimizer's step reads
    and writes of each unit; what blocks hand to each other.
    """

    cut: tuple[int, ...]
    ranges: Ranges
    taken: tuple[int, ...]
    given: tuple[int, ...]
    updated: Seconds
    handed: Handed

    @classmethod
    def of(cls, graph: ModelGraph, profile: Profile, alone: UnitSeconds, optimizer: OptimizerBytes) -> Self:
        """Of about equal work; `alone`: seconds of units on one device."""
        cut = block_ends(graph, alone, BLOCKS)
        coarse = coarse_graph(graph, cut)
        ranges = Ranges.of(coarse, coarse_profile(profile, cut), optimizer)
        return cls(
            cut, ranges, *_moved(graph, cut, optimizer), updated(graph, optimizer), Handed.of(coarse, ranges)
        )


def block_ends(graph: ModelGraph, alone: UnitSeconds, most: int) -> tuple[int, ...]:
    """First unit of each of at most about so many blocks, then the number of units.

    A block ends where no less crosses one unit sooner or later: layer by layer a device holds what crosses of
    all microbatches, and that of a language model's head would be its logits.
    """
    crossing, n = crossing_bytes(graph), len(graph.units)
    inner = [c for c in range(1, n) if crossing[c] <= min(crossing[max(1, c - 1) : min(c + 1, n - 1) + 1])]
    quiet = (0, *inner, n)
    return tuple(quiet[end] for end in pieces(coarse_graph(graph, quiet), alone.merged(quiet), most))


def hosted(
    whole: Case,
    blocks: Blocks,
    alone: UnitSeconds,
    ends: Sequence[int],
    layout: Layout,
    cluster: Cluster,
    recompute: Recompute,
) -> Case:
    """The case of a layout with weights on the host.

    `whole` is of the model on one device, in pieces that begin at `ends`; `alone` is unit by unit. All but
    "none" recomputes block by block.
    """
    again = recompute != "none"
    return replace(
        whole,
        ranges=_on_device(whole.ranges, blocks, ends, layout, again),
        microbatches=layout.microbatches,
        recompute="full" if again else "none",
        after_s=_sums(np.add.reduceat(blocks.updated / HOST_BYTES_PER_S, np.array(ends[:-1]))),
    ).lasting(fetching(blocks, alone, layout, cluster, again).merged(ends))


def fetching(
    blocks: Blocks, alone: UnitSeconds, layout: Layout, cluster: Cluster, again: bool = False
) -> UnitSeconds:
    """Seconds of units with the weights that they wait for; `again`: a backward begins with a forward."""
    compute = alone.recomputed() if again else alone
    host = Host.of(cluster, 1)
    moved = blocks.cut, blocks.taken, blocks.given, layout, host
    if layout.weights == "host-optimizer":
        return staying(compute, *moved)
    return streamed(compute, *moved, blocks.handed if layout.weights == "host-activations" else None)


def streamed(
    compute: UnitSeconds,
    cut: Sequence[int],
    taken: Sequence[int],
    given: Sequence[int],
    layout: Layout,
    host: Host,
    handed: Handed | None = None,
) -> UnitSeconds:
    """Seconds of units for one microbatch; what a block waits for is with its first unit.

    `cut`: first unit of each block, then their number; `taken` and `given`: weights and gradients of each;
    `handed`: what moves with each microbatch beside them.
    """
    m, once = layout.microbatches, layerwise(layout)
    times, adding = (m, 1) if once else (1, ADDING if m > 1 else 1)
    nothing = np.zeros((2, len(taken)), np.int64)
    comes, goes = (nothing, nothing) if handed is None else (handed.comes, handed.goes)
    ahead = zip((*taken[1:], 0), times * comes[0], times * goes[0], strict=True)
    next_s = [host.move_s(size + come, go) / times for size, come, go in ahead]
    both = zip(times * comes[1] + (0, *taken[:-1]), times * goes[1] + (*given[1:], 0), strict=True)
    before_s = [host.move_s(come, go, adding) / times for come, go in both]
    blocks, first = compute.merged(cut), np.array(cut[:-1])
    forward, backward = np.zeros(cut[-1]), np.zeros(cut[-1])
    forward[first] = np.maximum(0.0, next_s - blocks.forward)
    backward[first] = np.maximum(0.0, before_s - blocks.backward)
    forward[0] += host.move_s(taken[0]) / m
    backward[0] += host.move_s(0, given[0]) / m
    return compute.plus(forward, backward)


def staying(
    compute: UnitSeconds,
    cut: Sequence[int],
    taken: Sequence[int],
    given: Sequence[int],
    layout: Layout,
    host: Host,
) -> UnitSeconds:
    """As `streamed`, of weights that come once a step, and of which gradients alone go."""
    m = layout.microbatches
    together = m if layerwise(layout) else 1
    blocks, first = compute.merged(cut), np.array(cut[:-1])
    begun = together * (np.cumsum(blocks.forward) - blocks.forward)
    late = np.maximum.accumulate(np.cumsum([host.move_s(size) for size in taken]) - begun)
    go = np.array([host.move_s(0, size) for size in (*given[1:], 0)])
    forward, backward = np.zeros(cut[-1]), np.zeros(cut[-1])
    forward[first] = np.diff(late, prepend=0.0) / m
    backward[first] = np.maximum(0.0, go - together * blocks.backward) / m
    backward[0] += host.move_s(0, given[0]) / m
    return compute.plus(forward, backward)


def host_reason(graph: ModelGraph, layout: Layout, cluster: Cluster, optimizer: str) -> str:
    """What lives on the host, and which figures of it were assumed."""
    held = [optimizer_bytes(optimizer).held(p) for p in graph.parameters]
    host, times = Host.of(cluster, layout.axes.world_size), 1 if layerwise(layout) else layout.microbatches
    weights = sum(h.weight for h in held)
    moves = f"{bytes_text(weights * times)} of weights come for the forwards and again for the backwards"
    if layout.weights == "host-optimizer":
        moves = f"{bytes_text(weights)} of weights come once a step and stay on the device"
    if layout.weights == "host-activations":
        moves += "; what stages hand to each other goes there and comes back with each microbatch"
    room = ", and nobody says whether it has as much" if cluster.host_memory_bytes is None else ""
    return (
        f"weights, gradients and states live on the host: {bytes_text(sum(h.total_bytes for h in held))} at "
        f"most{room}. {moves}, over {host.link.source}; of the host's "
        f"memory, {host.bytes_per_s / 1e9:.0f} GB/s for each device are assumed"
    )


def host_bytes(graph: ModelGraph, plan: Plan) -> int:
    """Of a plan's weights, states and gradients on the host. Where the optimizer steps as gradients land,
    they are those of two stages in turn on each device (run/landing.py); else all, also where stages come
    for each microbatch.
    """
    optimizer, bounds = optimizer_bytes(plan.optimizer), pairwise(plan.bounds(graph))
    held = [[optimizer.held(p) for p in graph.owned_parameters(a, b - 1)] for a, b in bounds]
    given = [sum(h.gradient for h in stage) for stage in held]
    rows = [[g for g, at in zip(given, plan.ranks, strict=True) if at == rank] for rank in set(plan.ranks)]
    turns = ([size for size in row if size][first::2] for row in rows for first in (0, 1))
    last = plan.weights == "host-optimizer" or plan.schedule == "gpipe" or plan.microbatches == 1
    ring = sum(max(turn, default=0) for turn in turns)
    landing = ring if last and optimizer.in_parts else sum(given)
    return landing - sum(given) + sum(h.total_bytes for stage in held for h in stage)


def landing_reason(graph: ModelGraph, plan: Plan) -> str:
    """How much that is."""
    held, numel = host_bytes(graph, plan), sum(p.numel for p in graph.parameters)
    each = f"the host holds {bytes_text(held)}, {held / max(1, numel):.1f} bytes a parameter"
    if not optimizer_bytes(plan.optimizer).in_parts:
        return f"{each}: all gradients are kept, since {plan.optimizer} steps once, at the end"
    kept = "clip_norm, a GradScaler, update=False"
    return f"where the optimizer steps as gradients land, {each}; more where gradients are kept ({kept})"


def _moved(
    graph: ModelGraph, cut: Sequence[int], optimizer: OptimizerBytes
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Weights that each block uses, and gradients that it makes."""
    used: list[dict[str, Held]] = [{} for _ in cut[:-1]]
    for block, (first, end) in enumerate(pairwise(cut)):
        for name in (name for unit in graph.units[first:end] for name in unit.parameters):
            parameter = graph.parameter_of[name]
            used[block][parameter.name] = optimizer.held(parameter)
    weights = tuple(sum(h.weight for h in u.values()) for u in used)
    return weights, tuple(sum(h.gradient for h in u.values()) for u in used)


def _kept(staying: Bytes, cut: Sequence[int], ends: Sequence[int]) -> Bytes:
    """What stays of what the blocks of a run receive, for all runs of pieces."""
    received = np.zeros(ends[-1], np.int64)
    received[np.array(cut[:-1])] = staying
    return _sums(np.add.reduceat(received, np.array(ends[:-1])))


def _on_device(whole: Ranges, streamed: Blocks, ends: Sequence[int], layout: Layout, again: bool) -> Ranges:
    """Bytes of the device for all runs: two blocks, or all weights, and activations."""
    blocks, handed, nothing = streamed.ranges, streamed.handed, np.zeros_like(whole.saved)
    stay, away = layout.weights == "host-optimizer", layout.weights == "host-activations" and again
    weights = whole.weights - whole.buffers + whole.replicas
    if not stay:
        weights = np.minimum(weights, two_places(each(blocks.weights - blocks.buffers + blocks.replicas)))
    gradients = whole.gradients
    if layerwise(layout) or not stay:
        gradients = np.minimum(gradients, neighbours(each(blocks.gradients + blocks.replicas))[0, -1])
    ended = 0 if away else int(each(blocks.sent).max()) * layerwise(layout)
    saved, forward, backward = whole.saved, whole.forward, whole.backward - whole.gradients
    if again:
        crossing = each(blocks.received + blocks.sent + blocks.gradient_in + blocks.gradient_out)
        alone = each(blocks.backward - blocks.gradients + blocks.again) + crossing
        ahead = each(blocks.forward + blocks.sent)
        if away:
            ahead, alone = ahead + each(blocks.received) + handed.moving[0], alone + handed.moving[1]
        saved = _kept(handed.small if away else each(blocks.received), streamed.cut, ends)
        forward, backward = saved + ahead.max(), saved + alone.max()
    return replace(
        whole,
        weights=weights + whole.buffers,
        gradients=gradients,
        saved=saved + ended,
        twice=nothing if again else whole.twice,
        forward=forward + ended,
        backward=backward + gradients + ended,
        first_backward=backward + gradients + ended,
        **dict.fromkeys(("replicas", "optimizer", "master", "update", "again"), nothing),
    )


def two_places(weights: Bytes) -> int:
    """Bytes of the places that a device's blocks take in turn (schedules/offload.py)."""
    return sum(int(weights[first::2].max(initial=0)) for first in (0, 1))


def updated(graph: ModelGraph, optimizer: OptimizerBytes) -> Seconds:
    """Of each unit the bytes that the optimizer reads and writes."""
    moved = np.zeros(len(graph.units))
    trained = (p for p in graph.parameters if p.trainable and p.name in graph.owner_of)
    for owner, held in ((graph.owner_of[p.name], optimizer.held(p)) for p in trained):
        moved[owner] += held.gradient + 2 * (held.master or held.weight) + 2 * held.state
        moved[owner] += held.weight if held.master else 0
    return moved


def _sums(per_piece: NDArray[Number]) -> NDArray[Number]:
    """For all runs."""
    prefix = np.append(per_piece[:1] * 0, np.cumsum(per_piece))
    return np.subtract(prefix, prefix[:, None])
