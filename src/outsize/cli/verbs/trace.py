"""Implements `outsize trace MODEL`: a step as predicted and as it ran, in one file for ui.perfetto.dev."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.model_input import plan_or_request, write_text
from outsize.cli.processes.job import RunJob, RunOutcome
from outsize.cli.processes.launch import LaunchPlace, run_job
from outsize.cli.screen import Screen
from outsize.ir.answers.request import LayoutOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps to run; a typical late one is traced.")]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the trace to this file.")]


def trace(
    model: options.Model,
    input: options.Input = None,
    batch: options.Batch = None,
    plan: options.PlanFile = None,
    stages: options.Stages = None,
    microbatches: options.Microbatches = None,
    schedule: options.ScheduleOrFile = None,
    steps: Steps = 5,
    out: Out = Path("trace.json"),
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Trace a training step of MODEL, predicted and measured, for ui.perfetto.dev.

    The units are timed first, so that the prediction holds for this machine.

    Then MODEL trains for some steps, with one process per stage (2 without --stages or --plan).
    """
    screen = Screen(json)
    layout: LayoutOptions = {
        "stages": stages,
        "microbatches": microbatches,
        "schedule": options.schedule_or_file(schedule),
    }
    chosen, request = plan_or_request(plan, batch, layout)
    job = RunJob(
        model=model,
        input=input,
        request=request,
        steps=steps,
        seed=seed,
        plan=chosen,
        measure=True,
        watched=True,
        as_json=json,
    )
    outcome = run_job(job, LaunchPlace(), screen)
    if isinstance(outcome, RunOutcome):
        write_trace(out, outcome)
        _deliver(screen, job, outcome, out)


def write_trace(path: Path, outcome: RunOutcome) -> None:
    """Writes both timelines of the outcome as trace events. Raises BadOption when that fails."""
    from outsize.report.trace import perfetto

    write_text(path, json_text.dumps(perfetto(outcome.predicted, outcome.measured)) + "\n")


def outcome_tables(job: RunJob, outcome: RunOutcome) -> Iterable[RenderableType]:
    """Yields the tables that a run and a trace show."""
    from outsize.report.tables import plan_tables

    idle = outcome.used.idle
    command = None if idle is None else job.command(outcome.plan.axes.pp, idle)
    yield plan_tables.run_table(outcome.plan, outcome.measured, outcome.history, outcome.used, command)


def _deliver(screen: Screen, job: RunJob, outcome: RunOutcome, out: Path) -> None:
    def tables() -> Iterable[RenderableType]:
        return outcome_tables(job, outcome)

    screen.result({"trace": str(out), **outcome.document()}, tables)
    screen.note(f"{out}: open it in https://ui.perfetto.dev")
