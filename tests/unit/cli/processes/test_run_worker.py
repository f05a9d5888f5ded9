"""What a process of a MODEL run decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import outsize
from outsize.capture.models.losses import Objective
from outsize.cli.model_input import ModelInput
from outsize.cli.processes import run_worker
from outsize.cli.processes.job import RunJob, RunOutcome
from outsize.cli.screen import Screen
from outsize.errors import UnknownDevice
from outsize.ir.answers.request import PlanRequest
from outsize.train.world.world import World


@pytest.mark.parametrize("measured", [False, True])
def test_a_plan_is_priced_again_as_it_was_priced(measured: bool) -> None:
    model, x, y = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(4, 4), torch.randn(4, 2)
    loss = Objective(F.mse_loss, y)
    plan = outsize.plan(model, (x,), loss_fn=F.mse_loss, target=y, cluster="2xcpu", measured=measured)
    job = RunJob(model="toy", input=None, request=PlanRequest(batch_size=4), steps=1, plan=plan)
    inputs = ModelInput(model, (x,), {}, loss)
    priced = run_worker._decide(World(0, 1, 0, None), job, inputs, Screen(False)).plan
    assert priced.expected is not None
    assert priced.expected.source == ("measured" if measured else "roofline")


def test_a_worker_takes_the_device_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for GPUs is not run, and not traced, on CPUs without a word."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(4, 4)
    made = [outsize.plan(model, (x,), cluster=cluster, stages=2) for cluster in ("2xcpu", "2xh100-80gb")]
    on_cpus, on_gpus = (
        RunJob(model="toy", input=None, request=PlanRequest(batch_size=4), steps=1, plan=plan)
        for plan in made
    )
    monkeypatch.setattr(run_worker, "visible_accelerators", lambda: ("cpu", 0))
    assert run_worker._device_type(on_cpus) == "cpu"
    with pytest.raises(UnknownDevice, match="the plan is for cuda devices, and this process has none"):
        run_worker._device_type(on_gpus)
    monkeypatch.setattr(run_worker, "visible_accelerators", lambda: ("cuda", 2))
    assert run_worker._device_type(on_gpus) == "cuda"
    assert run_worker._device_type(on_gpus.model_copy(update={"devices": ("cuda:0", "cuda:1")})) == "cpu"


def test_a_job_with_weights_begins_with_them(folder: Path) -> None:
    state = {"0.weight": torch.zeros(4, 4), "0.bias": torch.zeros(4), "1.weight": torch.zeros(3, 4)}
    save_file({**state, "1.bias": torch.tensor([0.0, 0.0, 900.0])}, folder / "w.safetensors")
    path = folder / "w.safetensors"
    request = PlanRequest(batch_size=8, stages=2)
    job = RunJob(model="toy:pair", input="4", request=request, steps=1, weights=path, as_json=True)
    outcome = run_worker.train(RunJob.model_validate_json(job.to_json()), World(0, 1, 0, None))
    assert isinstance(outcome, RunOutcome)
    first = outcome.history.steps[0].loss
    assert first is not None
    assert first % (900 / 8) == 0  # each sample whose class is not 2 costs 900
    assert first > 0
