"""Renders the report of a run as one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from outsize.axes.registry import LISTED, axes_typed
from outsize.errors import visible_lines
from outsize.files.replace import replace_text
from outsize.ir.answers.advice import Advice
from outsize.ir.answers.curve import ThroughputCurve
from outsize.ir.answers.runs.recorded_run import RecordedRun
from outsize.ir.answers.utilisation import StepSeconds
from outsize.ir.answers.verdict import Verdict
from outsize.ir.findings import Foresight
from outsize.ir.formatting import bytes_text, count_text, percent_text, rate_text, seconds_text
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Expected, Plan
from outsize.ir.profile import Profile
from outsize.ir.schedule import CUSTOM_NAME, Action
from outsize.ir.timeline import Timeline
from outsize.report.html.curves import curve_svg
from outsize.report.html.figures import (
    limit_drawn,
    memory_svg,
    several_stages,
    sure_bytes,
    sure_text,
    timeline_svg,
)
from outsize.report.html.network import network_svg
from outsize.report.html.step_chart import StepChart, smoothed, smoothing_steps, step_svg
from outsize.report.palette import BACKWARD, CAUSES, FORWARD, WEIGHT
from outsize.report.tables.explain_plan import constants, seconds_rows, seconds_title
from outsize.report.tables.offload import TITLE, degree_rows
from outsize.report.tables.placement import (
    DeviceMemory,
    device_memory,
    device_text,
    holdings,
    lanes,
    recompute_text,
    recompute_varies,
)
from outsize.report.tables.plan_tables import (
    SOURCES,
    causes,
    check_notes,
    difference_text,
    differences,
    how_text,
    loss_text,
    measured_causes,
    optimum_text,
    unsupported_text,
    way_text,
)
from outsize.report.tables.stage_units import short_units
from outsize.report.wording import advised, sentence, sentences

TEMPLATES = Path(__file__).parent / "templates"


@final
@dataclass(frozen=True, slots=True)
class Tile:
    """A headline figure and what to compare it with."""

    name: str
    value: str
    note: str = ""


@final
@dataclass(frozen=True, slots=True)
class PageFacts:
    """Holds the facts that a page shows; the page leaves out those that are None or empty.

    With `profile`, which is of `graph`, the network is drawn with its cuts. `commands` are shown as the way
    to reproduce the run.
    """

    plan: Plan
    graph: ModelGraph | None = None
    profile: Profile | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    history: RecordedRun | None = None
    verdict: Verdict | None = None
    advice: Sequence[Advice] = ()
    curves: Sequence[ThroughputCurve] = ()
    seconds: StepSeconds | None = None
    foresight: Foresight | None = None
    commands: Sequence[str] = ()


def write(path: str | Path, facts: PageFacts) -> None:
    """Writes the page to `path`."""
    replace_text(path, render(facts))


def render(facts: PageFacts) -> str:
    """Returns the page as text."""
    return environment().get_template("report.html.jinja").render(_shown(facts))


def _shown(facts: PageFacts) -> dict[str, Any]:
    """Returns what the template reads, by its names there."""
    plan, expected, verdict = facts.plan, facts.plan.expected, facts.verdict
    timelines = [timeline for timeline in (facts.predicted, facts.measured) if timeline is not None]
    return {
        **_shown_of_plan(plan, expected),
        "size": _size(facts.graph),
        "tiles": _tiles(plan, facts.predicted, facts.measured, facts.history),
        "timelines": _timelines(plan, timelines),
        "last_steps": _last_steps(plan, facts.history),
        "several": any(map(several_stages, timelines)),
        "shades": list(zip(FORWARD, BACKWARD, strict=True)),
        "weight": WEIGHT if any(s.action.partition("W")[1] for t in timelines for s in t.spans) else (),
        "network": _network(plan, facts.graph, facts.profile),
        "curves": [curve_svg(f"by-{curve.choice}", curve) for curve in facts.curves],
        "advice": list(map(advised, facts.advice)),
        **_steps(plan, facts.history),
        **_memory(plan, expected, facts.history),
        "sure": sentence(facts.foresight) if facts.foresight else "",
        "spent_title": seconds_title(facts.seconds) if facts.seconds else "",
        "spent": seconds_rows(facts.seconds) if facts.seconds else (),
        "constants": constants(facts.seconds) if facts.seconds else (),
        "verdict": verdict,
        "differences": _differences(verdict),
        "compared": _compared(verdict) if verdict else "",
        "check_notes": check_notes(verdict) if verdict else [],
        "commands": list(facts.commands) or _commands(plan),
    }


def _shown_of_plan(plan: Plan, expected: Expected | None) -> dict[str, Any]:
    """Returns what the template reads of the plan alone."""
    return {
        "plan": plan,
        "plan_json": visible_lines(plan.to_json()),
        "expected": expected,
        "lead": f"{_count(len(plan.stages), 'stage')} on {plan.cluster}, {how_text(plan)}",
        "unsupported": unsupported_text(plan) if plan.unsupported else "",
        "optimum": _optimum(plan),
        "stages": _stages(plan),
        "varies": recompute_varies(plan),
        "each": plan.axes.group_size > 1,
        "alternatives": _alternatives(plan),
        "causes": list(CAUSES.items()),
        "degrees": degree_rows(expected.degrees, plan.weights) if expected else None,
        "degrees_title": TITLE,
        "margins": "; ".join(sentences(expected.margins)) if expected is not None else "",
        "limit_drawn": expected is not None and limit_drawn(plan, expected),
        "why": sentences(plan.reasons),
        "rejected": sentences(plan.rejections),
        "source": SOURCES[expected.source] if expected else "",
    }


def environment() -> Environment:
    """Returns the templates of pages; texts are escaped."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_unbroken,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _unbroken(value: object) -> object:
    """Keeps a per cent sign on the line of its number, and shows characters that act (`\\u202e`) as text.

    Markup and the plan's JSON stay unchanged.
    """
    return visible_lines(value).replace(" %", "\u00a0%") if type(value) is str else value


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith(("ch", "ss")) else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def _optimum(plan: Plan) -> str:
    """Returns how good the plan is, and what limits it, as far as the plan says."""
    if plan.expected is None:
        return ""
    gap, limit = plan.expected.gap, plan.expected.limited_by
    parts = [
        optimum_text(gap),
        "" if limit is None else f"limited by {sentence(limit)}",
    ]
    return "; ".join(filter(None, parts))


def _size(graph: ModelGraph | None) -> str:
    if graph is None:
        return ""
    number = count_text(sum(p.count for p in graph.parameters))
    return f"{number} parameters, {bytes_text(graph.parameter_bytes)}, {len(graph.units)} units"


def _network(plan: Plan, graph: ModelGraph | None, profile: Profile | None) -> str:
    if graph is None or profile is None:
        return ""
    order = plan.in_order(graph)
    graph, profile = graph.in_order(order), profile.in_order(order)
    return network_svg("network", graph, profile, plan.bounds(graph))


def _tiles(
    plan: Plan, predicted: Timeline | None, measured: Timeline | None, history: RecordedRun | None
) -> list[Tile]:
    tiles = _step_tiles(plan, predicted, measured)
    memory = () if history is None else history.memory
    if plan.expected is not None and plan.expected.stages:
        figures = [h.figures for h in holdings(plan, plan.expected)]
        fullest = max(figures, key=lambda f: sure_bytes(f) / (f.device_bytes or 1))
        note = f"{sure_text(fullest)}, predicted".removeprefix(", ")
        size = fullest.peak_bytes
        if memory:
            note, size = f"{bytes_text(size)} predicted", max(each.peak_bytes for each in memory)
        tiles.append(Tile("fullest device", bytes_text(size), note))
    if history is not None:
        first, last = history.steps[0].loss, history.steps[-1].loss
        note = f"from {_short_loss(first)} in {_count(len(history.steps), 'step')}"
        tiles.append(Tile("loss", _short_loss(last), note))
    return tiles


def _short_loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.3f}" if abs(loss) >= 0.1 else f"{loss:.3g}"


def _step_tiles(plan: Plan, predicted: Timeline | None, measured: Timeline | None) -> list[Tile]:
    shown = measured or predicted
    if shown is None or not shown.duration_s:
        return []
    step_s, bubble = _step(plan, shown)
    step_note, busy_note = _step_notes(plan, predicted, measured)
    return [
        Tile("step time", seconds_text(step_s), step_note),
        Tile("samples per second", rate_text(plan.batch_size / step_s), f"batch {plan.batch_size}"),
        Tile("devices busy", percent_text(1 - bubble), busy_note),
    ]


def _step(plan: Plan, timeline: Timeline) -> tuple[float, float]:
    """Returns seconds and bubble.

    Of a prediction only its first microbatches may be drawn; the plan has the figures of the whole step.
    """
    if timeline.source == "predicted" and plan.expected is not None and plan.expected.step_s:
        return plan.expected.step_s, plan.expected.bubble
    return timeline.duration_s, timeline.bubble


def _step_notes(plan: Plan, predicted: Timeline | None, measured: Timeline | None) -> tuple[str, str]:
    """Returns the predicted figures as notes under measured ones; predicted figures are marked as such."""
    if measured is None:
        return "predicted", "predicted"
    if predicted is None:
        return "measured", "measured"
    step_s, bubble = _step(plan, predicted)
    return f"{seconds_text(step_s)} predicted", f"{percent_text(1 - bubble)} predicted"


def _stages(plan: Plan) -> list[dict[str, Any]]:
    """Returns the rows of the plan table; `figures` is empty without expectations."""
    rows: list[dict[str, Any]] = []
    for number, stage in enumerate(plan.stages):
        row: dict[str, Any] = {
            "number": number,
            "device": device_text(plan, number),
            "recompute": recompute_text(plan, number),
            "units": short_units(stage.units),
            "all_units": "\n".join(stage.units),
            "figures": [],
        }
        if plan.expected is not None:
            figures = plan.expected.stages[number]
            row["figures"] = [
                count_text(figures.parameters),
                seconds_text(figures.forward_s),
                seconds_text(figures.backward_s),
                percent_text(figures.busy),
            ]
        rows.append(row)
    return rows


def _memory(plan: Plan, expected: Expected | None, history: RecordedRun | None) -> dict[str, Any]:
    """Returns the figure of memory and the rows of its table; of a plan without figures there is none."""
    if expected is None:
        return {"memory": "", "devices": [], "is_measured": False}
    measured = () if history is None else history.memory
    rows = device_memory(plan, expected, measured)
    return {
        "memory": memory_svg("memory", plan, expected, measured),
        "devices": [line for row in rows for line in _memory_lines(row)],
        "is_measured": bool(measured),
    }


def _memory_lines(row: DeviceMemory) -> Iterator[dict[str, Any]]:
    """Yields what is planned for a device, and what was measured on it."""
    if row.planned is not None:
        figures = row.planned.figures
        yield {
            "name": row.name,
            "memory": [bytes_text(size) for _, size in causes(figures)],
            "peak": bytes_text(figures.peak_bytes),
            "p95": bytes_text(figures.p95_bytes) if figures.p95_bytes else "",
            "limit": bytes_text(figures.device_bytes) if figures.device_bytes else "unknown",
        }
    if row.measured is not None:
        known = dict(measured_causes(row.measured))
        names = ("weights", "gradients", "optimizer", "rest")
        yield {
            "name": "measured" if row.planned is not None else f"{row.name}, measured",
            "memory": [*(bytes_text(known[n]) if n in known else "in the rest" for n in names), ""],
            "peak": bytes_text(row.measured.peak_bytes),
            "p95": "",
            "limit": "",
        }


def _alternatives(plan: Plan) -> list[tuple[str, ...]]:
    """Returns name, seconds of a step, samples per second and bytes of the fullest device."""
    return [
        (way_text(a), seconds_text(a.step_s), rate_text(a.samples_per_s), bytes_text(a.peak_bytes))
        for a in plan.alternatives
    ]


def _steps(plan: Plan, history: RecordedRun | None) -> dict[str, Any]:
    """Returns the figures over the steps of a run, and what is said of them."""
    steps = () if history is None else history.steps
    numbers, expected = [step.step for step in steps], plan.expected
    losses = [step.loss for step in steps]
    loss = StepChart(
        key="loss",
        title="Loss over steps",
        steps=numbers,
        values=losses,
        text=lambda x: f"{x:.4g}",
        smoothed=smoothed(losses),
    )
    seconds = StepChart(
        key="seconds",
        title="Seconds of each step",
        steps=numbers,
        values=[step.step_s for step in steps],
        text=seconds_text,
        expected=None if expected is None else expected.step_s,
        from_zero=True,
    )
    rates = [step.learning_rate for step in steps]
    norms = [step.grad_norm for step in steps]
    rate = StepChart("rate", "Learning rate", numbers, rates, lambda x: f"{x:.3g}", from_zero=True)
    norm = StepChart("norm", "Norm of the gradients", numbers, norms, lambda x: f"{x:.3g}")
    imbalances = [step.expert_imbalance for step in steps]
    experts = StepChart(
        "experts", "Rows of experts, fullest rank by mean rank", numbers, imbalances, lambda x: f"{x:.3g}"
    )
    more = [seconds, *(chart for chart in (norm, rate, experts) if any(v is not None for v in chart.values))]
    return {
        "loss": step_svg(loss) if loss.is_drawn else "",
        "losses": [loss_text(value) for value in losses],
        "smoothed_over": smoothing_steps(len(losses)),
        "step_charts": [(c.title, _chart_text(c), step_svg(c)) for c in more] if loss.is_drawn else [],
        "has_expected": seconds.expected is not None,
    }


def _chart_text(chart: StepChart) -> str:
    """Returns the typical or last value, what was expected, and which steps are not within the figure."""
    finite = [value for value in chart.values if value is not None]
    if chart.key != "seconds":
        return f"{chart.text(finite[-1])} at the end"
    parts = [f"median {chart.text(median(finite))}"]
    parts += [] if chart.expected is None else [f"predicted {chart.text(chart.expected)}"]
    beyond = chart.beyond
    if beyond:
        which = f"step {beyond[0]}" if len(beyond) == 1 else f"{len(beyond)} steps"
        parts.append(f"{which} beyond, at most {chart.text(max(finite))}")
    return ", ".join(parts)


def _last_steps(plan: Plan, history: RecordedRun | None) -> list[dict[str, str]]:
    """Returns a figure for each of the last steps, all on the axis of the longest."""
    timed = [] if history is None else [each for each in history.timelines if each.timeline.spans]
    end_s = max((each.timeline.duration_s for each in timed), default=0.0)
    devices = lanes(plan)
    return [
        {
            "name": f"step {each.step}",
            "step": seconds_text(each.timeline.duration_s),
            "bubble": percent_text(each.timeline.bubble),
            "svg": timeline_svg(f"step-{each.step}", each.timeline, end_s, devices),
        }
        for each in (timed if end_s and len(timed) > 1 else [])
    ]


def _timelines(plan: Plan, figures: Sequence[Timeline]) -> list[dict[str, str]]:
    """Returns one figure for each timeline, all on the axis of the longest."""
    end_s = max((t.duration_s for t in figures), default=0.0)
    if not end_s:
        return []
    devices = lanes(plan)
    return [
        {
            "name": timeline.source,
            "step": seconds_text(_step(plan, timeline)[0]),
            "bubble": percent_text(_step(plan, timeline)[1]),
            "part": _part(plan, timeline),
            "svg": timeline_svg(timeline.source, timeline, end_s, devices),
        }
        for timeline in figures
    ]


def _part(plan: Plan, timeline: Timeline) -> str:
    """Returns how much of the step is drawn, when it is not all of it."""
    last = max((Action.parse(s.action).microbatch for s in timeline.spans), default=0)
    return f", its first {last + 1} microbatches" if last + 1 < plan.microbatches else ""


def _differences(verdict: Verdict | None) -> list[tuple[str, str, bool]]:
    if verdict is None:
        return []
    return [(name, difference_text(number), number == 0) for name, number in differences(verdict)]


def _compared(verdict: Verdict) -> str:
    """Returns what was compared: `2 stages, 1f1b, 4 microbatches, one process`."""
    processes = _count(verdict.processes, "process") if verdict.processes else "one process"
    stages, microbatches = _count(len(verdict.stages), "stage"), _count(verdict.microbatches, "microbatch")
    return f"{stages}, {verdict.schedule}, {microbatches}, {processes}"


def _commands(plan: Plan) -> list[str]:
    """Returns how to make and run this plan; MODEL stands for the model's spec, which a plan does not
    know.
    """
    make = f"outsize plan MODEL --cluster {plan.cluster} --batch {plan.batch_size}"
    for_what = f"--optimizer {plan.optimizer} --precision {plan.precision}"
    if plan.unsupported:
        return [f"{make} {for_what} --out plan.json", "outsize explain-plan plan.json"]
    sizes = {axis.name: size for axis in LISTED if not axis.cuts_stages and (size := plan.axes.of(axis)) > 1}
    axes = f" {axes_typed(sizes)}" if sizes else ""
    named = "schedule.csv" if plan.schedule == CUSTOM_NAME else plan.schedule  # with the rows of `actions`
    how = f"--stages {plan.axes.pp} --microbatches {plan.microbatches} --schedule {named}{axes}"
    return [
        f"{make} {how} {for_what} --out plan.json",
        *(["outsize check MODEL --plan plan.json --processes"] if plan.axes.product_parts == 1 else []),
        f"outsize run --nproc-per-node {plan.axes.world_size} MODEL --plan plan.json",
    ]
