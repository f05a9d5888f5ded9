"""Writes a task for dstack, which `dstack apply -f` runs.

Source: the models of dstack 0.22 (dstack/_internal/core/models/configurations.py), which
tests/integrations/test_cluster_schemas.py lets judge.
"""

from __future__ import annotations

from typing import Any

from outsize.ir.answers.job import ClusterJob
from outsize.ir.hardware.devices import TABLE
from outsize.ops.jobs.comments import header
from outsize.ops.jobs.launch_line import SIZES, command, fixed_meeting, sizes_text
from outsize.ops.jobs.yaml_text import yaml_text

_FIXED = (
    "dstack starts all nodes of a task together and does not change their number: this file has the most "
    "nodes. A run whose machines are taken away, or that ends with code 75 after it has saved itself, is "
    "started again. Put the checkpoints on a volume of dstack's, so that the new machines have them."
)


def job_text(job: ClusterJob) -> str:
    """Returns the task. Raises BadOption without PyYAML."""
    meeting = ""
    if job.most_nodes > 1:
        meeting = fixed_meeting("$DSTACK_NODES_NUM", "$DSTACK_NODE_RANK", "$DSTACK_MASTER_NODE_IP")
    task: dict[str, Any] = {
        "type": "task",
        "name": job.name,
        "nodes": job.most_nodes,
        "image": job.image,
        "env": {SIZES: sizes_text(job)},
        "commands": [command(job, meeting)],
        "resources": _resources(job),
        "retry": {"on_events": ["no-capacity", "interruption", "error"], "duration": "1d"},
        "stop_duration": f"{job.grace_s}s",
    }
    if job.minutes is not None:
        task["max_duration"] = f"{job.minutes}m"
    return header(job, [_FIXED]) + yaml_text(task)


def _resources(job: ClusterJob) -> dict[str, Any]:
    each, kind = job.request.devices_per_node, job.request.kind
    if not job.request.has_accelerators:
        return {"cpu": f"{each}.."}
    memory = f"{TABLE[kind].vendor_gb:g}GB.."
    return {
        "gpu": {"name": [kind.partition("-")[0].upper()], "memory": memory, "count": each},
        "shm_size": "16GB",
    }
