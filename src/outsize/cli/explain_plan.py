"""`outsize explain-plan FILE`: why the plan is as it is; with MODEL, priced anew and with advice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.screen import Screen
from outsize.cli.subject import load_plan, make_subject
from outsize.errors import BadPlan

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.ir.advice import Advice
    from outsize.ir.plan import Plan

File = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="Price the plan anew for this model, and advise.", show_default=False
    ),
]


def explain_plan(
    plan: File,
    model: Model = None,
    input: options.Input = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Say why a plan is as it is, what else there was, and what would make it faster."""
    screen, chosen = Screen(json), load_plan(plan)
    assert chosen is not None
    advice: tuple[Advice, ...] = ()
    if model is None:
        _insist_on_figures(chosen, plan)
    else:
        with screen.working(f"pricing for {model}"):
            chosen, advice = _priced(chosen, model, input, seed)
    _deliver(screen, chosen, advice)


def _insist_on_figures(plan: Plan, file: Path) -> None:
    """Raise BadPlan when an edited file has figures of other stages than its own."""
    if plan.expected is not None and len(plan.expected.stages) != len(plan.stages):
        raise BadPlan(
            f"the figures in {file} are of other stages",
            numbers=f"{len(plan.stages)} stages, figures of {len(plan.expected.stages)}",
            next_step=f"outsize explain-plan {file} MODEL prices it anew",
        )


def _priced(plan: Plan, model: str, shape: str | None, seed: int) -> tuple[Plan, tuple[Advice, ...]]:
    """The plan as this model makes it; reasons against other plans stay, those of the cuts are new."""
    from outsize import api

    subject = make_subject(model, shape, plan.batch_size, meta=True, seed=seed)
    seen = api.outlook(*subject.call, **subject.loss, plan=plan)
    rejected = tuple(why for why in plan.why if why.startswith(("not ", "no pipeline ")))
    return seen.plan.model_copy(update={"why": (*seen.plan.why, *rejected)}), seen.advice


def _deliver(screen: Screen, plan: Plan, advice: tuple[Advice, ...]) -> None:
    from outsize.planner.levers import levers

    found = levers(plan)

    def tables() -> Iterable[RenderableType]:
        from outsize.report import why

        yield why.why_table(plan, found, advice)

    document = {
        "plan": plan.model_dump(mode="json"),
        "levers": [lever.model_dump(mode="json") for lever in found],
        "advice": [a.model_dump(mode="json") for a in advice],
    }
    screen.result(document, tables)
