"""What the real TensorBoard, Weights & Biases and MLflow have on the disk after a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import until
from torch import nn

import outsize
from outsize.errors import ModelNotImportable
from outsize.integrations import loggers
from outsize.integrations.loggers import MLflow, ScalarLogger, TensorBoard, WeightsAndBiases
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 3)
NAMES = {"loss", "lr", "grad_norm", "step_s", "bubble", "memory/rank0", "planned_memory/rank0"}


def run(folder: Path, logger: ScalarLogger) -> list[float]:
    """Trains four steps, evaluates and saves; returns the losses of the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    engine = outsize.parallelize(
        model, (X,), target=Y, loss_fn=nn.functional.mse_loss, stages=2, microbatches=4, clip_norm=1.0,
        optimizer=torch.optim.AdamW, callbacks=[logger],
    )  # fmt: skip
    losses = [float(engine.step(X, target=Y).loss) for _ in range(4)]
    engine.evaluate(X, target=Y)
    engine.save(folder / "saved")
    logger.close()
    return losses


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {name: [(e.step, e.value) for e in read.Scalars(name)] for name in read.Tags()["scalars"]}


def test_tensorboard_has_every_figure(tmp_path: Path) -> None:
    losses = run(tmp_path, TensorBoard(tmp_path / "board", every=2))
    found = tensorboard_scalars(tmp_path / "board")
    assert {*NAMES, "busy/cpu", "evaluation/loss", "checkpoints"} <= set(found)
    assert found["loss"] == [(2, pytest.approx(losses[1])), (4, pytest.approx(losses[3]))]
    assert found["checkpoints"] == [(4, 1.0)]


def test_weights_and_biases_writes_offline(tmp_path: Path) -> None:
    losses = run(tmp_path, WeightsAndBiases("project", dir=str(tmp_path), settings={"silent": True}))
    (written,) = tmp_path.rglob("offline-run-*/run-*.wandb")
    wanted = {*(name.encode() for name in NAMES), repr(losses[3])[:8].encode()}
    # Its own process writes the file after `finish` has returned.
    until(lambda: all(each in written.read_bytes() for each in wanted))


def test_mlflow_writes_to_a_folder(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    losses = run(tmp_path, MLflow(tmp_path / "flow"))
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/flow/mlflow.db")
    experiment = client.get_experiment_by_name("outsize")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    history: list[Any] = client.get_metric_history(found.info.run_id, "loss")
    assert [metric.value for metric in history] == losses
    assert set(found.data.metrics) >= NAMES
    assert found.info.status == "FINISHED"


@pytest.mark.dist
def test_rank_0_writes_for_both(tmp_path: Path) -> None:
    def work() -> None:
        world = join()
        run(tmp_path, TensorBoard(tmp_path / str(world.rank)))
        leave(world)

    run_in_forks(2, work)
    found = tensorboard_scalars(tmp_path / "0")
    assert {"busy/cpu:0", "busy/cpu:1", "memory/rank1", "planned_memory/rank1"} <= set(found)
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(
    "make", [lambda: TensorBoard("x"), lambda: WeightsAndBiases("x"), lambda: MLflow("x")]
)
def test_a_missing_package_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda _: None)
    with pytest.raises(
        ModelNotImportable, match=r"is not installed; .* Next: pip install 'outsize\[loggers\]'"
    ):
        make()


def test_a_logger_imports_nothing_before_it_writes() -> None:
    before = set(sys.modules)
    TensorBoard("x"), WeightsAndBiases("x"), MLflow("x")
    assert not {"wandb", "mlflow", "tensorboard"} & (set(sys.modules) - before)
