"""`outsize trace MODEL`: a step as predicted and as it ran, in one file for ui.perfetto.dev."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.job import Job, Outcome
from outsize.cli.launching import Place, run_job
from outsize.cli.screen import Screen
from outsize.cli.subject import batch_size, load_plan_to_run, write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps to run; a typical late one is traced.")]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the trace goes.")]


def trace(
    model: options.Model,
    input: options.Input = None,
    batch: options.Batch = None,
    plan: options.PlanFile = None,
    stages: options.Stages = None,
    microbatches: options.Microbatches = None,
    schedule: options.AnySchedule = None,
    steps: Steps = 5,
    out: Out = Path("trace.json"),
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Trace a training step of MODEL, predicted and measured, for ui.perfetto.dev.

    The units are timed first, so that the prediction is of this machine.

    Then MODEL trains for some steps, one process per stage (2 without --stages or --plan).
    """
    screen, chosen = Screen(json), load_plan_to_run(plan)
    options.refuse_beside(chosen, "--plan", stages=stages, microbatches=microbatches, schedule=schedule)
    job = Job(
        model=model,
        input=input,
        batch=batch_size(batch, chosen),
        steps=steps,
        seed=seed,
        plan=chosen,
        **options.ordered(schedule, stages, microbatches),
        measure=True,
        watch_memory=True,
        as_json=json,
    )
    outcome = run_job(job, Place(), screen)
    if outcome is not None:
        write_trace(out, outcome)
        _deliver(screen, job, outcome, out)


def write_trace(path: Path, outcome: Outcome) -> None:
    """Both timelines of the outcome as trace events. Raises BadOption when the file cannot be written."""
    from outsize.planner.memory_counter import with_memory
    from outsize.report.trace import perfetto

    expected = outcome.plan.expected
    predicted = outcome.predicted if expected is None else with_memory(outcome.predicted, expected)
    write_text(path, json_text.dumps(perfetto(predicted, outcome.measured)) + "\n")


def outcome_tables(job: Job, outcome: Outcome) -> Iterable[RenderableType]:
    """What a run and a trace show."""
    from outsize.report import tables

    idle = outcome.used.idle
    command = None if idle is None else job.command(outcome.plan.axes.pp, idle)
    yield tables.run_table(outcome.plan, outcome.measured, outcome.losses, outcome.used, command)


def _deliver(screen: Screen, job: Job, outcome: Outcome, out: Path) -> None:
    def tables() -> Iterable[RenderableType]:
        return outcome_tables(job, outcome)

    screen.result({"trace": str(out), **outcome.document()}, tables)
    screen.note(f"{out}: open it in https://ui.perfetto.dev")
