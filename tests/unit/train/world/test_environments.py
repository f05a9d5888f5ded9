"""Which process this is, by what each launcher sets: mappings as they were printed under it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from outsize.errors import BadOption
from outsize.train.world.environments import detected, first_host, looks_like_one_of_many, program_in

# `mpirun -n 2 env | grep -E 'OMPI|PMIX'` with Open MPI 4.1.4, what counts here
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "3093299201",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
# `flux run -n 4 env | grep -E 'FLUX|PMI'` as flux-environment(7) has it; it sets PMI's variables too
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f3ETxsR9H",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
MVAPICH = {f"MV2_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")} | {
    f"MV2_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")
}
JSRUN = {f"JSM_NAMESPACE_{name}": "0" for name in ("RANK", "LOCAL_RANK")} | {
    f"JSM_NAMESPACE_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")
}
# A task of submitit's LocalExecutor, version 1.5.4
SUBMITIT = {
    "SUBMITIT_LOCAL_JOB_ID": "659",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
}
INTEL = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}


def _without(env: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in env.items() if key != name}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        (OPEN_MPI, ("1", "2", "1", "127.0.0.1")),
        (SLURM, ("5", "8", "1", "gpu007")),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, ("5", "8", "1", "127.0.0.1")),
        (INTEL, ("3", "4", "3", "127.0.0.1")),
        ({**FLUX, "FLUX_JOB_NNODES": "1"}, ("3", "4", "1", "127.0.0.1")),
        ({**FLUX, "MASTER_ADDR": "x0"}, ("3", "4", "1", "x0")),
        ({**FLUX, **SLURM, "FLUX_JOB_NNODES": "1"}, ("3", "4", "1", "127.0.0.1")),
        ({**FLUX, **INTEL, "PMI_SIZE": "8", "MPI_LOCALNRANKS": "8"}, ("3", "8", "3", "127.0.0.1")),
        (MVAPICH, ("1", "2", "1", "127.0.0.1")),
        (JSRUN, ("0", "2", "0", "127.0.0.1")),
        (SUBMITIT, ("1", "2", "1", "127.0.0.1")),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "0", "MASTER_ADDR": "x0"},
            ("1", "8", "0", "x0"),
        ),
        ({**SLURM, "MASTER_ADDR": "10.0.0.1"}, ("5", "8", "1", "10.0.0.1")),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, ("5", "8", "1", "gpu007")),
        ({**SLURM, **OPEN_MPI}, ("1", "2", "1", "127.0.0.1")),
    ],
    ids=[
        *("Open MPI", "Slurm", "Slurm on one node", "Intel MPI"),
        *("Flux on one node", "Flux, told where", "Flux in a Slurm job", "mpirun in a Flux job"),
        *("MVAPICH", "jsrun", "submitit", "PALS"),
        *("Slurm, told where", "srun --mpi=pmi2", "mpirun in a Slurm job"),
    ],
)
def test_the_place_of_a_process(env: dict[str, str], place: tuple[str, ...]) -> None:
    found = detected(env)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["MASTER_ADDR"]) == place
    assert 1024 < int(found["MASTER_PORT"]) < 32768


@pytest.mark.parametrize(
    "env",
    [
        {},
        {**OPEN_MPI, "RANK": "0"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        _without(SLURM, "SLURM_STEP_ID"),
    ],
    ids=["alone", "torchrun has said", "one process of mpirun", "a batch script"],
)
def test_nothing_to_detect(env: dict[str, str]) -> None:
    assert detected(env) == {}


def test_ranks_of_a_job_agree_on_a_port_and_jobs_do_not() -> None:
    others = [{**SLURM, "SLURM_PROCID": "0"}, {**SLURM, "SLURM_STEP_ID": "1"}, {**SLURM, "SLURM_JOB_ID": "4"}]
    port, *ports = (detected(env)["MASTER_PORT"] for env in (SLURM, *others))
    assert ports[0] == port
    assert port not in ports[1:]
    assert detected({**SLURM, "MASTER_PORT": "29500"})["MASTER_PORT"] == "29500"


@pytest.mark.parametrize(
    ("env", "launching", "same"),
    [
        (INTEL, "71 10.5", False),
        ({**INTEL, "PBS_JOBID": "9"}, "71 10.5", False),
        ({**INTEL, "PALS_APID": "9"}, "71 10.5", True),
        ({**INTEL, "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "x0"}, "71 10.5", True),
        (MVAPICH, "71 10.5", False),
        (OPEN_MPI, "71 10.5", True),
    ],
    ids=[
        *("Hydra", "Hydra in an allocation", "a launcher that names its jobs", "over several machines"),
        *("mpirun_rsh", "Open MPI names its jobs"),
    ],
)
def test_a_job_without_a_number_is_the_process_that_started_it(
    env: dict[str, str], launching: str, same: bool
) -> None:
    def started_by(process: str) -> str:
        return detected(env, lambda variables: process)["MASTER_PORT"]

    assert started_by(launching) == started_by(launching)
    assert (started_by(launching) == started_by("72 10.5")) == same


def test_the_process_that_started_the_ranks_is_above_their_wrappers() -> None:
    """Two ranks, one of them in a shell as `mpirun bash -c ...` has it; this process is their launcher."""
    say = "from outsize.train.world.environments import launching_process as f\nprint(f({rank!r}))"

    def said(rank: dict[str, str], *wrapper: str) -> str:
        command = [sys.executable, "-c", say.format(rank=rank)]
        return subprocess.check_output([*wrapper, *command], env={**os.environ, **rank}, text=True)

    first, second = {"PMI_RANK": "0", "PMI_SIZE": "2"}, {"PMI_RANK": "1", "PMI_SIZE": "2"}
    alone = said(first)
    assert alone.split()[0] == str(os.getpid())
    assert said(second, "sh", "-c", '"$@"; exit $?', "sh") == alone


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({"PMIX_RANK": "1"}, ("a launcher with PMIx has started it", "PMIX_RANK=1", "Next: outsize run ")),
        ({"ALPS_APP_PE": "0"}, ("ALPS has started it", "ALPS_APP_PE=0", "LOCAL_RANK")),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, ("SLURM_NTASKS=4", "Next: srun python train.py")),
        ({"SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}, ()),
        ({"PMIX_RANK": "1", "RANK": "0"}, ()),
        ({"PMIX_RANK": "1", **OPEN_MPI}, ()),
        ({}, ()),
    ],
    ids=["PMIx", "ALPS", "a job without srun", "a job of one task", "torchrun", "Open MPI", "alone"],
)
def test_a_variable_that_says_one_of_many(env: Mapping[str, str], parts: tuple[str, ...]) -> None:
    said = looks_like_one_of_many(env, "train.py")
    assert (said is not None) == bool(parts)
    assert [part for part in parts if part not in str(said)] == []


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python -u train.py --lr 1", "/home/train.py"),
        ("python -W ignore /data/train.py", "/data/train.py"),
        ("python -m tool.train 0", "python -m tool.train 0"),
        ("python -c print()", ""),
        ("python", ""),
        ("python -c spawn_main(5) --multiprocessing-fork", "multiprocessing"),
    ],
)
def test_what_a_process_runs(command: str, program: str) -> None:
    assert program_in(command.split(), "/home") == program


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu007", "gpu007"), ("a1,b2", "a1"), ("gpu[007-010,12],login", "gpu007"), ("r[3,5]-ib", "r3-ib")],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (
            _without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
            "Open MPI has started this process, but OMPI",
        ),
        (_without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not set; SLURM_PROCID=5"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=2"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "x"}, "OMPI_COMM_WORLD_LOCAL_RANK=x"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "LOCAL_SIZE=1. Next: mpirun -x MASTER_ADDR",
        ),
        (_without(SLURM, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is not set"),
        (FLUX, "FLUX_JOB_SIZE=4, FLUX_JOB_NNODES=2. Next: flux run --env=MASTER_ADDR=<"),
        (_without(FLUX, "FLUX_TASK_LOCAL_ID"), "Flux has started this process, but FLUX_TASK_LOCAL_ID"),
    ],
)
def test_half_an_environment_is_refused_with_its_numbers(env: dict[str, str], text: str) -> None:
    with pytest.raises(BadOption) as caught:
        detected(env)
    assert text in str(caught.value)
    assert "Next: " in str(caught.value)
