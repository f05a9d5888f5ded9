"""What the command line hands to the processes of a run, and what rank 0 hands back; both are files.

launcher   folder/job.json      ->  each process (cli/worker.py)
launcher  <-  folder/outcome.json   from rank 0, or folder/error.json from a rank that could not
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

from pydantic import Field

from outsize.ir.base import Record
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan, ScheduleName
from outsize.ir.timeline import Timeline
from outsize.ir.utilisation import Idle, Utilisation


@final
class Job(Record):
    """Train MODEL for some AdamW steps on one random batch; what is None is planned for.

    `actions` are the rows of a schedule of the user's own.
    """

    model: str
    input: str | None
    batch: int
    steps: int
    lr: float = 1e-3
    seed: int = 0
    plan: Plan | None = None
    weights: Path | None = None
    stages: int | None = None
    devices: tuple[str, ...] = ()  # of one process
    microbatches: int | None = None
    schedule: ScheduleName | None = None
    actions: tuple[str, ...] = ()
    measure: bool = False
    watch_memory: bool = False
    as_json: bool = False

    def command(self, stages: int, idle: Idle) -> str:
        """What to type for this run of so many stages, but with the remedy's options."""
        tunes = idle.cause == "uneven-stages"
        places = "nproc" if tunes else "stages"
        given = {"input": self.input, "batch": str(self.batch), places: str(stages)}
        given |= {"devices": ",".join(self.devices)} if self.devices and not tunes else {}
        kept = {name: value for name, value in given.items() if value and name not in dict(idle.change)}
        words = [f"--{name} {shlex.quote(value)}" for name, value in kept.items()]
        line = " ".join([f"outsize {'tune' if tunes else 'run'}", shlex.quote(self.model), *words])
        return line if tunes else idle.next_step(line)


@final
class TuneJob(Record):
    """Tune MODEL on one random batch; what is None is free."""

    model: str
    input: str | None
    batch: int
    microbatches: int | None = None
    schedule: ScheduleName | None = None
    trials: int
    seed: int = 0
    as_json: bool = False


@final
class Outcome(Record):
    """The run of a job.

    Loss and seconds of each step, the optimizer's included; the timeline of a typical late step, without
    the optimizer's, where the devices' time went in it, and the predicted timeline.
    """

    plan: Plan
    graph: ModelGraph
    losses: tuple[float, ...] = Field(min_length=1)
    steps_s: tuple[float, ...] = Field(min_length=1)
    predicted: Timeline
    measured: Timeline
    used: Utilisation

    def document(self) -> dict[str, Any]:
        """What --json gives: figures, and the plan."""
        return {
            "loss": list(self.losses),
            "steps_s": list(self.steps_s),
            "samples_per_s": self.plan.batch_size / self.measured.duration_s,
            "measured": _figures(self.measured) | self._used(),
            "predicted": _figures(self.predicted),
            "plan": self.plan.model_dump(mode="json"),
        }

    def _used(self) -> dict[str, Any]:
        """Transfers, the bound, and W210 if the devices idled."""
        used, idle = self.used, self.used.idle
        warned = (
            None if idle is None else {"code": "W210", "text": idle.sentence, **idle.model_dump(mode="json")}
        )
        return {"transfer": used.transfer, "bound_s": used.bound_s, "warning": warned}


@final
class Folder(Record):
    """The files of one job."""

    path: Path

    @classmethod
    @contextmanager
    def temporary(cls) -> Iterator[Self]:
        """A folder that lives as long as the block."""
        with tempfile.TemporaryDirectory(prefix="outsize-run-") as path:
            yield cls(path=Path(path))

    @property
    def job(self) -> Path:
        """What is to be done."""
        return self.path / "job.json"

    @property
    def outcome(self) -> Path:
        """What came of it; only on the machine of rank 0."""
        return self.path / "outcome.json"

    @property
    def error(self) -> Path:
        """The error, as --json gives it, of a rank that raised one of ours."""
        return self.path / "error.json"


def _figures(timeline: Timeline) -> dict[str, Any]:
    return {
        "step_s": timeline.duration_s,
        "bubble": timeline.bubble,
        "busy": [timeline.utilisation(rank) for rank in range(timeline.ranks)],
    }
