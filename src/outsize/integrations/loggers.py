"""Writes what a run tells of itself to TensorBoard, Weights & Biases and MLflow.

    callbacks=[TensorBoard("runs/first"), WeightsAndBiases("project"), MLflow("mlruns")]     # of parallelize

Each package is imported when its logger is made. A logger writes on rank 0, from its first figure on.

    loss, lr, grad_norm, step_s        of the step          bubble, busy/cuda:0, ...       shares of the step
    memory/rank0, ...                  measured GiB         planned_memory/rank0, ...      planned GiB (P50)
    expert_imbalance                   rows, with ep        checkpoints, replans           counted
    evaluation/loss                    of each evaluation
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, final

from outsize.capture.models.imports import import_package
from outsize.errors import ModelNotImportable
from outsize.ir.answers.utilisation import Utilisation
from outsize.train.context.callback import Callback, CheckpointFacts, EvaluationFacts, ReplanFacts, StepFacts

GIB: Final = 2**30


class ScalarLogger(Callback, ABC):
    """Turns what happens into scalars by name; a subclass writes them."""

    def __init__(self, every: int = 1) -> None:
        """Writes the figures of each `every`-th step."""
        self.every = every
        self._counts = Counter[str]()

    @abstractmethod
    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Writes scalars of one step."""

    @abstractmethod
    def close(self) -> None:
        """Ends the log; what was written is on the disk."""

    def on_step(self, facts: StepFacts) -> None:
        """Writes the figures of a step."""
        self.write(dict(step_scalars(facts)), facts.step)

    def on_evaluate(self, facts: EvaluationFacts) -> None:
        """Writes the loss of an evaluation."""
        if facts.loss is not None:
            self.write({"evaluation/loss": facts.loss}, facts.step)

    def on_checkpoint(self, facts: CheckpointFacts) -> None:
        """Counts a checkpoint."""
        self._count("checkpoints", facts.step)

    def on_replan(self, facts: ReplanFacts) -> None:
        """Counts a new plan."""
        self._count("replans", facts.step)

    def _count(self, name: str, step: int) -> None:
        self._counts[name] += 1
        self.write({name: self._counts[name]}, step)


def step_scalars(facts: StepFacts) -> Iterator[tuple[str, float]]:
    """Yields names and figures of one step; what is not known is left out."""
    yield "loss", facts.loss
    if facts.learning_rate is not None:
        yield "lr", facts.learning_rate
    if facts.grad_norm is not None:
        yield "grad_norm", facts.grad_norm
    if facts.expert_imbalance is not None:
        yield "expert_imbalance", facts.expert_imbalance
    if facts.utilisation is not None:
        yield from _utilisation_scalars(facts.utilisation)
    yield from ((f"memory/rank{rank}", used / GIB) for rank, used in enumerate(facts.memory_bytes))
    yield from ((f"planned_memory/rank{rank}", n / GIB) for rank, n in enumerate(facts.planned_bytes))


def _utilisation_scalars(utilisation: Utilisation) -> Iterator[tuple[str, float]]:
    yield "step_s", utilisation.step_s
    yield "bubble", utilisation.bubble
    names = utilisation.devices
    for rank, (device, busy) in enumerate(zip(names, utilisation.busy, strict=True)):
        yield f"busy/{device if len(set(names)) == len(names) else f'{device}-rank{rank}'}", busy


@final
class TensorBoard(ScalarLogger):
    """Writes event files for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | Path, every: int = 1) -> None:
        """Raises ModelNotImportable where the package tensorboard is missing."""
        super().__init__(every)
        _insist_on("tensorboard")
        self._folder, self._writer = Path(folder), None

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds the scalars to the event file of this run."""
        if self._writer is None:
            module: Any = import_package("torch.utils.tensorboard", extra="loggers")
            self._writer = module.SummaryWriter(str(self._folder))
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is buffered."""
        if self._writer is not None:
            self._writer.close()


@final
class WeightsAndBiases(ScalarLogger):
    """Writes a run of Weights & Biases; `mode="offline"` needs no network, `wandb sync` sends it later."""

    def __init__(self, project: str, every: int = 1, *, mode: str = "offline", **options: Any) -> None:
        """Takes further options of `wandb.init` (name, dir, config, ...).

        Raises ModelNotImportable where the package wandb is missing.
        """
        super().__init__(every)
        _insist_on("wandb")
        self._options, self._run = {"project": project, "mode": mode, **options}, None

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds the scalars to the run; figures of one step may come in several calls."""
        if self._run is None:
            module: Any = import_package("wandb", extra="loggers")
            self._run = module.init(**self._options)
            self._run.define_metric("*", step_metric="step")
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        """Ends the run."""
        if self._run is not None:
            self._run.finish()


@final
class MLflow(ScalarLogger):
    """Writes a run of MLflow, by default to a database in a local folder: `mlflow ui` reads it."""

    def __init__(
        self,
        folder: str | Path = "mlruns",
        every: int = 1,
        *,
        experiment: str = "outsize",
        uri: str | None = None,
    ) -> None:
        """Takes `uri` for a tracking server in place of the folder.

        Raises ModelNotImportable where the package mlflow is missing.
        """
        super().__init__(every)
        _insist_on("mlflow")
        self._folder, self._uri, self._experiment = Path(folder), uri, experiment
        self._client: Any = None
        self._run_id = ""

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds the scalars to the run."""
        if not self._run_id:
            self._begin()
        for name, value in scalars.items():
            self._client.log_metric(self._run_id, name.replace(":", "_"), value, step=step)

    def close(self) -> None:
        """Ends the run."""
        if self._run_id:
            self._client.set_terminated(self._run_id)

    def _begin(self) -> None:
        module: Any = import_package("mlflow", extra="loggers")
        if self._uri is None:
            self._folder.mkdir(parents=True, exist_ok=True)
        uri = self._uri or f"sqlite:///{self._folder.absolute() / 'mlflow.db'}"
        self._client = module.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(self._experiment)
        number = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self._run_id = self._client.create_run(number).info.run_id


def _insist_on(package: str) -> None:
    """Raises ModelNotImportable, without importing the package, where it is not installed."""
    if find_spec(package) is None:
        raise ModelNotImportable(
            f"{package} is not installed",
            numbers="a logger of outsize writes to it",
            next_step="pip install 'outsize[loggers]'",
        )
