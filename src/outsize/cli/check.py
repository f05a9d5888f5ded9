"""`outsize check MODEL`: does the split run compute the very numbers of one process?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.screen import Screen
from outsize.cli.subject import Subject, batch_size, load_plan_to_run, make_subject

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.ir.plan import Plan
    from outsize.ir.verdict import Verdict

STAGES, SCHEDULE = 2, "1f1b"
DIFFERENT = 1

Steps = Annotated[int, typer.Option("--steps", min=1, help="AdamW steps that are compared.")]
Processes = Annotated[
    bool, typer.Option("--processes", help="One real process per stage instead of all stages in this one.")
]


def check(
    model: options.Model,
    input: options.Input = None,
    batch: options.Batch = None,
    stages: options.Stages = None,
    microbatches: options.Microbatches = None,
    schedule: options.Schedule = None,
    recompute: options.Recompute = None,
    bn: options.BatchNorm = None,
    plan: options.PlanFile = None,
    weights: options.Weights = None,
    steps: Steps = 1,
    processes: Processes = False,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Train MODEL split and plain, and compare loss, gradients, buffers and parameters bit by bit.

    Exits with 0 when all bits are equal and with 1 when any differs. Ranks of --processes that share a batch
    (dp) or a layer (tp) add up in another order: then loss and gradients count, put together from all ranks,
    within 1e-6 of a tensor's largest element (1e-10 in double precision).

    Without --plan: 2 stages, 4 microbatches (1 with --bn sync), 1f1b.
    """
    screen, chosen = Screen(json), load_plan_to_run(plan)
    asked = {"stages": stages, "microbatches": microbatches, "schedule": schedule}
    asked |= {"recompute": recompute, "bn": bn}
    options.refuse_beside(chosen, "--plan", **asked)
    with screen.working(f"building {model}"):
        samples = batch_size(batch, chosen)
        subject = make_subject(model, input, samples, meta=weights is not None, seed=seed)
    wishes = {"stages": STAGES, "schedule": SCHEDULE, **options.given(asked)}
    wishes |= {"steps": steps, "processes": processes, "seed": seed}
    verdict = _verdict(screen, subject, chosen, weights=weights, **wishes)
    _deliver(screen, verdict)
    if not verdict.holds:
        raise typer.Exit(DIFFERENT)


def _verdict(screen: Screen, subject: Subject, plan: Plan | None, **wishes: object) -> Verdict:
    from outsize import api

    with screen.working("comparing"):
        return api.check(*subject.call, **subject.loss, plan=plan, **wishes)  # pyright: ignore[reportArgumentType]


def _deliver(screen: Screen, verdict: Verdict) -> None:
    def tables() -> Iterable[RenderableType]:
        from outsize.report import tables

        yield tables.check_table(verdict)

    screen.result(verdict.model_dump(mode="json"), tables)
