"""`outsize run` and `outsize trace` with real processes: figures, files, errors of a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.dist

TOY = """
import torch
from torch import nn

def build():
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())])

def linear():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))

class Dies(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = build()

    def forward(self, x):
        return self.layers(x)

def dies():
    model = Dies()
    model.layers[6].register_forward_pre_hook(_fail)
    return model

def _fail(module, args):
    if type(args[0]) is torch.Tensor:
        raise ValueError("no luck today")
"""
SCRIPT = """
import sys
import torch
import outsize
from toy import build

torch.manual_seed(0)
x, y = torch.randn(8, 8), torch.randint(0, 8, (8,))
model = build()
engine = outsize.parallelize(
    model, (x,), loss_fn=torch.nn.functional.cross_entropy, target=y, optimizer=torch.optim.AdamW
)
loss = engine.step(x, target=y).loss
print(sys.argv[1:], float(loss))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a model and a training script."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def outsize(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'outsize'; from outsize.cli import main; main()"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_a_model_is_trained_and_shown(folder: Path) -> None:
    files = ("--report", "report.html,trace=trace.json")
    done = outsize(
        folder, "run", "toy:build", "--steps", "4", "--train", "lr=0.05", "--json", "--exact", *files
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    assert len(figures["loss"]) == len(figures["steps_s"]) == 4
    assert figures["loss"][-1] < figures["loss"][0]
    assert len(figures["measured"]["busy"]) == len(figures["predicted"]["busy"]) == 2
    page = (folder / "report.html").read_text()
    assert "outsize run toy:build" in page
    assert "<svg" in page
    assert "The cuts in the network" in page
    assert "The steps of the run" in page
    assert page.count("</figcaption>") == 2 + 4 + 4  # one step, the last ones, and four figures over steps
    assert all(norm > 0 for norm in figures["grad_norm"])
    assert figures["learning_rate"] == [0.05] * 4
    memory = figures["measured"]["memory"]
    assert [each["stages"] for each in memory] == [[0], [1]]
    for each, planned in zip(memory, figures["plan"]["expected"]["stages"], strict=True):
        assert each["weights_bytes"] == planned["weights_bytes"]
        assert each["gradients_bytes"] == each["weights_bytes"]  # all are trained
        assert 0 <= each["optimizer_bytes"] - planned["optimizer_bytes"] <= 4 * 8  # AdamW counts its steps
        assert each["peak_bytes"] >= each["weights_bytes"] + each["gradients_bytes"] + each["optimizer_bytes"]
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    counters = {(e["pid"], e["name"]) for e in events if e["ph"] == "C"}
    assert counters == {(pid, f"memory rank {rank}") for pid in (1, 2) for rank in (0, 1)}


def test_the_same_losses_in_one_process_and_in_three(folder: Path) -> None:
    call = ("run", "toy:build", "--steps", "3", "--microbatches", "4", "--exact", "--json")
    runs = [outsize(folder, *call, "--nproc-per-node", count) for count in ("1", "3")]
    one, three = (json.loads(run.stdout)["loss"] for run in runs)
    assert one == three


def test_a_model_is_trained_over_an_axis_and_an_old_flag_warns_once(folder: Path) -> None:
    call = ("run", "toy:build", "--steps", "2", "--axes", "tp=2", "--lr", "0.05", "--seed", "1", "--json")
    done = outsize(folder, *call)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["plan"]["axes"]["tp"] == 2
    assert figures["learning_rate"] == [0.05] * 2
    assert done.stderr.count("OldSpelling") == 1
    assert "Next: --train lr=0.05,seed=1" in done.stderr


def test_a_run_whose_loss_is_not_finite_has_its_report_and_its_figures(folder: Path) -> None:
    options = ("--input", "8", "--train", "lr=1e30", "--report", "r.html", "--nproc-per-node", "1")
    call = ("run", "toy:linear", "--steps", "3", *options)
    done = outsize(folder, *call, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout, parse_constant=pytest.fail)  # NaN is no JSON
    assert len(figures["loss"]) == 3
    assert figures["loss"][0] > 0
    assert figures["loss"][-1] is None
    assert "The steps of the run" in (folder / "r.html").read_text()
    shown = outsize(folder, *call)
    assert shown.returncode == 0, shown.stderr
    assert "-> not finite in 3 steps" in shown.stdout


def test_a_trace_of_a_plan(folder: Path) -> None:
    made = outsize(folder, "plan", "toy:build", "--cluster", "2xcpu", "--exact", "--out", "plan.json")
    assert made.returncode == 0, made.stderr
    done = outsize(folder, "trace", "toy:build", "--plan", "plan.json", "--out", "t.json", "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert "perfetto" in done.stderr
    names = {
        event["args"]["name"]
        for event in json.loads((folder / "t.json").read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert {name.split()[0] for name in names} == {"predicted", "measured"}


def test_an_error_of_ours_from_a_worker(folder: Path) -> None:
    done = outsize(folder, "run", "toy:build", "--microbatches", "300", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "E104"
    assert "Traceback" not in done.stderr
    assert "TooFewSamples [E104]" in done.stderr


def test_the_models_own_error_keeps_its_traceback(folder: Path) -> None:
    done = outsize(folder, "run", "toy:dies", "--input", "8", "--json")
    assert done.returncode in (2, 4)
    assert "no luck today" in done.stderr
    assert json.loads(done.stdout)["error"]["exit_code"] == done.returncode


def trained(folder: Path) -> str:
    """What both ranks of the script print under `outsize run`."""
    ours = outsize(folder, "run", "--nproc_per_node", "2", "train.py", "--steps", "7")
    assert ours.returncode == 0, ours.stderr
    lines = sorted(line.removeprefix("[1] ") for line in ours.stdout.splitlines())
    assert lines[0] == lines[1]
    assert lines[0].startswith("['--steps', '7'] ")
    return lines[0]


@pytest.mark.interpreters
def test_a_script_in_new_interpreters(folder: Path) -> None:
    trained(folder)


@pytest.mark.full
@pytest.mark.interpreters
def test_the_same_script_under_both_launchers(folder: Path) -> None:
    """With forks: test_parity_processes.py and the training script of the examples."""
    line = trained(folder)
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", "2"]
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *meeting, "train.py", "--steps", "7"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert line.split()[-1] in theirs.stdout
