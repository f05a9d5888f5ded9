"""Problem: in which layouts can a model run on N devices?

A layout fixes everything but the cuts: p pipeline ranks of k = dp_replicate x dp_shard x ep x cp x tp devices
each, v stages on a rank, the schedule, the size and number of microbatches. Rank r of the pipeline has the
devices [r k, (r + 1) k); within it tp is innermost, then cp, then dp_shard, then dp_replicate, so the axes
with the most traffic have the nearest neighbours. On unequal devices a group has devices of one kind, because
it would be as slow as its slowest member: groups are formed within the parts of a cluster, and a part that
they do not fill stays idle. p is then at most the number of groups: heterogeneous/assignment.py and
heterogeneous/bounds.py decide which of them work.

    default       pp alone, all devices, one rank each; other axes where they are asked for
    all axes      every factorisation N = pp x dp_replicate x dp_shard x cp x tp, tp within a node, dp_shard
                           all of the replicas or those of a node, as ZeRO-1 (resident) or as FSDP (weights
                           too)
    ep            in a model with experts also every N = pp x dp x ep x cp x tp where each rank of ep and tp
                           has an expert; dp replicates or shards
    cp            in the sizes that costs/context_parallel.py allows, and with the smallest microbatches
                           only: fewer samples at a time save as many bytes as fewer tokens of each, and send
                           nothing
    host          where nothing else fits: one device (offload/host_traffic.py), or several in round-robin
                  (strategies/host_round_robin.py)

Symbols as in arXiv 2104.04473 (p, t, d) and torch's DeviceMesh. Complexity: O(divisors of N, cubed).
Oracle: tests/unit/planner/layout/test_planner_layout.py counts the factorisations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import gcd
from typing import Final, NamedTuple, final

from outsize.errors import UnknownDevice
from outsize.ir.cluster import Cluster, Part
from outsize.ir.hardware.devices import Device, host_link
from outsize.ir.plan import Axes, Plan, ScheduleName, state_shards
from outsize.ir.schedule import Kind, has_pairs, placed
from outsize.policies.weights import HOSTED, RESIDENT, SHARDED, WeightPolicy, Weights, weight_policy
from outsize.schedules.families import family_of, preferred

# Layouts with several stages on a rank have at most this many stages: with more, messages dominate.
MOST_STAGES: Final = 64


@final
class ScheduleKey(NamedTuple):
    """Holds the arguments of `schedules.builders.planned`; equal keys have the same schedule."""

    schedule: ScheduleName
    stages: int
    microbatches: int
    ranks: int
    actions: tuple[str, ...]
    slices: int = 1

    @property
    def without_actions(self) -> tuple[ScheduleName, int, int, int]:
        """Returns what a schedule is built from where its actions are not given."""
        return self[:4]

    @property
    def of_single_stages(self) -> tuple[ScheduleName, int, int, int, int]:
        """Returns the same where each rank has one stage, through which sequences may go in slices."""
        return *self[:4], self.slices


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Fixes everything but the cuts: `stages` in all, `microbatches` of each replica.

    `captured`: the number of microbatches of the whole batch for which the model was captured.
    `sequence`: tp also divides the activations between layers (sequence parallelism). With `slices`
    microbatches are slices of sequences, so many of each one, and `captured` counts them too. `turns`: a
    stage that waits for other ranks gives way to another microbatch, where the schedule has one for it.
    """

    axes: Axes
    stages: int
    schedule: ScheduleName
    microbatches: int
    captured: int
    weights: Weights = RESIDENT.name
    actions: tuple[str, ...] = ()
    sequence: bool = False
    slices: int = 1
    turns: bool = True

    @property
    def ranks(self) -> tuple[int, ...]:
        """Returns the pipeline rank of each stage."""
        return placed(self.schedule, self.stages, self.axes.pp, self.actions)

    @property
    def chunks(self) -> int:
        """Returns the number of stages on a rank; on the fullest one, where `actions` place them."""
        return max(Counter(self.ranks).values()) if self.actions else self.stages // self.axes.pp

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """Returns the stages of a rank in ascending order."""
        return tuple(stage for stage, at in enumerate(self.ranks) if at == rank)

    @property
    def whole_microbatches(self) -> int:
        """Returns the number of microbatches of each replica, which may go in slices."""
        return self.microbatches // self.slices

    @property
    def round(self) -> int:
        """Returns after how many microbatches a full pipeline repeats itself: one on each rank. Of slices
        these are whole microbatches.
        """
        return -(-self.axes.pp // self.slices) * self.slices if self.slices > 1 else self.axes.pp

    def in_slices(self, slices: int) -> Layout:
        """Returns the layout whose microbatches go in so many slices."""
        counts = {"microbatches": self.microbatches * slices, "captured": self.captured * slices}
        return replace(self, slices=slices, **counts)

    def schedule_key(self, microbatches: int | None = None) -> ScheduleKey:
        """Returns the key of the schedule of `microbatches`, by default of all."""
        count = (self.microbatches if microbatches is None else microbatches) // self.slices
        return ScheduleKey(self.schedule, self.stages, count, self.axes.pp, self.actions, self.slices)

    @property
    def group(self) -> int:
        """Returns the number of devices that compute one stage."""
        return self.axes.group_size

    @property
    def weight_policy(self) -> WeightPolicy:
        """Returns where the weights, gradients and states are."""
        return weight_policy(self.weights)

    @property
    def updaters(self) -> int:
        """Returns among how many devices the update of the gradients of one is divided (ZeRO's first
        stage); where weights are sharded, each has its part of the gradients.
        """
        return 1 if self.weight_policy.shards_weights else self.shards

    @property
    def shards(self) -> int:
        """Returns over how many devices the states of a stage are sharded; weights too, where the policy
        says so.
        """
        return state_shards(self.axes, self.weights)

    @property
    def weight_parts(self) -> int:
        """Returns over how many devices the weights and gradients of a stage are sharded."""
        return self.shards if self.weight_policy.shards_weights else 1

    @property
    def replicas(self) -> int:
        """Returns the number of parts of the batch that are computed at the same time."""
        return self.axes.replicas

    @property
    def microbatch_ranks(self) -> int:
        """Returns the number of devices that share the work of one microbatch."""
        return self.axes.microbatch_ranks

    @property
    def hosted(self) -> bool:
        """Returns whether the host keeps weights, gradients or states that a step needs."""
        return self.weight_policy.on_host

    @property
    def splits_backward(self) -> bool:
        """Returns whether gradients of weights are computed in actions of their own."""
        return family_of(self.schedule).splits_backward or any(Kind.I in row for row in self.actions)

    @property
    def pairs(self) -> bool:
        """Returns whether forwards run together with backwards of other microbatches, and ranks exchange
        values in them; sharded weights run by blocks, without pairs.
        """
        together = family_of(self.schedule).overlaps or any(map(has_pairs, self.actions))
        return self.turns and together and self.axes.exchanges_values and self.shards == 1

    def on(self, ranks: int) -> Layout:
        """Returns the layout with another number of ranks, a stage each: groups may stay idle."""
        return replace(self, axes=self.axes.with_pipeline(ranks), stages=ranks)

    @classmethod
    def of_plan(cls, plan: Plan) -> Layout:
        """Returns the layout of a plan."""
        m = plan.microbatches
        layout = cls(plan.axes, len(plan.stages), plan.schedule, m, m, plan.weights, plan.actions)
        return replace(layout, sequence=plan.sequence_parallel).in_slices(plan.slices)


def pipelines(
    axes: Axes,
    counts: Iterable[tuple[int, int]],
    schedules: Iterable[ScheduleName],
    units: int,
    asked: int | None = None,
) -> Iterator[Layout]:
    """Yields the pipelines over the ranks of these axes; `counts`: (microbatches, microbatches of the whole
    batch). `asked`: the stages on a rank, where they are not chosen here.
    """
    for (microbatches, captured), schedule in product(counts, schedules):
        family = family_of(schedule)
        for chunks in family.chunk_counts(axes.pp, microbatches) if asked is None else (asked,):
            most = units if chunks == 1 or asked is not None else min(units, MOST_STAGES)
            if axes.pp * chunks <= most and family.takes_chunks(chunks, axes.pp, microbatches):
                yield Layout(axes, axes.pp * chunks, schedule, microbatches, captured)


_ONE: Final = Axes()


@final
@dataclass(frozen=True)
class AxisChoices:
    """Holds the sizes of axes that depend on the model or the request: those of cp, those of ep beside 1, and
    a mesh with the sizes of those axes that are `given` and that the search tries no other sizes of; the
    stages on a rank, where they are asked for.
    """

    contexts: Sequence[int] = (1,)
    experts: Sequence[int] = ()
    given: Axes = _ONE
    chunks: int | None = None

    def of_each_group(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the sizes of groups, each with their number, without the axes that are given."""
        given = self.given.group_size
        return [(size // given, pp) for size, pp in sizes if size % given == 0]


_ANY: Final = AxisChoices()


def all_layouts(
    cluster: Cluster,
    captured: Iterable[int],
    schedules: Sequence[ScheduleName],
    units: int,
    choices: AxisChoices = _ANY,
) -> Iterator[Layout]:
    """Yields all layouts of all devices.

    `captured`: the numbers of microbatches of the whole batch for which there is a model.
    """
    ascending, given = sorted(captured), choices.given.used
    per_node = gcd(*(part.domain for part in cluster.parts)) or cluster.domain
    sizes = choices.of_each_group(_sizes(cluster, units))
    for searched, weights in _meshes(sizes, per_node, choices) if sizes else ():
        axes = searched.model_copy(update=given)
        counts = counts_for(ascending if axes.token_parts == 1 else ascending[-1:], axes)
        for layout in pipelines(axes, counts, _worth(schedules, axes.pp), units, choices.chunks):
            yield replace(layout, weights=weights)


def host_layouts(
    cluster: Cluster, captured: Iterable[int], schedules: Sequence[ScheduleName], units: int
) -> Iterator[Layout]:
    """Yields layouts of one device with weights or optimizer states in host memory; none on CPUs.

    Schedules that are the same on one device, such as naive and 1f1b, are tried once.
    """
    if any(host_link(device) is None for device in cluster.devices):
        return
    same = (family_of(name).on_host_as for name in schedules)
    names = dict.fromkeys(name for name in same if name is not None)
    for layout in pipelines(Axes(), counts_for(sorted(captured), Axes()), names, units):
        yield from (replace(layout, weights=weights) for weights in HOSTED)


def grouped(cluster: Cluster, group: int) -> Cluster | None:
    """Returns the cluster with one device for each group; None where groups would straddle nodes."""
    if group == 1:
        return cluster
    parts = cluster.parts or (cluster.whole,)
    first = [sum(part.devices for part in parts[:place]) for place in range(len(parts))]
    filled = [_fills(group, cluster.devices[a : a + p.devices], p) for a, p in zip(first, parts, strict=True)]
    if not (any(filled) if cluster.unequal else all(filled)):
        return None
    used = [(a, part) for a, part, fills in zip(first, parts, filled, strict=True) if fills]
    fewer = [
        part.model_copy(
            update={
                "devices": part.devices // group,
                "devices_per_node": max(1, part.devices_per_node // group),
                "devices_per_domain": part.devices_per_domain and max(1, part.devices_per_domain // group),
            }
        )
        for _, part in used
    ]
    return cluster.model_copy(
        update={
            "devices": tuple(d for a, part in used for d in cluster.devices[a : a + part.devices : group]),
            "devices_per_node": fewer[0].devices_per_node,
            "devices_per_domain": fewer[0].devices_per_domain,
            "inner": fewer[0].inner,
            "parts": tuple(fewer) if cluster.parts else (),
        }
    )


def _fills(group: int, devices: Sequence[Device], part: Part) -> bool:
    """Returns whether groups of this size cover a part, each of one kind, within a node or of whole nodes."""
    size = part.devices_per_node
    if (size % group and group % size) or len(devices) % group:
        return False
    return all(_of_one_kind(devices[first : first + group]) for first in range(0, len(devices), group))


def _of_one_kind(devices: Iterable[Device]) -> bool:
    return len({(device.kind, device.memory_bytes) for device in devices}) == 1


def of_kind(cluster: Cluster, kind: str, memory_bytes: int) -> Cluster:
    """Returns the devices of one kind, in their nodes and with their links."""
    ranks = [r for r, d in enumerate(cluster.devices) if (d.kind, d.memory_bytes) == (kind, memory_bytes)]
    parts: list[Part] = []
    for _, node in groupby(ranks, cluster.node_of):
        node_ranks = list(node)
        part = cluster.part_of(node_ranks[0]).model_copy(
            update={"devices": len(node_ranks), "devices_per_node": len(node_ranks)}
        )
        if parts and parts[-1].model_copy(update={"devices": len(node_ranks)}) == part:
            part = part.model_copy(update={"devices": parts.pop().devices + len(node_ranks)})
        parts.append(part)
    return cluster.model_copy(
        update={
            "devices": tuple(cluster.devices[rank] for rank in ranks),
            "devices_per_node": parts[0].devices_per_node,
            "inner": parts[0].inner,
            "nics_per_node": parts[0].nics_per_node,
            "devices_per_domain": parts[0].devices_per_domain,
            "parts": tuple(parts) if len(parts) > 1 else (),
        }
    )


def _worth(schedules: Sequence[ScheduleName], ranks: int) -> Sequence[ScheduleName]:
    """Returns one schedule for one rank, which has no bubble under any of them, and those of pairs."""
    paired = [name for name in schedules if family_of(name).overlaps]
    plain = [name for name in schedules if name not in paired]
    return (preferred(plain), *paired) if ranks == 1 and plain else schedules


def counts_for(captured: Iterable[int], axes: Axes) -> list[tuple[int, int]]:
    """Returns pairs (microbatches of a replica, microbatches of the whole batch)."""
    return [(count // axes.replicas, count) for count in captured if count % axes.replicas == 0]


def _sizes(cluster: Cluster, units: int) -> list[tuple[int, int]]:
    """Returns the sizes of a group, each with the number of such groups, the fewest first; unequal groups may
    be idle.
    """
    devices = len(cluster.devices)
    if not cluster.unequal:
        return [(devices // pp, pp) for pp in _divisors(devices)]
    sizes = {size for part in cluster.parts or (cluster.whole,) for size in _divisors(part.devices)}
    grouped_clusters = ((size, grouped(cluster, size)) for size in sorted(sizes, reverse=True))
    return [
        (size, min(len(groups.devices), units)) for size, groups in grouped_clusters if groups is not None
    ]


def _meshes(
    sizes: Sequence[tuple[int, int]], per_node: int, choices: AxisChoices
) -> Iterator[tuple[Axes, Weights]]:
    """Yields the meshes of the axes that are searched, each with the ways to hold its weights."""
    largest = max(size for size, _ in sizes)
    within = [t for t in _divisors(per_node) if largest % t == 0]
    for tp, cp in product(within, choices.contexts):
        for replicas, pp in ((size // tp // cp, pp) for size, pp in sizes if size % (tp * cp) == 0):
            for shard in sorted({1, replicas, _largest(replicas, per_node // tp // cp)}):
                axes = Axes(pp=pp, tp=tp, cp=cp, dp_replicate=replicas // shard, dp_shard=shard)
                for weights in weight_modes(axes):
                    yield axes, weights
    yield from _expert_meshes(sizes, within, choices)


def _expert_meshes(
    sizes: Sequence[tuple[int, int]], within: Sequence[int], choices: AxisChoices
) -> Iterator[tuple[Axes, Weights]]:
    """Yields the meshes of which each rank of ep and tp has some of the experts."""
    experts = choices.experts
    groups = (
        (tp, cp, ep)
        for tp, cp, ep in product(within, choices.contexts, experts)
        if tp == 1 or tp * ep in experts
    )
    for (tp, cp, ep), (size, pp) in product(groups, sizes):
        replicas, left = divmod(size, tp * cp * ep)
        for shard in sorted({1, replicas}) if not left else ():
            axes = Axes(pp=pp, tp=tp, cp=cp, ep=ep, dp_replicate=replicas // shard, dp_shard=shard)
            for weights in weight_modes(axes):
                yield axes, weights


def weight_modes(axes: Axes) -> tuple[Weights, ...]:
    """Returns how the weights of ranks may be held: sharded, too, where several have the same ones."""
    on_devices = RESIDENT.name, SHARDED.name
    return on_devices if state_shards(axes, SHARDED.name) > 1 else on_devices[:1]


def _largest(replicas: int, limit: int) -> int:
    """Returns how many replicas within a node share their states."""
    return max(d for d in _divisors(replicas) if d <= max(1, limit))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def rank_named(device: str, cluster: Cluster) -> int:
    """Returns the index of a device in the cluster; raises UnknownDevice."""
    names = [d.name for d in cluster.devices]
    if device in names:
        return names.index(device)
    raise UnknownDevice(
        f"the plan names {device!r}, which cluster {cluster.name!r} has not",
        numbers=f"its devices: {', '.join(names)}",
        next_step=f"set the stage's device to {names[-1]!r}, or give a larger --cluster",
    )
