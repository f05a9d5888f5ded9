"""Problem: how certain is a predicted peak, and how much memory must a device have to hold it?

    least   the computed peak with the error of 19 of 20 real stages, the allocator's segments at their
            smallest, the context: a step runs with this much, and `room_bytes` is its inverse
    P50     the computed peak, the context, and what allocator and cuDNN keep on a device with room for it
    P95     the same with the error of 19 of 20 stages and steps; no less than `least`

A device that has `least` and no more holds the step, because the allocator gives free segments back before it
fails and cuDNN takes another algorithm: P50 and P95 end at its memory. So P95 fits where `least` does.

    context    of the driver, by kind of device; a workspace of cuBLAS for the thread of the forward and one
               for autograd's (torch's CublasHandlePool.cpp)
    kept       free segments, at P50 and at P95. With convolutions `kept_tensors` times the largest tensor
               that one with a workspace takes or gives, since many tensors are nearly as large and cuDNN's
               workspaces are up to 2.25 times as large as those of an op; and cuDNN's code, where the context
               is without it. Without, `kept_shares` of the peak

Error model: 168 stages of benchmarks/memory (28 models x 3 plans, real steps; half of the models were held
out) were measured, and 95 % of them hold at most `unseen` more than predicted. Replays of the same steps by
benchmarks/memory/caching_allocator.py give `fragmented`, and replays of image models of the usual size
(benchmarks/memory/reserved.py, half 0) what is kept. cuDNN's code is in ir/hardware/devices.json.
Deviations: memory of NCCL is not counted; every CUDA device is taken to load the same libraries.
Complexity: O(users of all values). Oracle: tests/parity/test_memory_real.py, real steps;
tests/unit/planner/memory/test_headroom.py replays the allocator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final, Self, final

from outsize.ir.base import Record
from outsize.ir.cluster import Cluster
from outsize.ir.findings import PeakMargin
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.constants import DataFile
from outsize.ir.hardware.devices import Device

# CUDA's caching allocator takes memory from the driver in segments: one size for blocks of at most 1 MiB, one
# for blocks below 10 MiB (c10/cuda/CUDACachingAllocator.cpp).
SMALL_SEGMENT: Final = 2 * 1024**2
LARGE_SEGMENT: Final = 20 * 1024**2


@final
class Margins(Record):
    """Holds what a prediction leaves out; headroom.json has the numbers with their origin.

    `unseen` is by how much real stages are above what is predicted (95 % of them), `fragmented` the share
    that the allocator reserves beyond the allocated bytes and one segment of each pool. Free segments on a
    device with room are `kept_tensors` times the largest tensor around a convolution where cuDNN tries
    algorithms, and `kept_shares` of the peak elsewhere, at P50 and at P95.
    """

    unseen: float
    fragmented: float
    kept_tensors: tuple[float, float]
    kept_shares: tuple[float, float]


MARGINS: Final = Margins.model_validate(DataFile.beside(__file__).constants())

# What a convolution with a workspace takes and gives sets what is kept: on an H200 a MobileNetV2 keeps twice
# its largest tensor and six times that of its first convolution, a ResNet six times its largest, which is
# both (benchmarks/one-gpu). Depthwise convolutions and those of single pixels, which are products, have none:
# Swin, ConvNeXt and ViT hold 0.2 to 0.6 GiB beside their peak and context.


@final
@dataclass(frozen=True, slots=True)
class Load:
    """Says what a device's stages do with its allocator: the largest tensor that a convolution with a
    workspace takes or gives, and whether there is one.
    """

    largest_bytes: int = 0
    convolves: bool = False

    @classmethod
    def of(cls, graph: ModelGraph, first: int, end: int, shards: int = 1) -> Self:
        """Finds the load of the units first..end-1, of whose tensors a device has one of `shards` parts."""
        units = frozenset(_with_workspace(graph, first, end))
        if not units:
            return cls()
        around = (
            v.storage_bytes or v.size_bytes
            for v in graph.values
            if v.producer in units or not units.isdisjoint(v.consumers)
        )
        return cls(-(-max(around, default=0) // shards), convolves=True)

    def with_stage(self, other: Self) -> Self:
        """Returns the load of a device that has the stages of both."""
        return type(self)(max(self.largest_bytes, other.largest_bytes), self.convolves or other.convolves)


def _with_workspace(graph: ModelGraph, first: int, end: int) -> Iterator[int]:
    """Yields the units first..end-1 whose convolutions read several pixels for one."""
    of_units = graph.units[first:end]
    convolving = [u for u in of_units if any(work.family == "convolution" for work in u.forward)]
    if not convolving:
        return
    pixels = {p.name: prod(p.shape[2:]) for p in graph.parameters}
    yield from (u.index for u in convolving if any(pixels.get(name, 1) > 1 for name in u.parameters))


@final
@dataclass(frozen=True, slots=True)
class InUse:
    """Holds what a device's memory is used for besides the counted peak, at P50, and both totals."""

    context_bytes: int
    kept_bytes: int
    p50_bytes: int
    p95_bytes: int


def in_use(peak_bytes: int, device: Device, load: Load) -> InUse:
    """Returns what a step takes of a device's memory, as the driver shows it."""
    context_bytes, least_bytes = device.fixed_bytes, least(peak_bytes, device)
    wanted_bytes = most_bytes = 0
    if device.is_accelerator:
        likely_bytes, rare_bytes = (kept * load.largest_bytes for kept in MARGINS.kept_tensors)
        libraries_bytes = device.library_bytes
        if not load.convolves:
            likely_bytes, rare_bytes = (fraction * peak_bytes for fraction in MARGINS.kept_shares)
            libraries_bytes = 0
        wanted_bytes = round(likely_bytes) + libraries_bytes
        most_bytes = round(peak_bytes * (1 + MARGINS.unseen) + rare_bytes) + libraries_bytes
        most_bytes += LARGE_SEGMENT + SMALL_SEGMENT + context_bytes
    kept_bytes = max(0, min(wanted_bytes, device.memory_bytes - peak_bytes - context_bytes))
    return InUse(
        context_bytes=context_bytes,
        kept_bytes=kept_bytes,
        p50_bytes=peak_bytes + context_bytes + kept_bytes,
        p95_bytes=max(least_bytes, min(most_bytes, device.memory_bytes)),
    )


def least(peak_bytes: int, device: Device) -> int:
    """Returns the memory with which 19 of 20 real stages run; it is compared with the device's memory."""
    needed_bytes = peak_bytes * (1 + MARGINS.unseen)
    if device.is_accelerator:
        needed_bytes += peak_bytes * MARGINS.fragmented + LARGE_SEGMENT + SMALL_SEGMENT
    return round(needed_bytes) + device.fixed_bytes


def peak_margin(device: Device) -> PeakMargin:
    """Returns the parts that P95 adds to a predicted peak."""
    if not device.is_accelerator:
        return PeakMargin(unseen_share=MARGINS.unseen)
    return PeakMargin(
        unseen_share=MARGINS.unseen,
        fragmented_share=MARGINS.fragmented,
        segments_bytes=LARGE_SEGMENT + SMALL_SEGMENT,
        context_bytes=device.fixed_bytes,
        kept_tensors=MARGINS.kept_tensors[1],
        kept_share=MARGINS.kept_shares[1],
        cudnn_bytes=device.library_bytes,
    )


def room_bytes(device: Device) -> int:
    """Returns the largest peak whose P95 fits the device; the inverse of `least`."""
    available_bytes = device.memory_bytes - device.fixed_bytes
    if not device.is_accelerator:
        return int(available_bytes / (1 + MARGINS.unseen))
    return int((available_bytes - LARGE_SEGMENT - SMALL_SEGMENT) / (1 + MARGINS.unseen + MARGINS.fragmented))


def with_usable_memory(cluster: Cluster) -> Cluster:
    """Returns the cluster with each device's memory reduced to the peak that fits it (`room_bytes`)."""
    devices = (d.model_copy(update={"memory_bytes": max(1, room_bytes(d))}) for d in cluster.devices)
    return cluster.model_copy(update={"devices": tuple(devices)})
