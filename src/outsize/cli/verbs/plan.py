"""Implements `outsize plan MODEL`: the fastest split that fits, or (--check) the price of a plan edited by
hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import model_input, options, uncollected
from outsize.cli.flags import with_records
from outsize.cli.model_input import (
    ModelInput,
    batch_size,
    load_plan,
    load_profile,
    make_model_input,
    with_weights,
    write_text,
)
from outsize.cli.screen import Screen
from outsize.ir.plan import Axes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.api.options import OutlookOptions
    from outsize.api.records import Request
    from outsize.planner.advice.overview import Outlook

Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the plan here; it can be edited by hand.")
]
Check = Annotated[
    Path | None,
    typer.Option("--check", metavar="FILE", help="Predict this plan as it is, without moving its cuts."),
]
Profile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="Use the times of outsize measure --out FILE."),
]
Units = Annotated[bool, typer.Option("--units", help="List the model's units, whose names plans use.")]
Styles = Annotated[
    bool, typer.Option("--styles", help="List how tp divides each module with weights, and why.")
]
Meta = Annotated[
    bool,
    typer.Option(
        "--meta",
        help="Never build weights; they are needed only for --measure and for models that run by modules.",
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE", help="Write an HTML page: memory, timeline, cuts, other choices."
    ),
]


@with_records
@uncollected()
def plan(
    model: options.Model,
    input: options.Input = None,
    batch: options.Batch = None,
    cluster: options.Cluster = "local",
    microbatches: options.Microbatches = None,
    stages: options.Stages = None,
    chunks: options.Chunks = None,
    schedule: options.ScheduleOrFile = None,
    optimizer: options.Optimizer = "adamw",
    precision: options.Precision = "fp32",
    recompute: options.Recompute = None,
    kernels: options.Kernels = None,
    bn: options.BatchNorm = None,
    mesh: options.MeshFlags = options.NO_MESH,
    sequence_parallel: options.SequenceParallel = None,
    loss_pieces: options.LossPieces = None,
    module_pieces: options.ModulePieces = None,
    slices: options.Slices = None,
    weights: options.WeightPlace = None,
    inference: options.Inference = False,
    loop: options.Loop = False,
    lora: options.LoraOption = options.NO_LORA,
    lora_rank: options.LoraRank = None,
    lora_targets: options.LoraTargets = None,
    quantize: options.QuantizeOption = options.NO_QUANTIZE,
    objective: options.ObjectiveOption = "time",
    time_limit: options.TimeLimit = None,
    recordings: options.Recordings = None,
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
    """Split MODEL over the devices; show stages, memory, busy time, bubble, and the reasons."""
    from outsize.api.records import Request
    from outsize.capture.models.lazy_imports import stand_in

    screen, edited = Screen(json), load_plan(check)
    asked = Request(
        microbatches=microbatches,
        stages=stages,
        chunks=chunks,
        schedule=options.schedule_or_file(schedule),
        recompute=recompute,
        kernels=kernels,
        bn=bn,
        axes=mesh.asked,
        sequence_parallel=sequence_parallel,
        loss_pieces=loss_pieces,
        module_pieces=module_pieces,
        slices=slices,
        weights=weights,
        objective=None if objective == "time" else objective,
    )
    options.check_not_planned(edited, "--check", {**mesh.sizes, **asked.given(), "time_limit": time_limit})
    asked = replace(
        asked,
        inference=inference or None,
        loop=loop or None,
        lora=options.lora_asked(lora, lora_rank, lora_targets),
        quantize=options.quantize_asked(quantize),
        time_limit_s=time_limit,
        recordings=model_input.recordings(recordings),
    )
    wanted: OutlookOptions = {
        "optimizer": optimizer,
        "precision": precision,
        "cluster": cluster,
        "plan": edited,
        "measured": load_profile(profile) or measure,
        "exact": mesh.exact,
        "curves": report is not None,
    }
    if not measure:
        stand_in(model.partition(":")[0])
    with screen.working(f"building {model}"):
        size = batch_size(batch, edited)
        inputs = make_model_input(model, input, size, meta=meta or not measure, seed=seed)
    if styles or units:
        adapted = inputs.adapted(asked)
        if styles:
            _list_styles(screen, adapted, Axes(**mesh.sizes).product_parts)
        else:
            _list_units(screen, adapted, cluster, bool(measure))
        return
    seen = _outlook(screen, inputs, asked, wanted)
    if seen.plan.form == "modules" and not (meta or measure):
        with screen.working("building the weights of a model that runs by modules"):
            built = with_weights(model, input, size, seed, seen.graph.parameter_bytes)
        seen = seen if built is None else _outlook(screen, built, asked, wanted)
    _deliver(screen, seen, out)
    if report is not None:
        _write_report(report, seen)


def _outlook(screen: Screen, inputs: ModelInput, asked: Request, wanted: OutlookOptions) -> Outlook:
    """Returns the plan with what is shown of it; the best one so far is told while it is searched."""
    from outsize import api
    from outsize.report.wording import incumbent_text

    with screen.working("planning") as tell:
        request = replace(asked, on_better=lambda found: tell(incumbent_text(found)))
        told: OutlookOptions = {"request": request, **wanted, **inputs.loss}
        return api.outlook(*inputs.call, **told)


def _list_styles(screen: Screen, inputs: ModelInput, tp: int) -> None:
    from outsize.train.tensor_parallel import tensor_styles

    with screen.working("capturing"):
        styles = tensor_styles(*inputs.call, **inputs.loss, degree=tp)

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables import plan_tables

        yield plan_tables.styles_table(styles)

    screen.result(styles.model_dump(mode="json"), tables)


def _list_units(screen: Screen, inputs: ModelInput, cluster: str, measured: bool) -> None:
    from outsize import api

    with screen.working("capturing"):
        graph = api.capture(*inputs.call, **inputs.loss)
    with screen.bar("measuring") as progress:
        profile = (
            api.measure(*inputs.call, **inputs.loss, progress=progress).profiles[0]
            if measured and graph.form == "tape"
            else api.estimate(graph, cluster)
        )

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables import plan_tables

        yield plan_tables.units_table(graph, profile)

    units = [unit.model_dump(mode="json") for unit in graph.units]
    costs = [cost.model_dump(mode="json") for cost in profile.units]
    screen.result({"model": graph.model, "units": units, "costs": costs}, tables)


def _deliver(screen: Screen, seen: Outlook, out: Path | None) -> None:
    """Shows the plan and writes it. Under --json the document is the plan file itself."""
    if out is not None:
        write_text(out, seen.plan.to_json() + "\n")

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables import plan_tables

        yield plan_tables.plan_table(seen.plan, seen.graph, seen.advice, seen.foresight)

    screen.result(seen.plan.model_dump(mode="json"), tables)


def _write_report(path: Path, seen: Outlook) -> None:
    from outsize.report.html.page import PageFacts, render

    page = render(
        PageFacts(
            plan=seen.plan,
            graph=seen.graph,
            profile=seen.profile,
            predicted=seen.timeline,
            advice=seen.advice,
            curves=seen.curves,
            seconds=seen.seconds,
            foresight=seen.foresight,
        )
    )
    write_text(path, page)
