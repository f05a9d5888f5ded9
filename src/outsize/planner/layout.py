"""Problem: which ways are there to lay a model on N devices?

A layout says everything but the cuts: p pipeline ranks of k = dp_replicate x dp_shard x cp x tp devices each,
v stages on a rank, the schedule, the size and number of microbatches. Rank r of the pipeline is the devices
[r k, (r + 1) k); within it tp is innermost, then cp, then dp_shard, then dp_replicate, so what talks most is
nearest.

    runs today    pp alone, all devices, one rank each
    what-if       every factorisation N = pp x dp_replicate x dp_shard x cp x tp, tp within a node, dp_shard
                  all of the replicas or those of a node, as ZeRO-1 (states) or as FSDP (weights too)
    cp            of the sizes that context.py allows, and with the smallest microbatches alone: fewer
                  samples at a time save as many bytes as fewer tokens of each, and send nothing
    host          where nothing else fits: all devices as one pipeline, or as replicas (offload.py)

Symbols as in arXiv 2104.04473 (p, t, d) and torch's DeviceMesh. Complexity: O(divisors of N, cubed).
Oracle: tests/unit/planner/test_planner_layout.py counts the factorisations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import Final, final

from outsize.ir.cluster import Cluster
from outsize.ir.devices import host_link
from outsize.ir.plan import Axes, Plan, ScheduleName, Weights
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
    """

    axes: Axes
    stages: int
    schedule: ScheduleName
    microbatches: int
    captured: int
    weights: Weights = "resident"
    actions: tuple[str, ...] = ()

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
    def what_if(self) -> bool:
        """Whether nothing runs it yet."""
        return self.group > 1 or self.weights == "host"

    @classmethod
    def of_plan(cls, plan: Plan) -> Layout:
        """What the plan says."""
        m = plan.microbatches
        return cls(plan.axes, len(plan.stages), plan.schedule, m, m, plan.weights, plan.actions)


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
    for axes, weights in _meshes(len(cluster.devices), per_node, contexts):
        counts = _counts(given if axes.cp == 1 else given[-1:], axes)
        for layout in pipelines(axes, counts, _worth(schedules, axes.pp), units):
            yield replace(layout, weights=weights)


def hosted(
    cluster: Cluster, captured: Iterable[int], schedules: Sequence[ScheduleName], units: int
) -> Iterator[Layout]:
    """Weights in host memory: a pipeline of all devices, or replicas of one stage; not on CPUs."""
    devices, given = len(cluster.devices), sorted(captured)
    if any(host_link(device) is None for device in cluster.devices):
        return
    for axes in dict.fromkeys((Axes(dp_replicate=devices), Axes(pp=devices))):
        names: list[ScheduleName] = [name for name in schedules if name in ("gpipe", "1f1b")]
        if axes.pp > 1:
            names = names[:1]  # weights come for every microbatch, whatever the schedule
        for layout in pipelines(axes, _counts(given, axes), names, units):
            yield replace(layout, weights="host")


def grouped(cluster: Cluster, group: int) -> Cluster | None:
    """The cluster as a pipeline sees it, a device for each group; None where groups would straddle nodes."""
    if group == 1:
        return cluster
    sizes = [part.devices_per_node for part in cluster.parts] or [cluster.devices_per_node]
    counts = [part.devices for part in cluster.parts] or [len(cluster.devices)]
    straddling = any(size % group and group % size for size in sizes)
    if straddling or any(count % group for count in counts):
        return None
    parts = (
        part.model_copy(update={"devices": part.devices // group, "devices_per_node": max(1, size // group)})
        for part, size in zip(cluster.parts, sizes, strict=False)
    )
    return cluster.model_copy(
        update={
            "devices": cluster.devices[::group],
            "devices_per_node": max(1, sizes[0] // group),
            "parts": tuple(parts),
        }
    )


def _chunks(schedule: ScheduleName, ranks: int, microbatches: int) -> tuple[int, ...]:
    """Stages on a rank; several only help when all ranks are busy with the first ones."""
    if schedule not in SEVERAL:
        return (1,)
    return CHUNKS if 1 < ranks <= microbatches else ()


def _worth(schedules: Sequence[ScheduleName], ranks: int) -> Sequence[ScheduleName]:
    """One rank has no bubble, whatever the schedule; 1f1b holds least."""
    return ("1f1b",) if ranks == 1 and "1f1b" in schedules else schedules


def _counts(given: Iterable[int], axes: Axes) -> list[tuple[int, int]]:
    """(microbatches of a replica, of the whole batch)."""
    return [(count // axes.replicas, count) for count in given if count % axes.replicas == 0]


def _meshes(devices: int, per_node: int, contexts: Sequence[int]) -> Iterator[tuple[Axes, Weights]]:
    within = (t for t in _divisors(devices) if per_node % t == 0)
    for tp, cp in ((t, c) for t, c in product(within, contexts) if devices // t % c == 0):
        for pp in _divisors(devices // tp // cp):
            replicas = devices // tp // cp // pp
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
    if schedule == ZERO_BUBBLE_V:
        return (2,) if ranks > 1 else (1,)
