"""What a user sees of speed, with real processes: W210 and the trace, tune, bench."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outsize.ir.findings import Measured
from outsize.ir.plan import Plan

pytestmark = pytest.mark.dist

TOY = """
from torch import nn

def build():
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())])
"""
CLI = ("-c", "import sys; sys.argv[0] = 'outsize'; from outsize.cli import main; main()")
BENCH = """
from outsize.cli.processes.bench_experiment import TutorialJob
from outsize.cli.processes.launch import LaunchPlace, run_worker
from outsize.cli.screen import Screen

job = TutorialJob(model="toy:build", cut="4", input="8", batch=4, splits=(2,), repeats=1, trials=1)
print(run_worker("bench_worker", job, 2, LaunchPlace(), Screen(True), shown_as="bench"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(TOY)
    return tmp_path


def run(folder: Path, *command: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_sequential_run_says_so_and_its_trace_has_memory(folder: Path) -> None:
    found = run(
        folder,
        *(*CLI, "run", "toy:build", "--input", "8", "--steps", "3", "--schedule", "naive"),
        *("--microbatches", "4", "--report", "trace=t.json", "--json"),
    )
    measured = found["measured"]
    assert 0 < measured["bound_s"] <= measured["step_s"]
    assert 0 <= measured["transfer"] < 1
    assert measured["warning"]["code"] == "W210"
    assert "of the step: " in measured["warning"]["text"]
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    counters = {(e["pid"], e["name"]) for e in events if e["ph"] == "C"}
    assert {(1, "memory rank 0"), (1, "memory rank 1")} <= counters
    flows = [sorted(e["id"] for e in events if e["ph"] == ph) for ph in "sf"]
    assert flows[0] == flows[1] != []


def test_tune_runs_real_steps_and_writes_the_plan(folder: Path) -> None:
    found = run(folder, *(*CLI, "tune", "toy:build", "--input", "8", "--trials", "3", "--json"))
    assert 1 <= len(found["trials"]) <= 3
    assert found["step_s"] == min(t["step_s"] for t in found["trials"])
    plan = Plan.load(folder / "plan.json")
    assert isinstance(plan.why[0], Measured)
    assert plan.batch_size == 8
    plan.check_runs()


def test_the_experiments_of_the_tutorial(folder: Path) -> None:
    found = run(folder, "-c", BENCH)
    assert sorted(found["pipelined_s"]) == ["2"]
    laps = [found["single_s"], found["split_s"], found["outsize_s"], *found["pipelined_s"].values()]
    assert all(len(each) == 1 and min(each) > 0 for each in laps)
