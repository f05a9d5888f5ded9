"""Problem: a host has less memory than it needs. How long is a step at least with the excess on its disk?

    B   bytes the host needs: weights, gradients, states (host_traffic.py), values between stages
        (boundary_traffic.py)
    H   its memory, d the bytes per second of its disk: fields of the Cluster that a user sets

Weights, gradients and states change in every step, and values are made in it. What does not fit in memory is
read and written once a step, whatever is kept: 2 (B - H) / d. The system's page cache may move more, because
a loop needs next what was used longest ago; that is not priced. `offload_folder` of `parallelize` puts it on
the disk, all but values between stages. Oracle: tests/unit/planner/offload/test_offload_disk.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from outsize.ir.cluster import Cluster
from outsize.ir.findings import HostMemoryEnough, HostMemoryShort
from outsize.ir.graph import ModelGraph
from outsize.ir.offload import Degree
from outsize.ir.plan import Plan
from outsize.planner.offload.boundary_traffic import waiting_bytes
from outsize.planner.offload.host_traffic import host_bytes


def spilled_bytes(graph: ModelGraph, plan: Plan, cluster: Cluster) -> int:
    """Returns the bytes that the host of a plan lacks; 0 where it has room, or its memory is unknown."""
    if cluster.host_memory_bytes is None:
        return 0
    return max(0, host_bytes(graph, plan) + waiting_bytes(graph, plan) - cluster.host_memory_bytes)


def with_disk(degree: Degree, graph: ModelGraph, plan: Plan, cluster: Cluster) -> Iterator[Degree]:
    """Yields the plan's degree with the host's missing bytes on the disk, where the disk's speed is known."""
    spilled = spilled_bytes(graph, plan, cluster)
    if spilled and cluster.disk_bytes_per_s is not None:
        disk_s = 2 * spilled / cluster.disk_bytes_per_s
        bound = degree.bound.model_copy(update={"disk_s": disk_s})
        changes = {"bound": bound, "step_s": max(degree.step_s, disk_s), "disk": True}
        yield degree.model_copy(update=changes)


def spill_reasons(
    graph: ModelGraph, plan: Plan, cluster: Cluster
) -> Iterator[HostMemoryEnough | HostMemoryShort]:
    """Yields whether the host has room, for `Plan.why`; nothing where the host's memory is unknown."""
    memory_bytes, speed = cluster.host_memory_bytes, cluster.disk_bytes_per_s
    if memory_bytes is None:
        return
    missing = spilled_bytes(graph, plan, cluster)
    if not missing:
        yield HostMemoryEnough(host_memory_bytes=memory_bytes)
        return
    yield HostMemoryShort(
        host_memory_bytes=memory_bytes,
        missing_bytes=missing,
        disk_bytes_per_s=speed,
        disk_s=None if speed is None else 2 * missing / speed,
    )
