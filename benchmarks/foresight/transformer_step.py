"""Problem: how long does a training step of a transformer take under tp x pp x dp, from dimensions alone?

    layer      max(device, host): the device's seconds of its passes (roofline of their Works, kernels,
               collectives), or the host's for launching them: a device does not outrun its host. Under
               tp, + exposed x min(device, host): at a collective t ranks wait for the last, so neither
               hides the other wholly
    stage      its layers, on the first the embedding, on the last the head and the loss
    pipeline   the simulator on the real schedule, 1F1B or interleaved; where p does not divide m, which
               the interleaved schedule here needs, m(f + b) + (p - 1)(f + b)/v, with f and b of a rank
    step       pipeline + gradients (all-reduce of the rank that owns most) + Adam + a fixed part

Source: PTD-P, arXiv 2104.04473, sec. 2.2 (pipelines), 3.2 (bytes of tp), 4.1 (each rank of a tp group
sends 1/t of a boundary). Symbols: p -> pp, t -> tp, v -> chunks, m -> microbatches. Ranks: tp next to each
other, then dp, then pp, as Megatron-LM lays them out. Deviations: gradients do not overlap the backward,
nor does the all-reduce between the two ends' tied matrices count. Complexity: that of the simulation, for
at most 3 p microbatches: beyond them a step grows by the same seconds with each microbatch.
Oracle: tests/benchmarks/test_transformer_step.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import final

from pydantic import Field
from transformer import (
    SIZES,
    Op,
    Passes,
    Sharding,
    Transformer,
    boundary_bytes,
    embedding_ops,
    embedding_parameters,
    head_ops,
    head_parameters,
    layer_parameters,
    layer_passes,
    passes,
)

from outsize.ir.base import Record
from outsize.ir.cluster import Cluster, Device
from outsize.ir.graph import Work
from outsize.ir.schedule import Schedule
from outsize.planner.costs.collectives import collective_s
from outsize.planner.costs.roofline import seconds
from outsize.planner.simulation.simulate import StageCost, simulate
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

WIDE = 1 << 15
KNOWN = 3
SOCKET = 4  # GPUs of one of the two CPUs of a DGX or HGX node
ADAM_BYTES = 30  # read gradient (2), master, two moments (12); write them and the weight (14); clip (2)
COMPUTE = ("matmul", "attention", "convolution")


@final
class Multipliers(Record):
    """What calibration may turn, each with a meaning; the neutral values are the roofline's own.

    matmul, memory          x the roofline's seconds of matmuls (and attention), of all other ops
    wide_matmul             x, on top, for a matmul of more than 32,768 columns (the head without tp)
    kernel_s, host_s        seconds that each kernel costs the device beside its work, and its host
    inner, outer            x the seconds of collectives within a node, and between nodes
    some                    x, on top, for gradients of replicas that have several but not all GPUs of a node
    skew_s                  seconds that a collective waits for hosts, per socket (4 GPUs) beyond the first
    exposed                 share of the shorter of device and host that the longer does not hide, under tp
    optimizer, fixed_s      x the seconds of Adam's update; seconds of a step that nothing else explains
    """

    matmul: float = 1.0
    memory: float = 1.0
    wide_matmul: float = 1.0
    kernel_s: float = 0.0
    host_s: float = 1e-5
    inner: float = 1.0
    outer: float = 1.0
    some: float = 1.0
    skew_s: float = 1e-4
    exposed: float = 0.0
    optimizer: float = 1.0
    fixed_s: float = 1e-3


@final
class Job(Record):
    """A transformer, how a microbatch meets a rank, and how ranks share layers and batch."""

    model: Transformer
    sharding: Sharding
    pp: int = Field(default=1, ge=1)
    chunks: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)
    microbatches: int = Field(default=1, ge=1)

    @property
    def stages(self) -> int:
        """Of the pipeline: a rank has one for each of its chunks."""
        return self.pp * self.chunks

    def layers(self, stage: int) -> int:
        """Layers of a stage; those left over go to the middle first, since the ends have more to do."""
        order = [*range(1, self.stages - 1), 0, self.stages - 1]
        return self.model.layers // self.stages + (order.index(stage) < self.model.layers % self.stages)

    def parameters(self, rank: int) -> int:
        """Parameters on a rank of the pipeline."""
        layers = sum(self.layers(stage) for stage in range(rank, self.stages, self.pp))
        count = layers * layer_parameters(self.model, self.sharding)
        if rank == 0:
            count += embedding_parameters(self.model, self.sharding)
        if rank == self.pp - 1:
            count += head_parameters(self.model, self.sharding, own=self.pp > 1 or not self.model.tied)
        return count


def step_s(job: Job, cluster: Cluster, by: Multipliers, simulated: bool = True) -> float:
    """Seconds of one step. Not `simulated`: by the closed form of the pipeline, for many calls.

    Raises what `collective_s` and `simulate` raise.
    """
    costs = stage_costs(job, cluster, by)
    owned = max(job.parameters(rank) for rank in range(job.pp))
    moved, flops = ADAM_BYTES * owned, 12 * owned
    adam = Work(family="elementwise", dtype="float32", flops=flops, moved_bytes=moved, launches=4)
    pipeline_s = _pipeline_s(job, cluster, costs) if simulated else closed_form_s(job, costs)
    rest_s = by.optimizer * seconds((adam,), cluster.devices[0]) + by.fixed_s
    return pipeline_s + _gradients_s(job, owned, cluster, by) + rest_s


def stage_costs(job: Job, cluster: Cluster, by: Multipliers) -> list[StageCost]:
    """Seconds of each stage for one microbatch."""
    layer = _pair(job, layer_passes(job.model, job.sharding), 2, cluster, by)
    costs = []
    for stage in range(job.stages):
        pairs = [tuple(job.layers(stage) * s for s in layer)]
        for ops, multipliers in _ends(job, stage, by):
            pairs.append(_pair(job, passes(ops, job.sharding.dtype), 1, cluster, multipliers))
        forward_s, backward_s = map(sum, zip(*pairs, strict=True))
        costs.append(StageCost(forward_s=forward_s, backward_s=backward_s))
    return costs


def closed_form_s(job: Job, costs: Sequence[StageCost]) -> float:
    """Exact where the last rank is the slowest and links cost nothing."""
    busy = [sum(c.forward_s + c.backward_s for c in costs[rank :: job.pp]) for rank in range(job.pp)]
    return max(busy) * job.microbatches + (sum(busy) - max(busy)) / job.chunks


def _pipeline_s(job: Job, cluster: Cluster, costs: Sequence[StageCost]) -> float:
    """Seconds from the first forward to the last backward."""
    if job.pp == 1 or (job.chunks > 1 and job.microbatches % job.pp):
        return closed_form_s(job, costs)
    known = min(job.microbatches, KNOWN * job.pp)
    first = _simulated(job, known, costs, cluster)
    if known == job.microbatches:
        return first
    each = (first - _simulated(job, known - job.pp, costs, cluster)) / job.pp
    return first + (job.microbatches - known) * each


def tp_ranks(job: Job) -> range:
    """The ranks of one tp group."""
    return range(job.sharding.tp)


def dp_ranks(job: Job) -> range:
    """The ranks of one dp group of the first stage: each tp-th."""
    return range(0, job.sharding.tp * job.sharding.cp * job.dp, job.sharding.tp)


def _simulated(job: Job, microbatches: int, costs: Sequence[StageCost], cluster: Cluster) -> float:
    schedule = _schedule(job.pp, job.chunks, microbatches)
    edge = _message_bytes(job) // job.sharding.tp
    forward = {(s, s + 1): edge for s in range(job.stages - 1)}
    backward = {(s + 1, s): edge for s in range(job.stages - 1)}
    apart = len(cluster.devices) // job.pp
    timeline = simulate(schedule, costs, forward, backward, lambda a, b: cluster.link(a * apart, b * apart))
    return timeline.duration_s


@lru_cache(maxsize=256)
def _schedule(ranks: int, chunks: int, microbatches: int) -> Schedule:
    stages = ranks * chunks
    forward = frozenset((s, s + 1) for s in range(stages - 1))
    backward = frozenset((s + 1, s) for s in range(stages - 1))
    name = "1f1b" if chunks == 1 else "interleaved"
    return lower(build(name, stages, microbatches, ranks=ranks), forward, backward)


def _ends(job: Job, stage: int, by: Multipliers) -> Iterator[tuple[list[Op], Multipliers]]:
    """What the first and the last stage have beside layers."""
    if stage == 0:
        yield embedding_ops(job.model, job.sharding), by
    if stage == job.stages - 1:
        wide = by.wide_matmul if job.model.vocabulary / job.sharding.tp > WIDE else 1.0
        yield head_ops(job.model, job.sharding), by.model_copy(update={"matmul": by.matmul * wide})


def _pair(job: Job, of: Passes, collectives: int, cluster: Cluster, by: Multipliers) -> tuple[float, float]:
    """Forward and backward seconds, with so many collectives of tp in each and again where it is repeated.

    Launches run ahead: the host is waited for only where it needs longer than the device for both passes, but
    for what collectives of tp expose.
    """
    again = collectives if of.recompute else 0
    back = (*of.backward_input, *of.backward_weight, *of.recompute)
    message, device = _tp_s(job, cluster, by), cluster.devices[0]
    forward = _pass(of.forward, collectives, message, device, by)
    backward = _pass(back, collectives + again, message, device, by)
    busy_s, host_s = (sum(pair) for pair in zip(forward, backward, strict=True))
    exposed_s = by.exposed * min(host_s, busy_s) if job.sharding.tp > 1 else 0.0
    waiting = (max(busy_s, host_s) + exposed_s) / busy_s if busy_s else 1.0
    return forward[0] * waiting, backward[0] * waiting


def _pass(
    works: Sequence[Work], collectives: int, message: tuple[float, float], device: Device, by: Multipliers
) -> tuple[float, float]:
    """Seconds of the device, and of the host to launch it: a bare collective costs it next to nothing."""
    launches = sum(work.launches for work in works)
    device_s = sum(_multiplier(work, by) * seconds((work,), device) for work in works)
    device_s += (launches + (collectives if message[0] else 0)) * by.kernel_s + collectives * message[0]
    return device_s, launches * by.host_s + collectives * message[1]


def _multiplier(work: Work, by: Multipliers) -> float:
    if work.family not in COMPUTE:
        return by.memory
    return by.matmul


def _tp_s(job: Job, cluster: Cluster, by: Multipliers) -> tuple[float, float]:
    """Seconds of one collective of a layer: on the device, and what hosts wait for each other."""
    tp = job.sharding.tp
    if tp == 1:
        return 0.0, 0.0
    size = _message_bytes(job)
    wire = by.inner if tp <= cluster.devices_per_node else by.outer
    return wire * collective_s("all_reduce", size, tp_ranks(job), cluster), (tp - 1) // SOCKET * by.skew_s


def _message_bytes(job: Job) -> int:
    whole = job.sharding.model_copy(update={"sequence_parallel": False})
    return boundary_bytes(job.model, whole)


def _gradients_s(job: Job, owned: int, cluster: Cluster, by: Multipliers) -> float:
    """All-reduce (or reduce-scatter and all-gather: as many bytes) in the dtype of the gradients."""
    ranks = dp_ranks(job)
    if len(ranks) == 1:
        return 0.0
    apart, per_node = ranks.step, cluster.devices_per_node
    several = by.some if 1 < apart < per_node else 1.0
    wire = by.inner if ranks[-1] < per_node else by.outer * several
    return wire * collective_s("all_reduce", owned * SIZES[job.sharding.dtype], ranks, cluster)
