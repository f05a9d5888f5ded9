"""Which process this is, by what each launcher sets: mappings as they were printed under it."""

from __future__ import annotations

import pytest

from outsize.errors import BadOption
from outsize.train.launch.environments import detected, first_host

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
        (
            {"PMI_RANK": "1", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "0", "MASTER_ADDR": "x0"},
            ("1", "8", "0", "x0"),
        ),
        ({**SLURM, "MASTER_ADDR": "10.0.0.1"}, ("5", "8", "1", "10.0.0.1")),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, ("5", "8", "1", "gpu007")),
        ({**SLURM, **OPEN_MPI}, ("1", "2", "1", "127.0.0.1")),
    ],
    ids=[
        *("Open MPI", "Slurm", "Slurm on one node", "Intel MPI", "PALS"),
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
    ],
)
def test_half_an_environment_is_refused_with_its_numbers(env: dict[str, str], text: str) -> None:
    with pytest.raises(BadOption) as caught:
        detected(env)
    assert text in str(caught.value)
    assert "Next: " in str(caught.value)
