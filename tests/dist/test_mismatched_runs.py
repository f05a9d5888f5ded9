"""Runs that cannot be: one clear error from rank 0, all processes end, at once, under each launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from forked_launcher import launch_in_fork
from patience import PATIENCE_S, free_port, until
from torch import nn

import outsize
from outsize.ir.plan import Plan

pytestmark = pytest.mark.dist

WORKER = str(Path(__file__).with_name("mismatch_worker.py"))
NOT_ALIKE = "WorldMismatch [E204]: the ranks of this run were not started with the same"
PROGRAMS = "WorldMismatch [E204]: the ranks of this run are about to run programs that differ in"
READ_AT = [f"mismatch_worker.py:{line}" for line in (26, 36, 46)]
NOT_EQUAL = ("rank 0 has 1.5, rank ", "rank 0 has 0.5, rank 1 has 1.5")
# case: ranks, what the error says
CASES = {
    "mesh": (3, "the plan needs 4 processes, this run has 3; pp 2, dp_replicate 2; world size 3"),
    "eight": (4, "the plan needs 8 processes, this run has 4; pp 8; world size 4"),
    "plans": (2, f"{NOT_ALIKE} plan; rank 0 has "),
    "outsize": (2, f"{NOT_ALIKE} outsize; rank 0 has {outsize.__version__}, rank 1 has 0.0.7"),
    "torch": (2, f"{NOT_ALIKE} torch; rank 0 has 2."),
    "activation": (
        2,
        "WorldMismatch [E204]: the ranks of this run have models or losses that differ in 8.class",
    ),
    "loss": (2, "the ranks of this run have models or losses that differ in loss_fn"),
    "batch": (
        2,
        "the ranks of this run were given different batches in step 1; value 0: rank 0 has (8, 4) ",
    ),
    **dict.fromkeys(
        ("evaluated", "called", "called-evaluated", "called-modules"),
        (2, "the ranks of this run were given different batches in step 0; value 0: rank 0 has "),
    ),
    "closure": (
        2,
        "LBFGS takes each step from all weights together, by evaluating the batch several times; 2 ",
    ),
    "clipped": (
        2,
        "each rank has scaled its gradients by another factor before step 1, as clipping by the norm of one",
    ),
    "rates": (2, "learning rates that differ before step 1; group 0: rank 0 has 0.05, rank 1 has 0.1"),
    "value-submodule": (2, f"{PROGRAMS} self.scale ({READ_AT[0]}, read by 0); {NOT_EQUAL[1]}"),
    "value-first-gloo": (3, f"{PROGRAMS} self.scale ({READ_AT[0]}, read by 7); {NOT_EQUAL[0]}"),
    "value-root": (2, f"{PROGRAMS} self.shift ({READ_AT[1]}, read by the model's forward); {NOT_EQUAL[1]}"),
    "value-loss-gloo": (2, f"{PROGRAMS} self.beta ({READ_AT[2]}, read by loss_fn); {NOT_EQUAL[0]}"),
    "value-replica": (2, f"{PROGRAMS} self.scale ({READ_AT[0]}, read by 0); {NOT_EQUAL[1]}"),
    "value-shape": (2, f"{PROGRAMS} the number of microbatches; rank 0 has 2, rank 1 has 1"),
    "value-sizes": (
        2,
        f"{PROGRAMS} microbatch 0; rank 0 has (8, 4) torch.float32 (8, 4) torch.float32, grad",
    ),
    "wishes": (2, "BadOption [E106]: 3 stages want 2 devices each"),
}
CASES_OF_LAUNCHERS = (
    "mesh",
    "eight",
    "plans",
    "outsize",
    "activation",
    "loss",
    "batch",
    "evaluated",
    "called",
    "called-evaluated",
    "called-modules",
    "closure",
    "clipped",
    "rates",
    *(case for case in CASES if case.startswith("value")),
)


class Ended(NamedTuple):
    codes: list[int]
    err: str


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """The plans that the ranks are given."""
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), torch.zeros(16, 4)
    wishes: dict[str, dict[str, Any]] = {
        "rank0": {"cluster": "2xcpu", "microbatches": 2, "exact": True},
        "rank1": {"cluster": "2xcpu", "microbatches": 4, "exact": True},
        "mesh": {"cluster": "4xcpu", "stages": 2, "axes": {"dp_replicate": 2}, "microbatches": 2},
        "eight": {"cluster": "8xcpu", "stages": 8, "microbatches": 2},
    }
    asked: dict[str, Any] = {"loss_fn": nn.MSELoss(), "target": x}
    return {name: outsize.plan(model, (x,), **asked, **how) for name, how in wishes.items()}


@pytest.fixture
def folder(tmp_path: Path, plans: dict[str, Plan]) -> Path:
    """With the files of the plans."""
    for name, plan in plans.items():
        plan.save(tmp_path / f"{name}.json")
    return tmp_path


def outsize_run(folder: Path, case: str, ranks: int) -> tuple[list[int], str]:
    launched = launch_in_fork(folder, [WORKER, case], ranks, env={"OMP_NUM_THREADS": "1"})
    try:
        done = launched.finish()
    finally:
        launched.clean_up()
    return [done.code], done.err


def torchrun(folder: Path, case: str, ranks: int) -> tuple[list[int], str]:
    nproc = f"--nproc-per-node={ranks}"
    (one,) = started(folder, [[sys.executable, "-m", "torch.distributed.run", nproc, WORKER, case]], [{}])
    _, err = one.communicate(timeout=PATIENCE_S)
    return [one.returncode], err


def by_hand(folder: Path, case: str, ranks: int) -> tuple[list[int], str]:
    port = str(free_port())
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    places = [{**meet, "RANK": str(rank)} for rank in range(ranks)]
    both = started(folder, [[sys.executable, WORKER, case]] * ranks, places)
    said = [one.communicate(timeout=PATIENCE_S)[1] for one in both]
    assert said[1:] == [""] * (ranks - 1), "rank 0 has said it"
    return [one.returncode for one in both], said[0]


def started(
    folder: Path, commands: list[list[str]], envs: list[dict[str, str]]
) -> list[subprocess.Popen[str]]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    pipe, more = subprocess.PIPE, {"OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(command, cwd=folder, env=inherited | more | env, stderr=pipe, text=True)
        for command, env in zip(commands, envs, strict=True)
    ]


def ended(launch: Callable[[Path, str, int], tuple[list[int], str]], folder: Path, case: str) -> Ended:
    ranks = CASES[case][0]
    codes, err = launch(folder, case, ranks)
    assert all((folder / f"called{rank}").exists() for rank in range(ranks))
    pids = [int((folder / f"pid{rank}").read_text()) for rank in range(ranks)]
    until(lambda: not any(map(_alive, pids)), lambda: f"of {pids} some live on")
    return Ended(codes, err)


# With --all alone: the other values that one rank changes are found and told by the same agreement.
LIKE_OTHERS = ("value-first-gloo", "value-root", "value-replica", "value-shape", "eight")


def launches() -> list[Any]:
    """Most cases under `outsize run`, and with --all the rest, and all under torchrun: how torchrun ends when
    a rank fails is test_launch_processes.py's to show.
    """
    ours = [
        pytest.param(
            outsize_run,
            case,
            id=f"outsize_run-{case}",
            marks=[pytest.mark.full] if case in LIKE_OTHERS else [],
        )
        for case in CASES_OF_LAUNCHERS
    ]
    theirs = [
        pytest.param(
            torchrun,
            case,
            id=f"torchrun-{case}",
            marks=[pytest.mark.interpreters, pytest.mark.full],
        )
        for case in CASES_OF_LAUNCHERS
    ]
    return ours + theirs


@pytest.mark.parametrize(("launch", "case"), launches())
@pytest.mark.sample(
    "outsize_run-value-submodule",
    "outsize_run-mesh",
    "outsize_run-clipped",
    "outsize_run-batch",
    "outsize_run-called-modules",
    "outsize_run-outsize",
    "outsize_run-plans",
    "outsize_run-loss",
)
def test_one_error_from_rank_0_and_all_have_ended(
    folder: Path, launch: Callable[[Path, str, int], tuple[list[int], str]], case: str
) -> None:
    found = ended(launch, folder, case)
    lines = [line for line in found.err.splitlines() if line.startswith("mismatch_worker.py:")]
    assert len(lines) == 1, found.err
    assert CASES[case][1] in lines[0]
    assert "Next: " in lines[0]
    torchruns = int(launch is torchrun)  # its own traceback, and below it the one that rank 0 has recorded
    assert len(re.findall("^Traceback", found.err, re.MULTILINE)) == torchruns, found.err
    recorded = found.err.count(
        f'File "{WORKER}"'
    )  # torchrun shows the ranks that recorded before its SIGTERM
    assert torchruns <= recorded <= torchruns * CASES[case][0], found.err
    assert 0 not in found.codes


@pytest.mark.parametrize("case", ["torch", "wishes"])
def test_every_process_has_a_code_of_its_own(folder: Path, case: str) -> None:
    """Without a launcher that would end them."""
    found = ended(by_hand, folder, case)
    assert CASES[case][1] in found.err
    assert len(found.err.splitlines()) == 1, found.err
    assert len(set(found.codes)) == 1
    assert 0 not in found.codes


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
