"""Problem: how certain is a predicted peak, and how much memory must a device have to hold it?

    P50   the computed peak, and the context that a process has on the device
    P95   the computed peak with the error of 19 of 20 real stages, the allocator's segments, the context

Error model: 168 stages of benchmarks/memory (28 models x 3 plans, real steps; half of the models were held
out) were measured, and 95 % of them hold at most UNSEEN more than predicted. On a GPU the caching allocator
reserves whole segments: the last one of each pool may be nearly empty, and a share FRAGMENTED of the others
is in blocks that no request fits (replays of the same steps by benchmarks/memory/caching_allocator.py).
Nothing was fitted to figures of other machines. Oracle: tests/parity/test_memory_real.py, real steps.
"""

from __future__ import annotations

from typing import Final

from outsize.ir.cluster import Cluster
from outsize.ir.findings import PeakMargin
from outsize.ir.hardware.devices import Device

# CUDA's caching allocator takes memory from the driver in segments: one size for blocks of at most 1 MiB, one
# for blocks below 10 MiB (c10/cuda/CUDACachingAllocator.cpp).
SMALL_SEGMENT: Final = 2 * 1024**2
LARGE_SEGMENT: Final = 20 * 1024**2
# Upper end of (real - predicted) / predicted, 95 % of the stages of benchmarks/memory: 1.0 % (2026-11).
UNSEEN: Final = 0.01
# The allocator reserves this share beyond the allocated bytes and one segment of each pool: 95 % of the
# stages of 100 MB or more (23 of 84).
FRAGMENTED: Final = 0.105


def p50_bytes(peak_bytes: int, device: Device) -> int:
    """Returns the median of the real peak: more is as likely as less."""
    return peak_bytes + device.context_bytes


def p95_bytes(peak_bytes: int, device: Device) -> int:
    """Returns what 19 of 20 real stages stay within; it is compared with the device's memory."""
    needed_bytes = peak_bytes * (1 + UNSEEN)
    if device.kind != "cpu":
        needed_bytes += peak_bytes * FRAGMENTED + LARGE_SEGMENT + SMALL_SEGMENT
    return round(needed_bytes) + device.context_bytes


def peak_margin(device: Device) -> PeakMargin:
    """Returns the parts that `p95_bytes` adds to a predicted peak."""
    if device.kind == "cpu":
        return PeakMargin(unseen_share=UNSEEN)
    return PeakMargin(
        unseen_share=UNSEEN,
        fragmented_share=FRAGMENTED,
        segments_bytes=LARGE_SEGMENT + SMALL_SEGMENT,
        context_bytes=device.context_bytes,
    )


def room_bytes(device: Device) -> int:
    """Returns the largest peak whose P95 fits the device; the inverse of `p95_bytes`."""
    available_bytes = device.memory_bytes - device.context_bytes
    if device.kind == "cpu":
        return int(available_bytes / (1 + UNSEEN))
    return int((available_bytes - LARGE_SEGMENT - SMALL_SEGMENT) / (1 + UNSEEN + FRAGMENTED))


def with_usable_memory(cluster: Cluster) -> Cluster:
    """Returns the cluster with each device's memory reduced to the peak that fits it (`room_bytes`)."""
    devices = (d.model_copy(update={"memory_bytes": max(1, room_bytes(d))}) for d in cluster.devices)
    return cluster.model_copy(update={"devices": tuple(devices)})
