"""Writes the command that starts one node's part of a run: `outsize run` with torchrun's options."""

from __future__ import annotations

import shlex
from typing import Final

from outsize.errors import Preempted
from outsize.ir.answers.job import ClusterJob

PORT: Final = 29500
GOES_ON: Final = (Preempted.exit_code, 128 + 10, 128 + 15)
"""The exit codes of a run that a signal has asked to end: it has saved itself, or SIGUSR1 or SIGTERM came
before its first step, when there was nothing to save (ops/launch/launch.py). It starts again.
"""
SIZES: Final = "OUTSIZE_WORLD_SIZES"
"""The variable that tells a run which numbers of ranks it may have (train/world/variables.py)."""


def run_options(job: ClusterJob) -> str:
    """Returns the options that all nodes of all engines have, as a shell reads them.

    The launcher leaves the engine a tenth of the grace to end what is left.
    """
    saving_s = max(1, job.grace_s * 9 // 10)
    each, restarts = job.request.devices_per_node, job.restarts
    return f"--nproc-per-node={each} --max-restarts={restarts} --shutdown-timeout={saving_s}"


def fixed_meeting(nodes: str, number: str, address: str) -> str:
    """Returns the options by which a fixed number of nodes meet; each is text of a shell."""
    return f"--nnodes={nodes} --node-rank={number} --master-addr={address} --master-port={PORT}"


def changing_meeting(job: ClusterJob, host: str) -> str:
    """Returns the options by which nodes meet that come and go, at the first one's host."""
    nodes = f"{job.least_nodes}:{job.most_nodes}"
    return f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint={host}:{PORT} --rdzv-id={job.name}"


def meeting(job: ClusterJob, number: str, host: str) -> str:
    """Returns how the nodes of the job meet, fixed or changing; `number` is a node's, as a shell reads it.

    A single node meets nobody.
    """
    if job.least_nodes < job.most_nodes:
        return changing_meeting(job, host)
    return "" if job.most_nodes == 1 else fixed_meeting(str(job.most_nodes), number, host)


def command(job: ClusterJob, meeting_options: str) -> str:
    """Returns the whole command of a node."""
    return " ".join(filter(None, ("outsize run", run_options(job), meeting_options, shlex.join(job.target))))


def sizes_text(job: ClusterJob) -> str:
    """Returns the numbers of ranks that have a plan, `8,16,32`."""
    return ",".join(str(size.ranks) for size in job.request.sizes)
