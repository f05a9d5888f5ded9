"""Defines what the command line passes to the processes of a run, and what rank 0 returns; both are files.

launcher   folder/job.json      ->  each process (cli/processes/run_worker.py)
launcher  <-  folder/outcome.json   from rank 0, or folder/error.json from a rank that failed
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

from outsize.files.private_folder import private_folder
from outsize.ir.answers.request import PlanRequest
from outsize.ir.answers.runs.recorded_run import RecordedRun, RunStep
from outsize.ir.answers.utilisation import Idle, Utilisation
from outsize.ir.base import Record
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan, ScheduleName
from outsize.ir.profile import Profile
from outsize.ir.timeline import Timeline
from outsize.report.wording import idle_next_step, idle_sentence


@final
class RunJob(Record):
    """A run that trains MODEL for some AdamW steps on one random batch, by `plan` or by one for `request`.

    `devices` are set where one process uses several devices. With `checkpoint` the run goes on from the
    newest checkpoint in this folder, up to `steps` in all. It saves there `every` so many steps or so long,
    and at the end; the newest `keep` stay. A `watched` run measures its memory and the norm of its
    gradients.
    """

    model: str
    input: str | None
    request: PlanRequest
    steps: int
    lr: float = 1e-3
    seed: int = 0
    plan: Plan | None = None
    weights: Path | None = None
    devices: tuple[str, ...] = ()
    checkpoint: Path | None = None
    every: str | None = None
    keep: int | None = None
    measure: bool = False
    watched: bool = False
    as_json: bool = False

    def command(self, stages: int, idle: Idle) -> str:
        """Returns what to type for this run with `stages` stages and with the remedy's options."""
        tunes = idle.cause == "uneven-stages"
        places = "nproc" if tunes else "stages"
        options = {"input": self.input, "batch": str(self.request.batch_size), places: str(stages)}
        options |= {"devices": ",".join(self.devices)} if self.devices and not tunes else {}
        remaining = {
            name: value for name, value in options.items() if value and name not in dict(idle.change)
        }
        words = [f"--{name} {shlex.quote(value)}" for name, value in remaining.items()]
        line = " ".join([f"outsize {'tune' if tunes else 'run'}", shlex.quote(self.model), *words])
        return line if tunes else idle_next_step(idle, line)


@final
class TuneJob(Record):
    """Tunes MODEL on one random batch; tuning chooses what is None."""

    model: str
    input: str | None
    batch: int
    microbatches: int | None = None
    schedule: ScheduleName | None = None
    trials: int
    seed: int = 0
    as_json: bool = False


@final
class RunOutcome(Record):
    """The result of a run.

    It holds what was recorded of each step; the timeline of a typical late one, without the optimizer's
    seconds; where the devices' time went in it; and the predicted timeline.
    """

    plan: Plan
    graph: ModelGraph
    profile: Profile
    history: RecordedRun
    predicted: Timeline
    measured: Timeline
    used: Utilisation

    def document(self) -> dict[str, Any]:
        """Returns what --json gives: figures, and the plan; the lists have an entry for each step."""
        memory = [each.model_dump(mode="json") for each in self.history.memory]
        return {
            **_of_steps(self.history.steps),
            "samples_per_s": self.plan.batch_size / self.measured.duration_s,
            "measured": _figures(self.measured) | {"memory": memory} | self._used(),
            "predicted": _figures(self.predicted),
            "plan": self.plan.model_dump(mode="json"),
        }

    def _used(self) -> dict[str, Any]:
        """Returns transfers, the bound, and W210 if the devices idled."""
        used, idle = self.used, self.used.idle
        figures: dict[str, Any] = {"transfer": used.transfer, "bound_s": used.bound_s, "warning": None}
        if idle is not None:
            figures["warning"] = {"code": "W210", "text": idle_sentence(idle), **idle.model_dump(mode="json")}
        return figures


@final
class FinishedRun(Record):
    """The result of a run that had all its steps already: its plan, and the predicted timeline."""

    plan: Plan
    predicted: Timeline

    def document(self) -> dict[str, Any]:
        """Returns what --json gives, with the keys of RunOutcome; measured figures are null."""
        return {
            **_of_steps(()),
            "samples_per_s": None,
            "measured": None,
            "predicted": _figures(self.predicted),
            "plan": self.plan.model_dump(mode="json"),
        }


@final
class JobFolder(Record):
    """The folder with the files of one job."""

    path: Path

    @classmethod
    @contextmanager
    def temporary(cls) -> Iterator[Self]:
        """Yields a folder that exists as long as the block."""
        with private_folder("outsize-run-") as path:
            yield cls(path=path)

    @property
    def job(self) -> Path:
        """Returns the file that says what is to be done."""
        return self.path / "job.json"

    @property
    def outcome(self) -> Path:
        """Returns the file with the result; it exists only on the machine of rank 0."""
        return self.path / "outcome.json"

    @property
    def error(self) -> Path:
        """Returns the file with the error, as --json gives it, of a rank that raised one of outsize's."""
        return self.path / "error.json"


def _of_steps(steps: Sequence[RunStep]) -> dict[str, Any]:
    return {
        "step": [step.step for step in steps],
        "loss": [step.loss for step in steps],
        "steps_s": [step.step_s for step in steps],
        "learning_rate": [step.learning_rate for step in steps],
        "grad_norm": [step.grad_norm for step in steps],
        **_balance(steps),
    }


def _balance(steps: Sequence[RunStep]) -> dict[str, Any]:
    """Returns the imbalance of experts, where ranks divide them."""
    values = [step.expert_imbalance for step in steps]
    return {"expert_imbalance": values} if any(value is not None for value in values) else {}


def _figures(timeline: Timeline) -> dict[str, Any]:
    ranks = range(timeline.ranks)
    return {
        "step_s": timeline.duration_s,
        "bubble": timeline.bubble,
        "busy": [timeline.utilisation(rank) for rank in ranks],
        "peak_bytes": [timeline.peak_bytes(rank) for rank in ranks] if timeline.samples else [],
    }
