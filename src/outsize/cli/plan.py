"""`outsize plan MODEL`: the fastest split that fits, or (--check) the price of a plan edited by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options, uncollected
from outsize.cli.screen import Screen
from outsize.cli.subject import (
    Subject,
    batch_size,
    load_plan,
    load_profile,
    make_subject,
    with_weights,
    write_text,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.planner.outlook import Outlook

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
Styles = Annotated[
    bool, typer.Option("--styles", help="List how --tp divides each module with weights, and why.")
]
Meta = Annotated[
    bool,
    typer.Option(
        "--meta", help="Never build weights: they are only for --measure and for models that run by modules."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="Write a page: memory, timeline, cuts, other choices."),
]


@uncollected()
def plan(
    model: options.Model,
    input: options.Input = None,
    batch: options.Batch = None,
    cluster: options.Cluster = "local",
    microbatches: options.Microbatches = None,
    stages: options.Stages = None,
    schedule: options.AnySchedule = None,
    optimizer: options.Optimizer = "adamw",
    precision: options.Precision = options.PrecisionOption.fp32,
    recompute: options.Recompute = None,
    bn: options.BatchNorm = None,
    axes: options.Space = None,
    dp_replicate: options.Replicas = None,
    dp_shard: options.Shards = None,
    tp: options.Tensor = None,
    sequence_parallel: options.Sequence = None,
    weights: options.Where = None,
    what_if: options.WhatIf = False,
    measure: options.Measure = False,
    profile: Profile = None,
    out: Out = None,
    check: Check = None,
    units: Units = False,
    styles: Styles = False,
    report: Report = None,
    meta: Meta = False,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Split MODEL over the devices: stages, memory, busy time, bubble, and why."""
    screen, edited = Screen(json), load_plan(check)
    order = options.any_schedule(schedule)
    asked = {"stages": stages, "microbatches": microbatches, "schedule": order}
    asked |= {"recompute": recompute, "bn": bn, "weights": weights, "what_if": what_if or None, "axes": axes}
    asked |= {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}
    asked |= {"sequence_parallel": sequence_parallel}
    options.refuse_beside(edited, "--check", **asked)
    measured = load_profile(profile) or measure
    with screen.working(f"building {model}"):
        size = batch_size(batch, edited)
        subject = make_subject(model, input, size, meta=meta or not measure, seed=seed)
    if styles:
        _list_styles(screen, subject, tp or 1)
        return
    if units:
        _list_units(screen, subject, cluster, bool(measure))
        return
    wishes = {"cluster": cluster, "optimizer": optimizer, **options.given(asked)}
    wishes |= {"precision": precision.value}
    wishes = wishes if edited is None else {"plan": edited}
    wishes |= {"measured": measured, "curves": report is not None}
    seen = _seen(screen, subject, **wishes)
    if seen.plan.form == "modules" and not (meta or measure):
        with screen.working("building the weights of a model that runs by modules"):
            built = with_weights(model, input, size, seed, seen.graph.parameter_bytes)
        seen = seen if built is None else _seen(screen, built, **wishes)
    _deliver(screen, seen, out)
    if report is not None:
        _write_report(report, seen)


def _seen(screen: Screen, subject: Subject, **wishes: object) -> Outlook:
    from outsize import api

    with screen.working("planning"):
        return api.outlook(*subject.call, **subject.loss, **wishes)  # pyright: ignore[reportArgumentType]


def _list_styles(screen: Screen, subject: Subject, tp: int) -> None:
    from outsize.train.tensor_parallel import tensor_styles

    with screen.working("capturing"):
        found = tensor_styles(*subject.call, **subject.loss, ways=tp)

    def tables() -> Iterable[RenderableType]:
        from outsize.report import tables

        yield tables.styles_table(found)

    screen.result(found.model_dump(mode="json"), tables)


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


def _deliver(screen: Screen, seen: Outlook, out: Path | None) -> None:
    """Show the plan and write it. Under --json the document is the plan file itself."""
    if out is not None:
        write_text(out, seen.plan.to_json() + "\n")

    def tables() -> Iterable[RenderableType]:
        from outsize.report import tables

        yield tables.plan_table(seen.plan, seen.graph, seen.advice)

    screen.result(seen.plan.model_dump(mode="json"), tables)


def _write_report(path: Path, seen: Outlook) -> None:
    from outsize.report import html

    page = html.render(
        plan=seen.plan,
        graph=seen.graph,
        profile=seen.profile,
        predicted=seen.timeline,
        advice=seen.advice,
        curves=seen.curves,
    )
    write_text(path, page)
