"""Implements `outsize tune MODEL --nproc 2`: the fastest plan on this machine, by a few real steps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.model_input import batch_size, write_text
from outsize.cli.processes.job import TuneJob
from outsize.cli.processes.launch import LaunchPlace, run_worker
from outsize.cli.screen import Screen
from outsize.ir.answers.tuned import Tuned

if TYPE_CHECKING:
    from rich.console import RenderableType

Nproc = Annotated[int, typer.Option("--nproc", min=2, help="Processes, one for each stage or device.")]
Trials = Annotated[int, typer.Option("--trials", min=1, help="Most real steps after the profile.")]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the fastest plan to this file.")]


def tune(
    model: options.Model,
    nproc: Nproc = 2,
    input: options.Input = None,
    batch: options.Batch = None,
    microbatches: options.Microbatches = None,
    schedule: options.ScheduleByName = None,
    trials: Trials = 5,
    out: Out = Path("plan.json"),
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Find the fastest split of MODEL on this machine by a few real steps.

    It times the units, then runs one step of the plan that is predicted to be fastest.

    The measured stage times correct the prediction, until no other plan is predicted to be 2 % faster.
    """
    screen = Screen(json)
    job = TuneJob(
        model=model,
        input=input,
        batch=batch_size(batch, None),
        microbatches=microbatches,
        schedule=schedule,
        trials=trials,
        seed=seed,
        as_json=json,
    )
    text = run_worker("tune_worker", job, nproc, LaunchPlace(), screen, shown_as=f"outsize tune {model}")
    if text is not None:
        _deliver(screen, Tuned.model_validate_json(text), out)


def _deliver(screen: Screen, tuned: Tuned, out: Path) -> None:
    write_text(out, tuned.plan.to_json() + "\n")

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables.measured import tuned_table

        yield tuned_table(tuned)

    screen.result({"out": str(out), **tuned.document()}, tables)
    screen.note(f"{out}: outsize run MODEL --plan {out}")
