"""Writes a batch script for Slurm: `sbatch` starts it, and a run that has saved itself is queued again.

Source: sbatch(1), srun(1) and scontrol(1) of Slurm 22.05. Oracle: tests/integrations/test_slurm.py, which
runs the script under a real slurmctld and slurmd.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from outsize.ir.answers.job import ClusterJob, JobSize
from outsize.ops.jobs.comments import header
from outsize.ops.jobs.launch_line import GOES_ON, SIZES, command, fixed_meeting, sizes_text

_NODE = """
    meeting=
    if [ "$nodes" -gt 1 ]; then
        meeting="{meeting}"
    fi
    exec {command}
"""
_BODY = """
set -u

# Slurm gives a number of nodes of the range; the most of them that have a plan are used.
nodes=0
for planned in {planned}; do
    if [ "$planned" -le "$SLURM_JOB_NUM_NODES" ]; then nodes=$planned; fi
done
address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export nodes address
export {sizes}={ranks}  # the numbers of ranks that have a plan

srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 bash -c {node}
code=$?

# A signal has asked the run to end: it is saved ({saved}), or had not begun ({begun}). It is queued again.
case $code in {saved}|{begun}) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit "$code"
"""


def job_text(job: ClusterJob) -> str:
    """Returns the script for sbatch."""
    meeting = fixed_meeting("$nodes", "$SLURM_NODEID", "$address")
    body = _BODY.format(
        planned=" ".join(str(size.nodes) for size in _used(job)),
        sizes=SIZES,
        ranks=sizes_text(job),
        node=shlex.quote(_NODE.format(meeting=meeting, command=command(job, "$meeting"))),
        saved=GOES_ON[0],
        begun=GOES_ON[1],
    )
    directives = "".join(f"#SBATCH --{directive}\n" for directive in _directives(job))
    return f"#!/bin/bash\n{header(job)}{directives}{body}"


def _used(job: ClusterJob) -> tuple[JobSize, ...]:
    """Returns the sizes that the job may be given: all that have a plan, or the largest alone."""
    return job.request.sizes if job.elastic else (job.request.largest,)


def _directives(job: ClusterJob) -> Iterator[str]:
    sizes = _used(job)
    least, most = sizes[0].nodes, sizes[-1].nodes
    yield f"job-name={job.name}"
    yield f"nodes={least}-{most}" if least < most else f"nodes={most}"
    yield "ntasks-per-node=1"
    each = job.request.devices_per_node
    yield f"gpus-per-node={each}" if job.request.has_accelerators else f"cpus-per-task={each}"
    yield f"signal=USR1@{job.grace_s}"
    yield "requeue"
    yield "open-mode=append"
    yield f"output={job.name}-%j.out"
    if job.minutes is not None:
        yield f"time={job.minutes}"
    if job.queue is not None:
        yield f"partition={job.queue}"
