"""`outsize plan MODEL`: the fastest split that fits, or (--check) the price of a plan edited by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.screen import Screen
from outsize.cli.subject import Subject, batch_size, load_plan, load_profile, make_subject, write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.ir.plan import Plan
    from outsize.ir.profile import ProfileSet

Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the plan here; it can be edited by hand.")
]
Check = Annotated[
    Path | None, typer.Option("--check", metavar="FILE", help="Price this plan as it is; cuts are not moved.")
]
Profile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Unit times of outsize measure --out FILE."),
]
Units = Annotated[bool, typer.Option("--units", help="List the model's units, the names a plan is made of.")]
Meta = Annotated[bool, typer.Option("--meta", help="Build the model without weights.")]


def plan(
    model: options.Model,
    input: options.Input = None,
    batch: options.Batch = None,
    cluster: options.Cluster = "local",
    microbatches: options.Microbatches = None,
    stages: options.Stages = None,
    schedule: options.Schedule = None,
    optimizer: options.Optimizer = "adamw",
    recompute: options.Recompute = None,
    bn: options.BatchNorm = None,
    measure: options.Measure = False,
    profile: Profile = None,
    out: Out = None,
    check: Check = None,
    units: Units = False,
    meta: Meta = False,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Split MODEL over the devices: stages, memory, busy time, bubble, and why."""
    screen, edited = Screen(json), load_plan(check)
    asked = {"stages": stages, "microbatches": microbatches, "schedule": schedule}
    asked |= {"recompute": recompute, "bn": bn}
    options.refuse_beside(edited, "--check", **asked)
    measured = load_profile(profile) or measure
    with screen.working(f"building {model}"):
        subject = make_subject(model, input, batch_size(batch, edited), meta=meta, seed=seed)
    if units:
        _list_units(screen, subject, cluster, measure)
    elif edited is not None:
        _deliver(screen, _priced(screen, subject, edited, measured), out)
    else:
        wishes = {"cluster": cluster, "optimizer": optimizer, "measured": measured, **options.given(asked)}
        _deliver(screen, _made(screen, subject, **wishes), out)


def _made(screen: Screen, subject: Subject, **wishes: object) -> Plan:
    from outsize import api

    with screen.working("planning"):
        return api.plan(*subject.call, **subject.loss, **wishes)  # pyright: ignore[reportArgumentType]


def _priced(screen: Screen, subject: Subject, edited: Plan, measured: bool | ProfileSet) -> Plan:
    from outsize import api

    with screen.working("pricing"):
        return api.price(edited, *subject.call, **subject.loss, measured=measured)[0]


def _list_units(screen: Screen, subject: Subject, cluster: str, measured: bool) -> None:
    from outsize import api

    with screen.working("capturing"):
        graph = api.capture(*subject.call, **subject.loss)
    with screen.bar("measuring") as progress:
        profile = (
            api.measure(*subject.call, **subject.loss, progress=progress).profiles[0]
            if measured and graph.form == "tape"
            else api.estimate(graph, cluster)
        )

    def tables() -> Iterable[RenderableType]:
        from outsize.report import tables

        yield tables.units_table(graph, profile)

    units = [unit.model_dump(mode="json") for unit in graph.units]
    costs = [cost.model_dump(mode="json") for cost in profile.units]
    screen.result({"model": graph.model, "units": units, "costs": costs}, tables)


def _deliver(screen: Screen, made: Plan, out: Path | None) -> None:
    """Show the plan and write it. Under --json the document is the plan file itself."""
    if out is not None:
        write_text(out, made.to_json() + "\n")

    def tables() -> Iterable[RenderableType]:
        from outsize.report import tables

        yield tables.plan_table(made)

    screen.result(made.model_dump(mode="json"), tables)
