"""A Slurm of one's own: munged, slurmctld and slurmd on 127.0.0.1, with all files in one folder.

They run for as long as the block does, and are ended by their process numbers.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from patience import PATIENCE_S, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_START_S, _STOP_S = 120.0, 60.0
_CONF = """\
ClusterName=outsize
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """The programs that are not installed; empty where all are."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=_PATH) is None)


class NoSlurm(Exception):
    """A daemon does not start on this machine; the text has the end of its log."""


@final
@dataclass(frozen=True)
class Slurm:
    """A running Slurm; its commands are run with its own configuration."""

    folder: Path

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            **os.environ,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:{_PATH}",
        }

    def run(self, *command: str, **variables: str) -> str:
        """Runs a command and returns what it prints; an error is raised with what it says."""
        environment = {**self.environment, **variables}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of a job, by name: JobState, Restarts, ExitCode."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, done: Callable[[dict[str, str]], bool], seconds: float) -> dict[str, str]:
        """Waits until a job is as wanted, and returns it."""
        until = time.monotonic() + seconds
        while True:
            job = self.job(number)
            if done(job):
                return job
            assert time.monotonic() < until, f"{job} after {seconds:.0f} s; {self.log()}"
            time.sleep(0.5)

    def log(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(_end(self.folder / f"{name}.log") for name in ("slurmctld", "slurmd"))


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Starts a Slurm in a folder, whose path is short. Raises NoSlurm where a daemon does not start."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    controller, daemon = free_port(), free_port()
    facts = {"host": socket.gethostname().partition(".")[0], "cpus": max(2, os.cpu_count() or 1)}
    facts |= {"controller": controller, "daemon": daemon, "folder": folder, "user": "root"}
    (folder / "slurm.conf").write_text(_CONF.format(**facts))
    (folder / "cgroup.conf").write_text("")
    made = Slurm(folder)
    munge = [f"--{name}={folder}/munge{end}" for name, end in _MUNGE]
    try:
        _start(made, "munged", ["--force", *munge], folder / "munged.pid")
        _start(made, "slurmctld", [], folder / "slurmctld.pid")
        _start(made, "slurmd", [], folder / "slurmd.pid")
        yield made
    finally:
        for name in ("slurmd", "slurmctld", "munged"):
            _stop(folder / f"{name}.pid")


_MUNGE = (
    ("key-file", ".key"),
    ("socket", ".sock"),
    ("pid-file", "d.pid"),
    ("log-file", "d.log"),
    ("seed-file", ".seed"),
)


def _start(cluster: Slurm, program: str, options: list[str], pid_file: Path) -> None:
    path = shutil.which(program, path=_PATH)
    assert path is not None
    done = subprocess.run(
        [path, *options], env=cluster.environment, capture_output=True, text=True, check=False
    )
    until = time.monotonic() + _START_S
    while done.returncode == 0 and time.monotonic() < until:
        if _pid(pid_file) is not None:
            return
        time.sleep(0.1)
    raise NoSlurm(f"{program} does not start here: {done.stderr}{_end(pid_file.with_suffix('.log'))}")


def _stop(pid_file: Path) -> None:
    pid = _pid(pid_file)
    if pid is None:
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + _STOP_S
        while time.monotonic() < until:
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)


def _pid(pid_file: Path) -> int | None:
    """The number of the process that has written the file and is there."""
    with suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        os.kill(pid, 0)
        return pid
    return None


def _end(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-8:]) if log.exists() else ""
