"""Jobs under a real Slurm: a signal before the time limit saves the run, which goes on after a requeue."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from job_worker import losses
from patience import PATIENCE_S
from slurm_cluster import NoSlurm, Slurm, missing, slurm

from outsize.ir.answers.job import ClusterJob, JobRequest, JobSize
from outsize.ir.plan import Axes
from outsize.ops.jobs.engines import Engine, job_text

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        bool(missing()), reason=f"Slurm is not installed ({missing()}): apt-get install slurm-wlm munge"
    ),
    pytest.mark.skipif(os.getuid() != 0, reason="slurmctld and slurmd start jobs as root"),
]
WORKER = Path(__file__).parent / "job_worker.py"
# A script of one's own, as docs/checkpoints.md has it: two tasks, which Slurm starts itself.
OWN = """\
#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --requeue
#SBATCH --open-mode=append
srun {python} {worker} {root}
[ $? = 75 ] && scontrol requeue $SLURM_JOB_ID
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """A Slurm of this test; a socket's path has at most 108 characters."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        try:
            with slurm(Path(folder)) as made:
                yield made
        except NoSlurm as error:
            pytest.skip(str(error))


def emitted(root: Path, engine: Engine = "slurm", *arguments: str) -> str:
    """What `outsize emit ENGINE` writes for one node of two CPU processes, with a limit of three minutes."""
    size = JobSize(
        nodes=1,
        ranks=2,
        axes=Axes(pp=2),
        schedule="1f1b",
        microbatches=2,
        bit_identical=True,
        step_s=0.01,
        samples_per_s=800.0,
        p95_bytes=1 << 20,
        device_bytes=1 << 30,
    )
    request = JobRequest(
        model="Sequential", batch_size=8, node="2xcpu", kind="cpu", devices_per_node=2, sizes=(size,)
    )
    job = ClusterJob(
        name="train",
        request=request,
        target=(str(WORKER), str(root), *arguments),
        grace_s=70,
        minutes=3,
        made_by="a test",
    )
    return job_text(job, engine)


def submitted(cluster: Slurm, script: str, root: Path) -> str:
    (root / "job.sh").write_text(script)
    path = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
    said = cluster.run(
        "sbatch", f"--chdir={root}", "--parsable", str(root / "job.sh"), PATH=path, OMP_NUM_THREADS="1"
    )
    return said.strip()


def has_started(root: Path) -> bool:
    return (root / "losses").exists() and len((root / "losses").read_text().splitlines()) > 5


def check_the_digits(root: Path) -> None:
    """Both parts together are the losses of a run that nobody has stopped, step for step."""
    seen = [
        (int(step), float(loss)) for step, loss in map(str.split, (root / "losses").read_text().splitlines())
    ]
    assert [step for step, _ in seen] == list(range(1, len(seen) + 1))
    assert seen == list(islice(losses(None, 1), len(seen)))


def test_an_emitted_job_is_stopped_before_its_time_limit_and_goes_on(cluster: Slurm, tmp_path: Path) -> None:
    number = submitted(cluster, emitted(tmp_path), tmp_path)
    done = cluster.wait(number, lambda job: job["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT"), PATIENCE_S)
    said = "".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert (done["JobState"], done["ExitCode"]) == ("COMPLETED", "0:0"), said
    assert int(done["Restarts"]) >= 1
    assert re.search(
        "SIGUSR1 has asked the run to end, and it is saved|by SIGUSR1; the run is saved", said
    ), said
    check_the_digits(tmp_path)


def test_two_tasks_that_a_signal_reaches_are_queued_again(cluster: Slurm, tmp_path: Path) -> None:
    script = OWN.format(python=sys.executable, worker=WORKER, root=tmp_path)
    number = submitted(cluster, script, tmp_path)
    cluster.wait(number, lambda _: has_started(tmp_path), PATIENCE_S)
    cluster.run("scancel", "--signal=USR1", number)
    done = cluster.wait(
        number, lambda job: job["Restarts"] == "1" and job["JobState"] in ("COMPLETED", "FAILED"), PATIENCE_S
    )
    assert done["ExitCode"] in ("0:0", "1:0")  # [ $? = 75 ] is the last command
    check_the_digits(tmp_path)
