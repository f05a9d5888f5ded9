"""Problem: a host has less memory than it is to hold. What is a step bound by with the rest on its disk?

    B   bytes the host is to hold: weights, gradients, states (offload.py), values between stages (handed.py)
    H   its memory, d the bytes per second of its disk: fields of the Cluster that a user gives

Weights, gradients and states change in every step, and values are made in it. What memory has no room for is
read and written once a step, whatever is kept: 2 (B - H) / d. The system's page cache may move more, for what
was used longest ago is what a loop needs next; that is not priced. `offload_folder` of `parallelize` is what
puts it there, all but values between stages. Oracle: tests/unit/planner/test_spill.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.offload import Degree
from outsize.ir.plan import Plan
from outsize.ir.text import bytes_text, rate_text, seconds_text
from outsize.planner.handed import waiting_bytes
from outsize.planner.offload import host_bytes


def spilled_bytes(graph: ModelGraph, plan: Plan, cluster: Cluster) -> int:
    """What the host of a plan lacks; 0 where it has room, or nobody says how much there is."""
    if cluster.host_memory_bytes is None:
        return 0
    return max(0, host_bytes(graph, plan) + waiting_bytes(graph, plan) - cluster.host_memory_bytes)


def with_disk(degree: Degree, graph: ModelGraph, plan: Plan, cluster: Cluster) -> Iterator[Degree]:
    """The plan's degree with what its host lacks on the disk, where that is known."""
    spilled = spilled_bytes(graph, plan, cluster)
    if spilled and cluster.disk_bytes_per_s is not None:
        disk_s = 2 * spilled / cluster.disk_bytes_per_s
        bound = degree.bound.model_copy(update={"disk_s": disk_s})
        found = {"bound": bound, "step_s": max(degree.step_s, disk_s), "disk": True}
        yield degree.model_copy(update=found)


def spill_reasons(graph: ModelGraph, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Whether the host has as much, where somebody said what it has."""
    if cluster.host_memory_bytes is None:
        return
    spilled, memory = spilled_bytes(graph, plan, cluster), bytes_text(cluster.host_memory_bytes)
    if not spilled:
        yield f"the host has room for it: {memory}"
        return
    speed = cluster.disk_bytes_per_s
    how = "nobody says how fast (disk_bytes_per_s)"
    if speed is not None:
        disk_s = seconds_text(2 * spilled / speed)
        how = f"read and written once a step at {rate_text(speed / 1e9)} GB/s, {disk_s} at least"
    yield (
        f"the host has {memory}, {bytes_text(spilled)} too little: outsize.parallelize(..., "
        f"offload_folder=) has the rest on a disk, {how}"
    )
