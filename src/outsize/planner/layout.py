"""Problem: which ways are there to lay a model on N devices?

A layout says everything but the cuts: p pipeline ranks of k = dp_replicate x dp_shard x cp x tp devices each,
v stages on a rank, the schedule, the size and number of microbatches. Rank r of the pipeline is the devices
[r k, (r + 1) k); within it tp is innermost, then cp, then dp_shard, then dp_replicate, so what talks most is
nearest. On unequal devices a group is of one kind, for it would be as slow as its slowest member: groups are
formed within the parts of a cluster, and a part that they do not fill stays idle. p is then at most their
number: order.py and fleet.py decide which of them work.

    by itself     pp alone, all devices, one rank each; other axes where they are asked for
    all axes      every factorisation N = pp x dp_replicate x dp_shard x cp x tp, tp within a node, dp_shard
                  all of the replicas or those of a node, as ZeRO-1 (resident) or as FSDP (weights too)
    cp            of the sizes that context.py allows, and with the smallest microbatches alone: fewer
                  samples at a time save as many bytes as fewer tokens of each, and send nothing
    host          where nothing else fits: one device (offload.py), or several in turns (looped.py)

Symbols as in arXiv 2104.04473 (p, t, d) and torch's DeviceMesh. Complexity: O(divisors of N, cubed).
Oracle: tests/unit/planner/test_planner_layout.py counts the factorisations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import gcd
from typing import Final, final

from outsize.errors import UnknownDevice
from outsize.ir.cluster import Cluster, Part
from outsize.ir.devices import Device, host_link
from outsize.ir.offload import HOSTED, Weights
from outsize.ir.plan import Axes, Plan, ScheduleName, beyond
from outsize.ir.schedule import ZERO_BUBBLE_V, placed
from outsize.schedules.builders import SEVERAL

How = tuple[ScheduleName, int, int, int, tuple[str, ...]]
"""What `schedules.planned` takes: name, stages, microbatches, ranks, actions."""
CHUNKS: Final = (2, 4)
# Of an interleaved layout; with more, what is sent rules.
MOST_STAGES: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """Everything but the cuts; `stages` in all, `microbatches` of each replica.

    `captured`: under how many microbatches of the whole batch the model was captured at this size.
    `sequence`: tp divides what lies between layers as well.
    """

    axes: Axes
    stages: int
    schedule: ScheduleName
    microbatches: int
    captured: int
    weights: Weights = "resident"
    actions: tuple[str, ...] = ()
    sequence: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """Stage -> rank of the pipeline."""
        return placed(self.schedule, self.stages, self.axes.pp, self.actions)

    @property
    def chunks(self) -> int:
        """Stages on a rank; on the one with most of them, where `actions` place them."""
        return max(Counter(self.ranks).values()) if self.actions else self.stages // self.axes.pp

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return tuple(stage for stage, at in enumerate(self.ranks) if at == rank)

    def how(self, microbatches: int | None = None) -> How:
        """The schedule of all its microbatches, or of so many."""
        count = self.microbatches if microbatches is None else microbatches
        return self.schedule, self.stages, count, self.axes.pp, self.actions

    @property
    def group(self) -> int:
        """Devices that work on one stage."""
        return self.axes.world_size // self.axes.pp

    @property
    def replicas(self) -> int:
        """Parts of the batch that are worked on at the same time."""
        return self.axes.dp_replicate * self.axes.dp_shard

    @property
    def ways(self) -> int:
        """Devices that share the work of one microbatch."""
        return self.axes.tp * self.axes.cp

    @property
    def hosted(self) -> bool:
        """Whether the host keeps some of what a step needs."""
        return self.weights in HOSTED

    @property
    def what_if(self) -> bool:
        """Whether nothing runs it yet."""
        return bool(beyond(self.axes, self.weights))

    def on(self, ranks: int) -> Layout:
        """With so many ranks, a stage each: groups may stay idle."""
        return replace(self, axes=self.axes.model_copy(update={"pp": ranks}), stages=ranks)

    @classmethod
    def of_plan(cls, plan: Plan) -> Layout:
        """What the plan says."""
        m = plan.microbatches
        found = cls(plan.axes, len(plan.stages), plan.schedule, m, m, plan.weights, plan.actions)
        return replace(found, sequence=plan.sequence_parallel)


def pipelines(
    axes: Axes, counts: Iterable[tuple[int, int]], schedules: Iterable[ScheduleName], units: int
) -> Iterator[Layout]:
    """Pipelines over the ranks of these axes; `counts`: (microbatches, microbatches of the whole batch)."""
    for (microbatches, captured), schedule in product(counts, schedules):
        for chunks in _chunks(schedule, axes.pp, microbatches):
            if axes.pp * chunks <= (units if chunks == 1 else min(units, MOST_STAGES)):
                yield Layout(axes, axes.pp * chunks, schedule, microbatches, captured)


def everything(
    cluster: Cluster,
    captured: Iterable[int],
    schedules: Sequence[ScheduleName],
    units: int,
    contexts: Sequence[int] = (1,),
) -> Iterator[Layout]:
    """All layouts of all devices; `captured` are the microbatches of the whole batch there is a model for.

    `contexts` are the sizes of cp.
    """
    given = sorted(captured)
    per_node = gcd(*(part.devices_per_node for part in cluster.parts)) or cluster.devices_per_node
    for axes, weights in _meshes(_sizes(cluster, units), per_node, contexts):
        counts = counts_for(given if axes.cp == 1 else given[-1:], axes)
        for layout in pipelines(axes, counts, _worth(schedules, axes.pp), units):
            yield replace(layout, weights=weights)


def hosted(
    cluster: Cluster, captured: Iterable[int], schedules: Sequence[ScheduleName], units: int
) -> Iterator[Layout]:
    """Weights or their optimizer in host memory, of one device; not on CPUs."""
    if any(host_link(device) is None for device in cluster.devices):
        return
    known: dict[ScheduleName, ScheduleName] = {"gpipe": "gpipe", "1f1b": "1f1b", "naive": "1f1b"}
    # naive is 1f1b of one rank.
    names: dict[ScheduleName, None] = {known[name]: None for name in schedules if name in known}
    for layout in pipelines(Axes(), counts_for(sorted(captured), Axes()), names, units):
        yield from (replace(layout, weights=weights) for weights in HOSTED)


def grouped(cluster: Cluster, group: int) -> Cluster | None:
    """The cluster as a pipeline sees it, a device for each group; None where groups would straddle nodes."""
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
            }
        )
        for _, part in used
    ]
    return cluster.model_copy(
        update={
            "devices": tuple(d for a, part in used for d in cluster.devices[a : a + part.devices : group]),
            "devices_per_node": fewer[0].devices_per_node,
            "inner": fewer[0].inner,
            "parts": tuple(fewer) if cluster.parts else (),
        }
    )


def _fills(group: int, devices: Sequence[Device], part: Part) -> bool:
    """Whether such groups are all of a part, each of one kind, within a node or of whole nodes."""
    size = part.devices_per_node
    if (size % group and group % size) or len(devices) % group:
        return False
    return all(_alike(devices[first : first + group]) for first in range(0, len(devices), group))


def _alike(devices: Iterable[Device]) -> bool:
    return len({(device.kind, device.memory_bytes) for device in devices}) == 1


def of_kind(cluster: Cluster, kind: str, memory_bytes: int) -> Cluster:
    """The devices of one kind alone, in the nodes and with the links that they have."""
    ranks = [r for r, d in enumerate(cluster.devices) if (d.kind, d.memory_bytes) == (kind, memory_bytes)]
    parts: list[Part] = []
    for _, node in groupby(ranks, cluster.node_of):
        here = list(node)
        part = cluster.part_of(here[0]).model_copy(
            update={"devices": len(here), "devices_per_node": len(here)}
        )
        if parts and parts[-1].model_copy(update={"devices": len(here)}) == part:
            part = part.model_copy(update={"devices": parts.pop().devices + len(here)})
        parts.append(part)
    return cluster.model_copy(
        update={
            "devices": tuple(cluster.devices[rank] for rank in ranks),
            "devices_per_node": parts[0].devices_per_node,
            "inner": parts[0].inner,
            "nics_per_node": parts[0].nics_per_node,
            "parts": tuple(parts) if len(parts) > 1 else (),
        }
    )


def _chunks(schedule: ScheduleName, ranks: int, microbatches: int) -> tuple[int, ...]:
    """Stages on a rank; several only help when all ranks are busy with the first ones."""
    if schedule not in SEVERAL:
        return (1,)
    if schedule == ZERO_BUBBLE_V:
        return (2,) if ranks > 1 else (1,)
    return CHUNKS if 1 < ranks <= microbatches else ()


def _worth(schedules: Sequence[ScheduleName], ranks: int) -> Sequence[ScheduleName]:
    """One rank has no bubble, whatever the schedule; 1f1b holds least."""
    return ("1f1b",) if ranks == 1 and "1f1b" in schedules else schedules


def counts_for(given: Iterable[int], axes: Axes) -> list[tuple[int, int]]:
    """(microbatches of a replica, of the whole batch)."""
    return [(count // axes.replicas, count) for count in given if count % axes.replicas == 0]


def _sizes(cluster: Cluster, units: int) -> list[tuple[int, int]]:
    """Sizes of a group, each with the number of such groups, the fewest first; unequal ones may be idle."""
    devices = len(cluster.devices)
    if not cluster.unequal:
        return [(devices // pp, pp) for pp in _divisors(devices)]
    wanted = {size for part in cluster.parts or (cluster.whole,) for size in _divisors(part.devices)}
    found = ((size, grouped(cluster, size)) for size in sorted(wanted, reverse=True))
    return [(size, min(len(groups.devices), units)) for size, groups in found if groups is not None]


def _meshes(
    sizes: Sequence[tuple[int, int]], per_node: int, contexts: Sequence[int]
) -> Iterator[tuple[Axes, Weights]]:
    most = max(size for size, _ in sizes)
    within = (t for t in _divisors(per_node) if most % t == 0)
    for tp, cp in product(within, contexts):
        for replicas, pp in ((size // tp // cp, pp) for size, pp in sizes if size % (tp * cp) == 0):
            yield Axes(pp=pp, tp=tp, cp=cp, dp_replicate=replicas), "resident"
            for shard in sorted({replicas, _largest(replicas, per_node // tp // cp)} - {1}):
                axes = Axes(pp=pp, tp=tp, cp=cp, dp_replicate=replicas // shard, dp_shard=shard)
                yield axes, "resident"
                yield axes, "sharded"


def _largest(replicas: int, most: int) -> int:
    """Replicas that share their states within a node."""
    return max(d for d in _divisors(replicas) if d <= max(1, most))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def rank_named(device: str, cluster: Cluster) -> int:
    """Its number in the cluster. Raises UnknownDevice."""
    names = [d.name for d in cluster.devices]
    if device in names:
        return names.index(device)
    raise UnknownDevice(
        f"the plan names {device!r}, which cluster {cluster.name!r} has not",
        numbers=f"its devices: {', '.join(names)}",
        next_step=f"set the stage's device to {names[-1]!r}, or give a larger --cluster",
    )
