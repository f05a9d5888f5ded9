"""Implements `outsize check MODEL`: does the split run compute the very numbers of one process?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.model_input import ModelInput, batch_size, load_plan_to_run, make_model_input
from outsize.cli.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.api.options import CheckOptions
    from outsize.ir.answers.request import LayoutOptions
    from outsize.ir.answers.verdict import Verdict

DIFFERENT = 1

Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        min=1,
        help="AdamW steps that are compared: 1, or 3 where the model keeps state from call to call.",
    ),
]
Processes = Annotated[
    bool, typer.Option("--processes", help="One real process per stage instead of all stages in this one.")
]


def check(
    model: options.Model,
    input: options.Input = None,
    batch: options.Batch = None,
    stages: options.Stages = None,
    microbatches: options.Microbatches = None,
    schedule: options.ScheduleByName = None,
    recompute: options.Recompute = None,
    bn: options.BatchNorm = None,
    plan: options.PlanFile = None,
    weights: options.WeightFiles = None,
    steps: Steps = None,
    processes: Processes = False,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Train MODEL split and plain, and compare loss, gradients, buffers and parameters bit by bit.

    Exits with 0 when all bits are equal and with 1 when any differs. With --processes, ranks that share a
    batch (dp) or a layer (tp) add up in another order: then loss and gradients, gathered from all ranks, have
    to agree within 1e-6 of a tensor's largest element (1e-10 in double precision).

    A second batch, the samples in another order, is compared as well. Without --plan: 2 stages, 4
    microbatches (1 with --bn sync), 1f1b. A trainer of transformers or TRL is checked in its script:
    outsize.check(trainer=trainer).
    """
    screen, chosen = Screen(json), load_plan_to_run(plan)
    asked: LayoutOptions = {
        "stages": stages,
        "microbatches": microbatches,
        "schedule": schedule,
        "recompute": recompute,
        "bn": bn,
    }
    options.check_not_planned(chosen, "--plan", asked)
    wanted: CheckOptions = {
        "plan": chosen,
        "stages": stages,
        "microbatches": microbatches,
        "schedule": schedule,
        "recompute": recompute,
        "bn": bn,
        "weight_files": weights,
        "steps": steps,
        "processes": processes,
        "seed": seed,
    }
    with screen.working(f"building {model}"):
        samples = batch_size(batch, chosen)
        inputs = make_model_input(model, input, samples, meta=weights is not None, seed=seed)
    verdict = _verdict(screen, inputs, wanted)
    _deliver(screen, verdict)
    if not verdict.holds:
        raise typer.Exit(DIFFERENT)


def _verdict(screen: Screen, inputs: ModelInput, wanted: CheckOptions) -> Verdict:
    from outsize import api

    both: CheckOptions = {**wanted, **inputs.loss}
    with screen.working("comparing"):
        return api.check(*inputs.call, **both)


def _deliver(screen: Screen, verdict: Verdict) -> None:
    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables import plan_tables

        yield plan_tables.check_table(verdict)

    screen.result(verdict.model_dump(mode="json"), tables)
