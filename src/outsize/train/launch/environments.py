"""Detects this process's place in a run that torchrun did not start: Slurm, Open MPI, MPICH, Intel MPI and
PALS.

Each launcher gives a process its number, how many there are, and its number on its machine, in variables of
its own. `detected` turns them into torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). None
of them says where rank 0 can be met: on one machine that is the loopback interface, under Slurm the first
host of the step's node list, else the user has to say it (MASTER_ADDR). The port follows from the job's
number, so all ranks compute the same port; it is below the range that systems assign.

Sources: Open MPI 5 "Environment variables" (OMPI_COMM_WORLD_*), srun(1) "OUTPUT ENVIRONMENT VARIABLES",
Hydra's and Intel MPI's PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS, HPE PALS aprun(1). Oracle:
tests/unit/train/launch/test_environments.py (mappings), tests/dist/test_launchers.py (a real mpirun).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from outsize.errors import BadOption
from outsize.train.launch.rendezvous import LOOPBACK

FIRST_PORT, PORTS = 20_000, 10_000


@final
@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher; of several names for one variable, the first that is set counts."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: str
    job: tuple[str, ...]


_SLURM = _Launcher(
    "Slurm",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    ("SLURM_LOCALID",),
    "",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
# Open MPI and PMI before Slurm: they may run inside one of its jobs, then its step counts their daemons.
_LAUNCHERS = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher(
        "PMI",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
        "MPI_LOCALNRANKS",
        ("PALS_APID", "PMI_JOBID", "PBS_JOBID", "SLURM_JOB_ID"),
    ),
    _SLURM,
)


def detected(env: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables for this process; an empty dict under torchrun, or when it runs alone.

    MASTER_ADDR and MASTER_PORT of the environment stay. Raises BadOption (E106) when a launcher's variables
    are incomplete, contradict each other, or do not say where rank 0 is.
    """
    launcher = None if "RANK" in env else next((one for one in _LAUNCHERS if _is_set(one, env)), None)
    if launcher is None:
        return {}
    rank, size, local_rank = _place(launcher, env)
    if size == 1:
        return {}
    local_size = _local_size(launcher, env, size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        **({"LOCAL_WORLD_SIZE": str(local_size)} if local_size else {}),
        "MASTER_ADDR": env.get("MASTER_ADDR") or _master(launcher, env, alone=local_size == size),
        "MASTER_PORT": env.get("MASTER_PORT") or str(_port(launcher, env)),
    }


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm node list: `gpu[007-010,12],login` gives `gpu007`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def _is_set(launcher: _Launcher, env: Mapping[str, str]) -> bool:
    if launcher is _SLURM:  # a batch script also has SLURM_PROCID, but is no task of a step
        return launcher.rank in env and "SLURM_STEP_ID" in env
    # srun --mpi=pmi2 sets PMI's variables in addition to its own; Slurm's own say more.
    by_srun = launcher.name == "PMI" and env.get(launcher.size) == env.get(_SLURM.size)
    return launcher.rank in env and not by_srun


def _place(launcher: _Launcher, env: Mapping[str, str]) -> tuple[int, int, int]:
    """Returns the process's rank, the number of processes, and the rank on this machine."""
    local_name = next((name for name in launcher.local_rank if name in env), launcher.local_rank[0])
    names = (launcher.rank, launcher.size, local_name)
    missing = [name for name in names if name not in env]
    if missing:
        raise BadOption(
            f"{launcher.name} has started this process, but {', '.join(missing)} is not set",
            numbers=f"{launcher.rank}={env[launcher.rank]}",
            next_step=f"start it with srun, mpirun or torchrun, or unset {launcher.rank} to run alone",
        )
    assignments = ", ".join(f"{name}={env[name]}" for name in names)
    if not all(env[name].isdigit() for name in names) or not int(env[names[0]]) < int(env[names[1]]):
        raise BadOption(
            f"{launcher.name}'s variables are no place in a run", numbers=assignments, next_step="env | sort"
        )
    rank, size, local_rank = (int(env[name]) for name in names)
    return rank, size, local_rank


def _local_size(launcher: _Launcher, env: Mapping[str, str], size: int) -> int | None:
    """Returns the number of processes on this machine, where the launcher says so."""
    if launcher is _SLURM:
        return size if env.get("SLURM_STEP_NUM_NODES") == "1" else None
    local_size = env.get(launcher.local_size, "")
    return int(local_size) if local_size.isdigit() else None


def _master(launcher: _Launcher, env: Mapping[str, str], *, alone: bool) -> str:
    nodes = env.get("SLURM_STEP_NODELIST", "")
    if alone:
        return LOOPBACK
    if launcher is _SLURM and nodes:
        return first_host(nodes)
    raise BadOption(
        f"{launcher.name} does not say on which machine rank 0 is, and MASTER_ADDR is not set",
        numbers=f"{launcher.size}={env[launcher.size]}, {_said_of_machine(launcher, env)}",
        next_step="mpirun -x MASTER_ADDR=<its address> ... (MPICH, Intel: -genv MASTER_ADDR <its address>)",
    )


def _said_of_machine(launcher: _Launcher, env: Mapping[str, str]) -> str:
    name = launcher.local_size or "SLURM_STEP_NODELIST"
    return f"{name}={env[name]}" if name in env else f"{name} is not set"


def _port(launcher: _Launcher, env: Mapping[str, str]) -> int:
    job = ".".join(env[name] for name in launcher.job if name in env)
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS
