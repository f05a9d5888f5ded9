"""Detects this process's place in a run that torchrun did not start: Slurm, Flux, Open MPI, MVAPICH, LSF's
jsrun, MPICH, Intel MPI, PALS and submitit. Tells what looks like a run that no variable describes.

Each launcher gives a process its number, how many there are, and its number on its machine, in variables of
its own. `detected` turns them into torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). None
of them says where rank 0 can be met: on one machine that is the loopback interface, under Slurm the first
host of the step's node list, else the user has to say it (MASTER_ADDR).

The port follows from the job, so all ranks compute the same one and two jobs on a machine do not; it is below
the range that systems assign. A job is what the launcher's variables call it. Hydra (MPICH, Intel MPI) has no
such variable, but it starts all ranks of a machine from one process of its own. So on one machine that
process is the job: the nearest ancestor that is not the rank itself, which a rank and its wrappers
(`mpirun bash -c ...`) are by their variables.

    mpiexec -> proxy, pid 71 --> bash, PMI_RANK=0 --> python, PMI_RANK=0     the job is 71 and its start
                             \\-> bash, PMI_RANK=1 --> python, PMI_RANK=1

Sources: Open MPI 5 "Environment variables" (OMPI_COMM_WORLD_*), srun(1) "OUTPUT ENVIRONMENT VARIABLES",
flux-environment(7), MVAPICH2's user guide (MV2_COMM_WORLD_*), Spectrum LSF's jsrun(1) (JSM_NAMESPACE_*),
Hydra's and Intel MPI's PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS, HPE PALS aprun(1). Oracle:
tests/unit/train/world/test_environments.py (mappings), tests/dist/test_launchers.py (a real mpirun, two
jobs of MPICH at a time).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, final

import psutil

from outsize.errors import BadOption
from outsize.ir.formatting import whole_number
from outsize.train.world.rendezvous import LOOPBACK

FIRST_PORT, PORTS = 20_000, 10_000
TOGETHER_S = 30.0  # a launcher starts its processes at once


@final
class TrainsAlone(UserWarning):
    """Says that this process trains alone, though it may be meant as one of several ranks."""


@final
@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher; of several names for one variable, the first that is set counts.

    `job` are those which tell its jobs apart, `allocation` those of the batch system around them. `step` is
    set in the processes that it starts alone, where `rank` is in others too. `machines` is how many machines
    there are, `hosts` the list of them. `tell` says how its command passes on a variable.
    """

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: str = ""
    job: tuple[str, ...] = ()
    allocation: tuple[str, ...] = ()
    step: str = ""
    machines: str = ""
    hosts: str = ""
    tell: str = "mpirun -x MASTER_ADDR=<its address> ... (MPICH, Intel: -genv MASTER_ADDR <its address>)"


_PMI: Final = _Launcher(
    "PMI",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID"),
    local_size="MPI_LOCALNRANKS",
    job=("PALS_APID", "PMI_JOBID"),
    allocation=("PBS_JOBID", "SLURM_JOB_ID"),
)
# The systems that start a job's tasks themselves. They set PMI's variables too, and their own say more.
_BATCH_SYSTEMS: Final = (
    _Launcher(
        "Flux",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        ("FLUX_TASK_LOCAL_ID",),
        job=("FLUX_JOB_ID_PATH", "FLUX_JOB_ID"),
        machines="FLUX_JOB_NNODES",
        tell="flux run --env=MASTER_ADDR=<the first host of `flux hostlist`> ...",
    ),
    _Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_LOCALID",),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        step="SLURM_STEP_ID",  # a batch script has SLURM_PROCID, but is no task of a step
        machines="SLURM_STEP_NUM_NODES",
        hosts="SLURM_STEP_NODELIST",
        tell="MASTER_ADDR=<its address> srun ...",
    ),
)
# MPI's launchers come first: they may run inside a job of a batch system, whose tasks are then their daemons.
_LAUNCHERS: Final = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        tell="mpirun_rsh ... MASTER_ADDR=<its address> python train.py",
    ),
    _Launcher(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        ("JSM_NAMESPACE_LOCAL_RANK",),
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
        job=("LSB_JOBID", "PMIX_NAMESPACE"),
        tell="jsrun -E MASTER_ADDR=<its address> ...",
    ),
    _PMI,
    *_BATCH_SYSTEMS,
    _Launcher(
        "submitit",
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_NTASKS",
        ("SUBMITIT_LOCAL_LOCALID",),
        local_size="SUBMITIT_LOCAL_NTASKS",  # its LocalExecutor; its other one is Slurm's srun
        job=("SUBMITIT_LOCAL_JOB_ID",),
    ),
)
# These say that a process is one of several, and not of how many.
_UNREAD: Final = {
    "PMIX_RANK": "a launcher with PMIx",
    "PALS_RANKID": "PALS",
    "ALPS_APP_PE": "ALPS",
    "MPT_LRANK": "HPE MPT",
    "PBS_TASKNUM": "pbsdsh",
    "JOB_COMPLETION_INDEX": "an indexed Job of Kubernetes",
}


@final
class Neighbour(NamedTuple):
    """A process of this machine, as far as this one may see it; `program` is what `program_in` returns."""

    pid: int
    started_unix_s: float
    program: str


def launching_process(variables: Mapping[str, str]) -> str:
    """Returns the number and the start of the process that has started this rank: its nearest ancestor that
    does not have all of these variables. "" where it cannot be seen.
    """
    try:
        for ancestor in psutil.Process().parents():
            if not variables.items() <= _environment(ancestor).items():
                return f"{ancestor.pid} {ancestor.create_time()}"
    except psutil.Error:
        pass
    return ""


def detected(
    env: Mapping[str, str], launching: Callable[[Mapping[str, str]], str] = launching_process
) -> dict[str, str]:
    """Returns torchrun's variables for this process; an empty dict under torchrun, or when it runs alone.

    MASTER_ADDR and MASTER_PORT of the environment stay. `launching` names the process of this machine that
    has started a rank with these variables (`launching_process`). Raises BadOption (E106) when a launcher's
    variables are incomplete, contradict each other, or do not say where rank 0 is.
    """
    launcher = _launcher(env)
    if launcher is None:
        return {}
    rank, size, local_rank = _place(launcher, env)
    if size == 1:
        return {}
    local_size = _local_size(launcher, env, size)
    is_alone = local_size == size
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        **({"LOCAL_WORLD_SIZE": str(local_size)} if local_size else {}),
        "MASTER_ADDR": env.get("MASTER_ADDR") or _master(launcher, env, is_alone=is_alone),
        "MASTER_PORT": env.get("MASTER_PORT") or str(_port(launcher, env, launching if is_alone else None)),
    }


def places_first(env: Mapping[str, str]) -> bool:
    """Tells whether this process is rank 0 of its run, or alone; also before the ranks have met."""
    launcher = _launcher(env)
    name = "RANK" if launcher is None else launcher.rank
    return not whole_number(env.get(name, "0"))


def looks_like_one_of_many(env: Mapping[str, str], script: str) -> str | None:
    """Returns the sentence for a process that trains alone, but was started as one of several; None where
    nothing says so.

    Either a launcher's variable says so, or other processes of the same parent run the same script, and were
    started within half a minute.
    """
    if "RANK" in env or _launcher(env) is not None:
        return None
    unread = next((name for name in _UNREAD if name in env), None)
    if unread is not None:
        return (
            f"this process trains alone, though {_UNREAD[unread]} has started it; {unread}={env[unread]}, "
            f"and no variable that is read says how many processes there are. Next: outsize run "
            f"--nproc-per-node 2 {script}, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    tasks = env.get("SLURM_NTASKS", "")
    if "SLURM_STEP_ID" not in env and (whole_number(tasks) or 0) > 1:
        return (
            f"this process trains alone, in a job of Slurm with several tasks; SLURM_NTASKS={tasks}, and "
            f"srun has not started it. Next: srun python {script}"
        )
    others = [str(each.pid) for each in beside_this_process()]
    if not others:
        return None
    many = len(others) + 1
    return (
        f"this process trains alone, and so do the others that run {script}; {many} have one parent, and no "
        f"variable gives each a rank (the others: pid {', '.join(others)}). Next: outsize run "
        f"--nproc-per-node {many} {script}, or nothing where each is a run of its own"
    )


def beside_this_process() -> list[Neighbour]:
    """Returns the other processes that run this one's script, were started by the same parent, and at the
    same time.
    """
    try:
        here = psutil.Process()
        this, parent = _neighbour(here), here.parent()
        if this is None or not this.program or parent is None:
            return []
        every = [_neighbour(child) for child in parent.children() if child.pid != here.pid]
    except psutil.Error:
        return []
    return [
        one
        for one in every
        if one is not None
        and one.program == this.program
        and abs(one.started_unix_s - this.started_unix_s) < TOGETHER_S
    ]


def program_in(command: Sequence[str], folder: str) -> str:
    """Returns what a command of Python runs in a folder: its script, or the whole command where that is a
    module; "" for the text of `-c`, which many unlike processes have.

    `python -u train.py --lr 1` gives `folder/train.py`; a process that `multiprocessing` has started gives
    `multiprocessing`.
    """
    if "--multiprocessing-fork" in command:
        return "multiprocessing"
    words = iter(command[1:])
    for word in words:
        if word in ("-c", "-"):
            return ""
        if word in ("-W", "-X"):
            next(words, None)
        elif word == "-m" or not word.startswith("-"):
            return str(Path(folder, word)) if word.endswith(".py") else " ".join(command)
    return ""


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm node list: `gpu[007-010,12],login` gives `gpu007`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def _neighbour(process: psutil.Process) -> Neighbour | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        program = program_in(process.cmdline(), process.cwd())
        return Neighbour(process.pid, process.create_time(), program)
    except psutil.Error:  # it has ended, or belongs to somebody else
        return None


def _environment(process: psutil.Process) -> Mapping[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _launcher(env: Mapping[str, str]) -> _Launcher | None:
    """Returns the launcher whose variables place this process; None under torchrun, and where it is alone."""
    if "RANK" in env:
        return None
    return next((one for one in _LAUNCHERS if _is_set(one, env)), None)


def _is_set(launcher: _Launcher, env: Mapping[str, str]) -> bool:
    # A batch system repeats its own variables as PMI's; an mpirun inside one of its tasks sets others.
    is_repeated = launcher is _PMI and env.get(launcher.size) in {env.get(one.size) for one in _set_up(env)}
    return launcher.rank in env and (launcher.step or launcher.rank) in env and not is_repeated


def _set_up(env: Mapping[str, str]) -> Iterator[_Launcher]:
    return (one for one in _BATCH_SYSTEMS if _is_set(one, env))


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
    rank, size, local_rank = (whole_number(env[name]) for name in names)
    if rank is None or size is None or local_rank is None or rank >= size:
        raise BadOption(
            f"{launcher.name}'s variables are no place in a run", numbers=assignments, next_step="env | sort"
        )
    return rank, size, local_rank


def _local_size(launcher: _Launcher, env: Mapping[str, str], size: int) -> int | None:
    """Returns the number of processes on this machine, where the launcher says so."""
    if launcher.machines:
        return size if env.get(launcher.machines) == "1" else None
    return whole_number(env.get(launcher.local_size, ""))


def _master(launcher: _Launcher, env: Mapping[str, str], *, is_alone: bool) -> str:
    hosts = env.get(launcher.hosts, "")
    if is_alone:
        return LOOPBACK
    if hosts:
        return first_host(hosts)
    raise BadOption(
        f"{launcher.name} does not say on which machine rank 0 is, and MASTER_ADDR is not set",
        numbers=f"{launcher.size}={env[launcher.size]}, {_said_of_machine(launcher, env)}",
        next_step=launcher.tell,
    )


def _said_of_machine(launcher: _Launcher, env: Mapping[str, str]) -> str:
    name = launcher.hosts or launcher.machines or launcher.local_size
    return f"{name}={env[name]}" if name in env else f"{name} is not set"


def _port(
    launcher: _Launcher, env: Mapping[str, str], launching: Callable[[Mapping[str, str]], str] | None
) -> int:
    """Returns the port of this job; `launching` where it may be told by the process that has started it."""
    job = [env[name] for name in launcher.job if name in env]
    if not job and launching is not None:
        names = (launcher.rank, launcher.size, *launcher.local_rank, launcher.local_size)
        job = [launching({name: env[name] for name in names if name in env})]
    allocation = [env[name] for name in launcher.allocation if name in env]
    return FIRST_PORT + zlib.crc32(".".join([*job, *allocation]).encode()) % PORTS
