"""Writes a task for SkyPilot, which `sky jobs launch` runs as a managed job that recovers.

Source: the schema of tasks in skypilot 0.14 (sky/utils/schemas.py), which
tests/integrations/test_cluster_schemas.py lets judge.
"""

from __future__ import annotations

from typing import Any

from outsize.ir.answers.job import ClusterJob
from outsize.ops.jobs.comments import header
from outsize.ops.jobs.launch_line import GOES_ON, SIZES, command, fixed_meeting, sizes_text
from outsize.ops.jobs.yaml_text import yaml_text

_FIXED = (
    "SkyPilot starts all nodes of a task together and does not change their number: this file has the most "
    "nodes; --num-nodes asks for another number that has a plan. Start it with `sky jobs launch`: a managed "
    "job goes on elsewhere when its machines are taken away. Put the checkpoints in a bucket or a volume."
)
_NAMES = {
    "a100-80gb": "A100-80GB",
    "a100-80gb-pcie": "A100-80GB",
    "v100-32gb": "V100-32GB",
    "v100-32gb-pcie": "V100-32GB",
}
"""SkyPilot's names where they are not the first part of ours in capitals."""
_RUN = """\
address=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
nodes=$SKYPILOT_NUM_NODES
meeting=
if [ "$nodes" -gt 1 ]; then
    meeting="{meeting}"
fi
exec {command}
"""


def job_text(job: ClusterJob) -> str:
    """Returns the task. Raises BadOption without PyYAML."""
    meeting = fixed_meeting("$nodes", "$SKYPILOT_NODE_RANK", "$address")
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.most_nodes,
        "resources": _resources(job),
        "workdir": ".",
        "envs": {SIZES: sizes_text(job)},
        "setup": "pip install outsize",
        "run": _RUN.format(meeting=meeting, command=command(job, "$meeting")),
    }
    return header(job, [_FIXED]) + yaml_text(task)


def _resources(job: ClusterJob) -> dict[str, Any]:
    each, kind = job.request.devices_per_node, job.request.kind
    accelerator = _NAMES.get(kind, kind.partition("-")[0].upper())
    devices = (
        {"accelerators": f"{accelerator}:{each}"} if job.request.has_accelerators else {"cpus": f"{each}+"}
    )
    recovery = {"max_restarts_on_errors": job.restarts, "recover_on_exit_codes": list(GOES_ON)}
    return {**devices, "use_spot": True, "job_recovery": recovery}
