"""`outsize run MODEL --checkpoint DIR`, killed and started again: the losses of the run that nobody kills."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from forked import preload
from patience import until

from outsize.cli.processes.job import FinishedRun, RunJob, RunOutcome
from outsize.cli.processes.run_worker import train
from outsize.ir.answers.request import PlanRequest
from outsize.run.checkpoint.read import CheckpointReader
from outsize.train.world.join import join

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore::outsize.train.checkpoint.loop.attached.ResumeNote"),
]
TOY = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))])

def example_batch():
    return (torch.randn(8, 8, generator=torch.Generator().manual_seed(1)),), {}
"""


def job(steps: int, folder: Path | None, stages: int) -> RunJob:
    request = PlanRequest(batch_size=8, stages=stages, microbatches=2)
    saving = {"checkpoint": folder, "every": "1", "keep": 2} if folder is not None else {}
    return RunJob(model="killed_toy:build", input=None, request=request, steps=steps, as_json=True, **saving)


def losses(of: RunJob) -> tuple[float | None, ...]:
    outcome = train(of, join("cpu"))
    assert isinstance(outcome, RunOutcome)
    return tuple(step.loss for step in outcome.history.steps)


def test_a_killed_run_goes_on_with_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killed_toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    preload()
    endless = job(1_000_000, tmp_path / "run", 3)
    killed = multiprocessing.get_context("fork").Process(target=losses, args=(endless,), daemon=True)
    killed.start()
    late_save = "step-0000000[4-9]/manifest.json"
    until(lambda: list((tmp_path / "run").glob(late_save)) or not killed.is_alive())
    assert killed.is_alive()
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    saved = CheckpointReader(tmp_path / "run").step
    late = losses(job(saved + 3, tmp_path / "run", 2))
    assert late == losses(job(saved + 3, None, 1))[saved:]
    assert len(list((tmp_path / "run").glob("step-*"))) == 2

    # A run that is killed between its last save and its end is over: started again, it says so and ends well.
    over = train(job(saved + 3, tmp_path / "run", 2), join("cpu"))
    assert isinstance(over, FinishedRun)
    assert over.document().keys() == train(job(1, None, 1), join("cpu")).document().keys()
    assert (over.document()["loss"], over.document()["measured"]) == ([], None)
    said = capfd.readouterr().err
    assert f"has a run of {saved + 3} steps already" in said
    assert f"nothing is left to do. Next: --steps {2 * (saved + 3)}, or another --checkpoint DIR" in said
