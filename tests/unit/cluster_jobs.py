"""A job whose figures are made up, for tests of what is written for each engine."""

from __future__ import annotations

from typing import Any

from outsize.ir.answers.job import ClusterJob, JobRequest, JobSize, JobSizeLeftOut
from outsize.ir.hardware.devices import GIB
from outsize.ir.plan import Axes


def size(nodes: int, each: int = 8, **more: Any) -> JobSize:
    """A pipeline over all devices of so many nodes."""
    fields: dict[str, Any] = {
        "nodes": nodes,
        "ranks": nodes * each,
        "axes": Axes(pp=nodes * each),
        "schedule": "1f1b",
        "microbatches": 32,
        "bit_identical": True,
        "step_s": 9.0 / nodes,
        "samples_per_s": 32 / 9.0 * nodes,
        "p95_bytes": (40 - nodes) * GIB,
        "device_bytes": 79 * GIB,
    }
    return JobSize(**(fields | more))


def left_out(nodes: int) -> JobSizeLeftOut:
    """A number of nodes without a plan."""
    numbers = "81.4 GiB, cuda:2 has 79.0"
    return JobSizeLeftOut(nodes=nodes, code="E201", what="stage 2 needs more than there is", numbers=numbers)


def request(*nodes: int, kind: str = "h100-80gb", each: int = 8) -> JobRequest:
    """A request for these numbers of nodes; the others up to the most have no plan."""
    return JobRequest(
        model="LlamaForCausalLM",
        batch_size=32,
        node=f"{each}x{kind}",
        kind=kind,
        devices_per_node=each,
        sizes=tuple(size(count, each) for count in nodes),
        left_out=tuple(left_out(count) for count in range(1, nodes[-1]) if count not in nodes),
    )


def job(*nodes: int, kind: str = "h100-80gb", each: int = 8, **more: Any) -> ClusterJob:
    """A job of a script over these numbers of nodes."""
    fields: dict[str, Any] = {
        "name": "train",
        "request": request(*nodes, kind=kind, each=each),
        "target": ("train.py", "--text", "it's a test"),
        "made_by": "outsize 0: outsize emit ENGINE train.py",
    }
    return ClusterJob(**(fields | more))
