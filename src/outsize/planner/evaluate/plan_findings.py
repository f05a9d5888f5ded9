"""Finds what a plan reports of its own work and memory: slowest stage, fullest device, what does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from outsize.ir.cluster import Cluster, Device
from outsize.ir.findings import (
    DeviceKindUse,
    FullestDevice,
    MemoryShortage,
    SlowestStage,
    StepMemory,
    UntrainedStages,
)
from outsize.ir.graph import ModelGraph
from outsize.ir.units.names import compress
from outsize.planner.memory.account import StageMemory
from outsize.planner.partition.stage_weights import Demand
from outsize.planner.simulation.simulate import StageCost
from outsize.schedules.families import DEFAULT

# This many units of the fullest device are named.
LARGEST_NAMED = 3
# A step of an engine is named where it saves this share of what the fullest device holds.
SAVING_NAMED = 0.01


def slowest_stage(graph: ModelGraph, bounds: Sequence[int], costs: Sequence[StageCost]) -> SlowestStage:
    """Returns the stage that sets the pace, and its share of the work."""
    seconds = [c.forward_s + c.backward_s for c in costs]
    slowest = seconds.index(max(seconds))
    return SlowestStage(
        stage=slowest,
        units=tuple(compress([u.name for u in graph.units], bounds[slowest], bounds[slowest + 1] - 1)),
        compute_s=seconds[slowest],
        share=seconds[slowest] / sum(seconds) if sum(seconds) else 0.0,
        even_share=1 / len(costs),
    )


def untrained_stages(graph: ModelGraph, bounds: Sequence[int]) -> Iterator[UntrainedStages]:
    """Yields the stages without trainable weights, unless the whole model is frozen."""
    demand = Demand.of(graph, range(len(graph.units) + 1), frozen=False)
    stages = tuple(stage for stage, run in enumerate(pairwise(bounds)) if not demand.met(*run))
    if stages and demand.pieces:
        stages_in_all, units = len(bounds) - 1, len(graph.units)
        yield UntrainedStages(
            stages=stages, stages_in_all=stages_in_all, trained_units=demand.pieces, units=units
        )


def fullest_device(
    memories: Sequence[StageMemory], devices: Sequence[Device], ranks: Sequence[int], group: int = 1
) -> FullestDevice:
    """Returns the device closest to its limit, and its largest units.

    Stage s is on rank `ranks[s]`, a group of `group` devices like `devices[s]`.
    """
    used = [0] * (max(ranks) + 1)
    for rank, memory in zip(ranks, memories, strict=True):
        used[rank] += memory.peak_bytes
    fractions = [used[rank] / device.memory_bytes for rank, device in zip(ranks, devices, strict=True)]
    fullest = fractions.index(max(fractions))
    rank, device = ranks[fullest], devices[fullest]
    own_memories = [m for at, m in zip(ranks, memories, strict=True) if at == rank]
    largest = sorted((unit for m in own_memories for unit in m.largest), key=lambda unit: -unit[1])
    return FullestDevice(
        device=device.name,
        same_devices=group - 1,
        used_bytes=used[rank],
        memory_bytes=device.memory_bytes,
        microbatches_in_flight=sum(m.in_flight for m in own_memories),
        largest=tuple(largest[:LARGEST_NAMED]),
    )


def step_memory(graph: ModelGraph, loop: Sequence[int], step: Sequence[int]) -> Iterator[StepMemory]:
    """Yields what a step of an engine would save, where the loop is the user's own and it is worth a word;
    `loop` and `step` are the peaks of the stages, those of a step by the usual schedule and without a loss.
    """
    *others, last = step
    with_loss = max([*others, last + graph.returned_bytes])  # The loss of one microbatch.
    if graph.in_loop and with_loss < (1 - SAVING_NAMED) * max(loop):
        yield StepMemory(loop_bytes=max(loop), step_bytes=with_loss, schedule=DEFAULT.name)


def device_kinds(
    graph: ModelGraph, bounds: Sequence[int], devices: Sequence[Device], cluster: Cluster, group: int
) -> Iterator[DeviceKindUse]:
    """Yields, on a cluster with several kinds of devices, the stages and the share of the work of each kind.

    `devices` are the first of each stage's group.
    """
    if not cluster.unequal:
        return
    work = [sum(u.flops for u in graph.units[a:b]) for a, b in pairwise(bounds)]
    for kind, number in Counter(device.kind for device in cluster.devices).items():
        stages = tuple(stage for stage, device in enumerate(devices) if device.kind == kind)
        yield DeviceKindUse(
            kind=kind,
            stages=stages,
            devices=number,
            busy_devices=group * len({devices[stage].name for stage in stages}),
            flops_share=sum(work[stage] for stage in stages) / max(sum(work), 1),
        )


def shortages(memories: Sequence[StageMemory], room_devices: Sequence[Device]) -> tuple[MemoryShortage, ...]:
    """Returns a finding for each stage that does not fit its device, whose memory is what a peak may take."""
    return tuple(
        shortage(stage, memory, room)
        for stage, (memory, room) in enumerate(zip(memories, room_devices, strict=True))
        if memory.peak_bytes > room.memory_bytes
    )


def shortage(stage: int, memory: StageMemory, room: Device) -> MemoryShortage:
    """Returns what a stage needs and what its device has; `room` is a device with usable memory."""
    return MemoryShortage(
        stage=stage, device=room.name, needs_bytes=memory.peak_bytes, room_bytes=room.memory_bytes
    )
