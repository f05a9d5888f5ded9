"""The real Trainer of Lightning, split: logs, callbacks, checkpoints of the plain one, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning_worker
import pytest
import torch
from forked import in_forks
from lightning_worker import Net, lightning
from patience import PATIENCE_S, free_port
from test_docs_run import run as run_page
from torch import nn

from outsize.errors import BadOption
from outsize.integrations.lightning import OutsizeStrategy
from outsize.integrations.lightning_parts.training_step import reads_batch_number

MANUAL = {"gradient_clip_val": None, "accumulate_grad_batches": 1, "max_epochs": 2}
JOBS: dict[str, dict[str, Any]] = {
    "accumulation, schedule, metrics": {},
    "bfloat16, a dict, early stopping": {
        "dict": True, "trainer": {"precision": "bf16-mixed"}, "stop": {"patience": 1}, "rate": 1.0,
    },
    "manual, two optimizers": {"module": "TwoOptimizers", "trainer": MANUAL},
    "a step that reads the batch's number": {"module": "ReadsNumber", "trainer": {"max_epochs": 1}},
    "a metric over an epoch of training": {"module": "KeepsMetric", "trainer": {"max_epochs": 1}},
    "a step that reads its loss": {"module": "ReadsLoss", "trainer": {"max_epochs": 1}},
}  # fmt: skip


DIVIDED: dict[str, dict[str, Any]] = {
    "two networks by hand": {"module": "Gan", "trainer": MANUAL},
    "a network that decides": {"module": "DecidingGan", "trainer": MANUAL},
    "a loss over all pairs": {
        "module": "Contrasted",
        "trainer": {"accumulate_grad_batches": 1, "max_epochs": 2},
    },
}


def run(job: dict[str, Any], folder: Path, ranks: int = 1) -> dict[str, Any]:
    """What the script says of this job."""
    folder.mkdir(exist_ok=True)
    job = {"folder": str(folder), "out": str(folder / "out.json"), **job}
    if ranks == 1:
        lightning_worker.main(job)
    else:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

        def rank(number: int) -> None:
            numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update(place | {name: str(value) for name, value in numbers.items()})
            lightning_worker.main(job)

        in_forks(folder, ranks, rank)
    return json.loads((folder / "out.json").read_text())


@cache
def plain(name: str) -> dict[str, Any]:
    return run(JOBS[name], Path(mkdtemp()))


# Without --all each module runs in one process or over two.
@pytest.mark.sample(
    "bfloat16, a dict, early stopping", "a step that reads the batch's number", "a step that reads its loss"
)  # fmt: skip
@pytest.mark.parametrize("name", JOBS)
def test_a_split_module_has_the_digits_of_the_plain_one(name: str, tmp_path: Path) -> None:
    assert run({**JOBS[name], "split": {"stages": 2}}, tmp_path) == plain(name)


@pytest.mark.dist
@pytest.mark.sample(
    "accumulation, schedule, metrics", "manual, two optimizers", "a metric over an epoch of training"
)  # fmt: skip
@pytest.mark.parametrize("name", JOBS)
def test_so_has_one_over_two_processes(name: str, tmp_path: Path) -> None:
    expected = plain(name)  # First: ranks are forks, which have imported by then what it imports.
    assert run({**JOBS[name], "split": {"stages": 2}}, tmp_path, ranks=2) == expected


@cache
def by_parts(name: str) -> dict[str, Any]:
    """Plain Lightning, whose module calls its networks for each half of a batch."""
    return run({**DIVIDED[name], "parts": 2}, Path(mkdtemp()))


@pytest.mark.sample("two networks by hand-2", "a network that decides-1", "a loss over all pairs-2")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.dist)])
@pytest.mark.parametrize("name", DIVIDED)
def test_divided_batches_have_the_digits_of_a_loop_by_parts(name: str, ranks: int, tmp_path: Path) -> None:
    expected = by_parts(name)
    job = {**DIVIDED[name], "split": {"stages": 2, "microbatches": 2}}
    assert run(job, tmp_path, ranks) == expected


@pytest.mark.sim
def test_so_have_those_on_two_devices_of_one_process(tmp_path: Path) -> None:
    """What the networks return is where the module's own code runs. Each backward is one of a single call,
    because several are added up in no fixed order there.
    """
    (tmp_path / "plain").mkdir()
    job = {**DIVIDED["two networks by hand"], "apart": True}
    split = {"stages": 2, "microbatches": 2, "devices": ["sim:0", "sim:1"]}
    assert run({**job, "split": split}, tmp_path) == run({**job, "parts": 2}, tmp_path / "plain")


def test_stages_of_a_divided_batch_overlap() -> None:
    """Each call, in training, validation and prediction, runs its microbatches in one pipeline."""
    module = lightning_worker.Gan({})
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=1, strategy=OutsizeStrategy(stages=2, microbatches=4),
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    trainer.fit(module, loader)
    models = trainer.strategy.models
    assert sorted(models) == ["generator", "judges.0"]
    for model in models.values():
        assert model.plan.form == "tape"
        assert len(model.plan.stages) == 2
    crew, ran = models["generator"].engine.crew, list[tuple[str, int]]()
    opens, runs = crew.open, crew.run
    crew.open = lambda load, *more: ran.append(("open", len(load.variants))) or opens(load, *more)
    crew.run = lambda loads, *more: ran.append(("run", len(loads[0].variants))) or runs(loads, *more)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    assert ran == [("open", 4)] * 4  # Two calls in each of two steps.
    ran.clear()
    trainer.validate(module, loader, verbose=False)
    trainer.predict(module, loader)
    assert ran == [("run", 4)] * 4
    with pytest.raises(BadOption, match=r"children of this module are split.*models\[name\]\.engine"):
        _ = trainer.strategy.engine


def test_a_child_that_cannot_be_divided_is_named() -> None:
    class Small(lightning_worker.Gan):
        def __init__(self, job: dict[str, Any]) -> None:
            super().__init__(job)
            self.judges[0] = nn.Linear(8, 1)

    with pytest.warns(
        UserWarning, match=r"divides no batch of this module: self\.judges\.0 has fewer modules"
    ):
        trainer = fit(
            Small({}), strategy=OutsizeStrategy(stages=2, microbatches=2), accumulate_grad_batches=1
        )
    assert trainer.strategy.engine.plan.form == "modules"


@pytest.mark.dist
@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
def test_children_whose_weights_are_divided_are_refused(axis: str, tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        strategy = OutsizeStrategy(stages=1, axes={axis: 2}, microbatches=2)
        module = lightning_worker.Gan({})
        module.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        with pytest.raises(BadOption, match=rf"read whole weights.*{axis} 2\. Next: axes="):
            fit(module, 8, strategy=strategy, accumulate_grad_batches=1)

    in_forks(tmp_path, 2, rank, PATIENCE_S)


@pytest.mark.dist
def test_a_run_goes_on_at_another_number_of_stages_and_in_plain_lightning(tmp_path: Path) -> None:
    """Two processes save after an epoch; three stages in one process go on, and Lightning itself."""
    run({"split": {"stages": 2}, "trainer": {"max_epochs": 1}}, tmp_path / "two", ranks=2)
    resumed = {"resume": str(tmp_path / "two" / "saved" / "last.ckpt")}
    plainly = run(resumed, tmp_path / "plain")
    assert run({**resumed, "split": {"stages": 3}}, tmp_path / "three") == plainly
    whole = plain("accumulation, schedule, metrics")
    assert plainly["steps"] == whole["steps"]
    assert run({**resumed, "split": {"stages": 2}}, tmp_path / "again", ranks=2) == plainly


@pytest.mark.dist
def test_so_does_one_of_divided_batches(tmp_path: Path) -> None:
    """Two processes save after an epoch; plain Lightning by parts goes on, and one and two processes."""
    job, split = DIVIDED["two networks by hand"], {"stages": 2, "microbatches": 2}
    first = {**job, "trainer": {**MANUAL, "max_epochs": 1}, "split": split}
    run(first, tmp_path / "two", ranks=2)
    resumed = {**job, "resume": str(tmp_path / "two" / "saved" / "last.ckpt")}
    plainly = run({**resumed, "parts": 2}, tmp_path / "plain")
    assert plainly["steps"] == by_parts("two networks by hand")["steps"]
    assert run({**resumed, "split": split}, tmp_path / "one") == plainly
    assert run({**resumed, "split": split}, tmp_path / "again", ranks=2) == plainly


@pytest.mark.dist
@pytest.mark.interpreters
def test_lightning_starts_the_processes_itself(tmp_path: Path) -> None:
    job = {
        "split": {"stages": 2},
        "trainer": {"devices": 2},
        "folder": str(tmp_path),
        "out": f"{tmp_path}/out",
    }
    command = [sys.executable, lightning_worker.__file__, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out").read_text()) == plain("accumulation, schedule, metrics")


def test_both_sides_of_the_page_print_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text(encoding="utf-8")
    assert run_page(page) == page


def fit(module: Any, batch_size: int = 2, **options: Any) -> Any:
    """A short fit of a module over two stages in this process; returns its trainer."""
    data = torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 4))
    more = {"strategy": OutsizeStrategy(stages=2), "max_epochs": 1, "accumulate_grad_batches": 2, **options}
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **more,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=batch_size))
    return trainer


def test_the_batches_of_an_update_run_in_one_pipeline() -> None:
    engine = fit(Net({})).strategy.engine
    assert engine.plan.microbatches == 2
    assert engine.steps == 2  # of four batches
    assert {"0F0", "0F1", "1F0", "1F1"} <= {span.action for span in engine.timeline().spans}


def test_the_name_is_registered_and_the_planner_decides() -> None:
    assert fit(Net({}), strategy="outsize").strategy.engine.plan.axes.world_size == 1


def test_losses_of_one_update_with_different_factors_are_refused() -> None:
    class Growing(Net):
        calls = 0

        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            (loss * self.calls).backward()

    with pytest.raises(
        BadOption, match=r"multiplied by different numbers.*1 and 2.* Next: multiply the loss in"
    ):
        fit(Growing({}))


def averaged(strategy: Any) -> dict[str, Any]:
    """The weights of a short fit, averaged by Lightning's callback."""
    torch.manual_seed(0)
    module = Net({})
    fit(module, strategy=strategy, max_epochs=2, callbacks=[lightning.callbacks.WeightAveraging()])
    return module.state_dict()


def test_an_average_of_the_weights_is_that_of_plain_lightning() -> None:
    split, plainly = averaged(OutsizeStrategy(stages=2)), averaged("auto")
    assert split.keys() == plainly.keys()
    assert all(torch.equal(split[name], plainly[name]) for name in plainly)


@pytest.mark.dist
def test_an_average_of_the_weights_is_refused_over_two_processes(tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        with pytest.raises(BadOption) as refused:
            averaged(OutsizeStrategy(stages=2))
        (tmp_path / f"said{number}").write_text(str(refused.value))

    in_forks(tmp_path, 2, rank, PATIENCE_S)
    for number in (0, 1):
        said = (tmp_path / f"said{number}").read_text()
        assert "WeightAveraging averages one process's weights" in said
        assert "Next: engine.state.attach(average), or python train.py with all stages in it" in said


def test_lightning_starts_no_processes_on_other_machines() -> None:
    with pytest.raises(BadOption, match=r"num_nodes=2\. Next: outsize run --nnodes 2 train\.py"):
        lightning.Trainer(devices=2, num_nodes=2, accelerator="cpu", strategy=OutsizeStrategy(stages=2))


def test_options_that_are_the_trainers_are_refused() -> None:
    with pytest.raises(BadOption, match=r"clip_norm of outsize= is what the training framework says itself"):
        OutsizeStrategy(stages=2, clip_norm=1.0)


def test_what_says_no_split_is_refused() -> None:
    split: Any = 2
    with pytest.raises(BadOption, match=r"2 does not say how the model is split.*a int.* Next: outsize="):
        OutsizeStrategy(split)


def test_the_engine_is_there_after_the_first_batch() -> None:
    with pytest.raises(BadOption, match=r"split at the first batch of fit.* Next: trainer.fit"):
        _ = OutsizeStrategy(stages=2).engine


def test_the_number_of_the_batch_is_known_to_be_read() -> None:
    assert not reads_batch_number(Net({}).training_step)
    assert reads_batch_number(lightning_worker.ReadsNumber({}).training_step)
    assert not reads_batch_number(lambda batch: nn.Linear(1, 1)(batch))
