"""Implements `outsize check MODEL`: does the split run compute the very numbers of one process?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outsize.cli import options
from outsize.cli.model_input import ModelInput, batch_size, load_plan_to_run, make_model_input
from outsize.cli.processes.trainer_check import CheckedProgram
from outsize.cli.screen import Screen
from outsize.errors import BadOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.api.options import CheckOptions
    from outsize.ir.answers.request import LayoutOptions
    from outsize.ir.answers.verdict import Verdict

DIFFERENT = 1
UPDATES = 2

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
Trainer = Annotated[
    str | None,
    typer.Option(
        "--trainer",
        metavar="PROGRAM",
        help="In place of MODEL: a program with a Trainer of transformers, TRL or your own: "
        '"train.py --lr 1e-4".',
    ),
]
_OF_MODELS: Final = ("model", "input", "batch", "weights", "seed")


def check(
    ctx: typer.Context,
    model: options.OptionalModel = None,
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
    trainer: Trainer = None,
    json: options.Json = False,
) -> None:
    """Train MODEL split and plain, and compare loss, gradients, buffers and parameters bit by bit.

    Exits with 0 when all bits are equal and with 1 when any differs. With --processes, ranks that share a
    batch (dp) or a layer (tp) add up in another order: then loss and gradients, gathered from all ranks, have
    to agree within 1e-6 of a tensor's largest element (1e-10 in double precision).

    A second batch, the samples in another order, is compared as well. Without --plan: 2 stages, 4
    microbatches (1 with --bn sync), 1f1b.

    With --trainer the program runs up to its first trainer.train(), once plain and once split, and two
    updates (--steps) of both are compared: the first logged number, gradient or weight that differs is named.
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
    if trainer is not None:
        _refuse_for_programs(ctx)
        program = CheckedProgram.of(trainer, asked, plan, steps or UPDATES, over_processes=processes)
        _tell(screen, program.verdict(screen))
        return
    if model is None:
        raise BadOption(
            "there is no MODEL to check",
            next_step='outsize check torchvision:resnet50, or outsize check --trainer "train.py ARGS"',
        )
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
    if model.endswith(".py"):
        raise BadOption(
            f"{model} is a program, and no MODEL", next_step=f'outsize check --trainer "{model} ARGS"'
        )
    with screen.working(f"building {model}"):
        samples = batch_size(batch, chosen)
        inputs = make_model_input(model, input, samples, meta=weights is not None, seed=seed)
    _tell(screen, _verdict(screen, inputs, wanted))


def _refuse_for_programs(ctx: typer.Context) -> None:
    """Raises BadOption for what a program says itself."""
    sources = {name: ctx.get_parameter_source(name) for name in _OF_MODELS}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        name = "MODEL" if given[0] == "model" else f"--{given[0]}"
        raise BadOption(
            f"{name} cannot be used together with --trainer, whose program has its model and its batches",
            next_step=f"leave out {name}",
        )


def _tell(screen: Screen, verdict: Verdict) -> None:
    """Delivers a verdict, and exits with 1 where bits differ."""
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
