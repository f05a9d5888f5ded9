"""Implements `outsize explain-plan FILE`: why the plan is as it is; with MODEL it is priced again, with
advice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import typer

from outsize.cli import options
from outsize.cli.model_input import load_plan, make_model_input
from outsize.cli.screen import Screen
from outsize.errors import BadPlan

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.ir.answers.advice import Advice
    from outsize.ir.answers.utilisation import StepSeconds
    from outsize.ir.findings import Foresight
    from outsize.ir.plan import Plan

File = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="Predict the plan again for this model, and add advice.", show_default=False
    ),
]


def explain_plan(
    plan: File,
    model: Model = None,
    input: options.Input = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Say why a plan is as it is, where its seconds go, what else there was, and what would be faster."""
    from outsize.planner.advice.step_seconds import coarse_seconds

    screen, chosen = Screen(json), load_plan(plan)
    assert chosen is not None
    if model is None:
        _insist_on_figures(chosen, plan)
        explained = _Explained(chosen, seconds=coarse_seconds(chosen))
    else:
        with screen.working(f"pricing for {model}"):
            explained = _priced(chosen, model, input, seed)
    _deliver(screen, explained)


@final
@dataclass(frozen=True)
class _Explained:
    """Holds a plan, and what is said about it."""

    plan: Plan
    advice: tuple[Advice, ...] = ()
    seconds: StepSeconds | None = None
    foresight: Foresight | None = None


def _insist_on_figures(plan: Plan, file: Path) -> None:
    """Raises BadPlan when an edited file has figures of other stages than its own."""
    if plan.expected is not None and len(plan.expected.stages) != len(plan.stages):
        raise BadPlan(
            f"the figures in {file} are of other stages",
            numbers=f"{len(plan.stages)} stages, figures of {len(plan.expected.stages)}",
            next_step=f"outsize explain-plan {file} MODEL, which predicts it again",
        )


def _priced(plan: Plan, model: str, shape: str | None, seed: int) -> _Explained:
    """Returns the plan priced for this model; reasons against other plans stay, those of the cuts are new."""
    from outsize import api
    from outsize.ir.findings import REJECTIONS, NoPipelineFits

    inputs = make_model_input(model, shape, plan.batch_size, meta=True, seed=seed)
    current = api.outlook(*inputs.call, **inputs.loss, plan=plan)
    others = tuple(reason for reason in plan.why if isinstance(reason, (*REJECTIONS, NoPipelineFits)))
    priced = current.plan.model_copy(update={"why": (*current.plan.why, *others)})
    return _Explained(priced, current.advice, current.seconds, current.foresight)


def _deliver(screen: Screen, explained: _Explained) -> None:
    from outsize.planner.advice.file_rules import levers
    from outsize.report.wording import document as worded
    from outsize.report.wording import sentence

    plan, seconds, sure = explained.plan, explained.seconds, explained.foresight
    gains = levers(plan)

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables.explain_plan import why_table

        yield why_table(plan, gains, explained.advice, seconds, sure)

    document = {
        "plan": plan.model_dump(mode="json"),
        "levers": list(map(worded, gains)),
        "advice": list(map(worded, explained.advice)),
        "seconds": None if seconds is None else seconds.model_dump(mode="json"),
        "foresight": None if sure is None else {**sure.model_dump(mode="json"), "sentence": sentence(sure)},
    }
    screen.result(document, tables)
