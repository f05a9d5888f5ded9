"""Problem: how sure is a predicted peak, and what must a device have for it to hold?

    P50   the account itself, and the context that a process has on the device
    P95   the account with what 19 of 20 real stages stay within, the allocator's segments, and the context

Error model: of 168 stages of benchmarks/memory (28 models x 3 plans, real steps; half of the models were held
out) 95 % hold at most UNSEEN more than predicted. On a GPU the caching allocator reserves whole segments:
the last one of each pool may be nearly empty, and FRAGMENTED of the rest is in blocks that no request fits,
as replays of the same steps by allocator.py had it. Nothing was fitted to figures of other machines.
Oracle: tests/parity/test_memory_real.py, real steps.
"""

from __future__ import annotations

from typing import Final

from outsize.ir.cluster import Cluster
from outsize.ir.devices import Device
from outsize.ir.text import bytes_text
from outsize.planner.allocator import LARGE_SEGMENT, SMALL_SEGMENT

# Upper end of (real - predicted) / predicted, 95 % of the stages of benchmarks/memory: 1.0 % (2026-11).
UNSEEN: Final = 0.01
# Reserved beyond allocated and one segment of each pool: 95 % of the stages of 100 MB or more (23 of 84).
FRAGMENTED: Final = 0.105


def p50_bytes(peak_bytes: int, device: Device) -> int:
    """As likely less as more."""
    return peak_bytes + device.context_bytes


def p95_bytes(peak_bytes: int, device: Device) -> int:
    """Nineteen of twenty need no more: what is compared with the device's memory."""
    most = peak_bytes * (1 + UNSEEN)
    if device.kind != "cpu":
        most += peak_bytes * FRAGMENTED + LARGE_SEGMENT + SMALL_SEGMENT
    return round(most) + device.context_bytes


def margin_text(device: Device) -> str:
    """What `p95_bytes` adds, in words."""
    if device.kind == "cpu":
        return f"P95 adds {100 * UNSEEN:.3g} % for what the account leaves out"
    segments = bytes_text(LARGE_SEGMENT + SMALL_SEGMENT)
    return (
        f"P95 adds {100 * UNSEEN:.3g} % for what the account leaves out, {100 * FRAGMENTED:.3g} % and "
        f"{segments} for the allocator's segments, {bytes_text(device.context_bytes)} of context"
    )


def room_bytes(device: Device) -> int:
    """The largest peak whose P95 the device holds; the inverse of `p95_bytes`."""
    room = device.memory_bytes - device.context_bytes
    if device.kind == "cpu":
        return int(room / (1 + UNSEEN))
    return int((room - LARGE_SEGMENT - SMALL_SEGMENT) / (1 + UNSEEN + FRAGMENTED))


def rooms(cluster: Cluster) -> Cluster:
    """The cluster with the memory that a peak may take: what P95 adds, and the context, are gone."""
    devices = (d.model_copy(update={"memory_bytes": max(1, room_bytes(d))}) for d in cluster.devices)
    return cluster.model_copy(update={"devices": tuple(devices)})
