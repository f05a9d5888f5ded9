"""Builds plans, verdicts and runs as text tables of 80 columns; no meaning is only in a colour.

All functions return renderables of rich; `Console.print` leaves out colour off a terminal.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outsize.ir.answers.advice import Advice
from outsize.ir.answers.runs.recorded_run import MeasuredMemory, RecordedRun
from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.answers.verdict import Verdict
from outsize.ir.findings import Foresight, NotChosen
from outsize.ir.formatting import (
    byte_unit,
    bytes_text,
    count_text,
    flops_text,
    percent_text,
    rate_text,
    seconds_text,
)
from outsize.ir.graph import ModelGraph, Unit
from outsize.ir.plan import Alternative, Expected, Plan, StageFigures
from outsize.ir.profile import Profile, UnitCost
from outsize.ir.timeline import Timeline
from outsize.ir.units.tensor_styles import TensorStyles
from outsize.policies.activations import activation_policy
from outsize.policies.precisions import precision_policy
from outsize.policies.weights import weight_policy
from outsize.report.tables import table_style
from outsize.report.tables.balance import imbalance_text
from outsize.report.tables.offload import degrees_table
from outsize.report.tables.placement import device_text, holdings, lanes, recompute_text, recompute_varies
from outsize.report.tables.stage_units import MOST_SHOWN, short_units
from outsize.report.wording import advised, counts_text, idle_next_step, idle_sentence, sentence, sentences

SHORT = {"gradients": "grads", "optimizer": "optim.", "activations": "activ."}
# A larger gap is a weak bound, and nothing about the plan.
TOLD = 0.1
# The most characters for a stage's units, whose column has a third of a line; fewer units are named then.
NAMED = 72
_NUMBER = re.compile(r"\.\d+(?=\.|,|$)")
SOURCES = {"measured": "from measured unit times", "roofline": "from estimated unit times (roofline)"}


def plan_table(
    plan: Plan,
    graph: ModelGraph | None = None,
    advice: Sequence[Advice] = (),
    foresight: Foresight | None = None,
) -> Group:
    """Returns stages with their units, seconds and memory by cause; then the step and the reasons.

    A plan without `expected` shows its cuts alone. With `graph` the heading counts the model's parameters,
    and `foresight` says how sure its seconds are.
    """
    parts: list[RenderableType] = [_stage_table(plan)]
    if plan.expected is not None:
        parts += [_memory_table(plan, plan.expected), _step_lines(plan, plan.expected, foresight)]
        parts += _alternatives(plan, plan.expected)
        parts += degrees_table(plan.expected.degrees, plan.weights)
    parts += table_style.listed("Why", sentences(plan.reasons))
    parts += table_style.listed("Not chosen", sentences(plan.rejections))
    parts += table_style.listed("Advice", list(map(advised, advice)))
    return Group(_plan_heading(plan, graph), *table_style.spaced(*parts))


def check_table(verdict: Verdict) -> Group:
    """Returns what was compared, the largest differences, and the first unit that differs."""
    bits = verdict.relative_diff is None or verdict.bit_equal
    equal = "bit-equal" if bits else f"equal within {verdict.within:.0e}"
    word = Text(equal, "bold green") if verdict.holds else Text(f"NOT {equal}", "bold red")
    heading = Text.assemble((verdict.model, "bold"), ": ", word, " to the plain loop in one process")
    notes = [Text(f"Note: {note}") for note in check_notes(verdict)]
    setting = Text(_check_setting(verdict))
    return Group(heading, setting, *table_style.spaced(_differences(verdict), _cuts(verdict), *notes))


def run_table(
    plan: Plan,
    measured: Timeline,
    history: RecordedRun | None = None,
    used: Utilisation | None = None,
    command: str | None = None,
) -> Group:
    """Returns the end of a run: each rank's share of work, the step against its prediction, the loss.

    `measured` is of one training step, `history` of all steps. `used` adds transfers, the bound and W210;
    `command` is what to type for it.
    """
    table = table_style.table(
        ("rank", "right"), ("device", "left"), *table_style.rights("busy", "computes", "waits", "predicted")
    )
    for rank in range(measured.ranks):
        table.add_row(*_run_row(plan, measured, rank))
    parts = [table, table_style.facts(run_facts(plan, measured, history, used)), *_warning(used, command)]
    return Group(Text(f"{plan.model}: one step, measured", "bold"), *table_style.spaced(*parts))


def _warning(used: Utilisation | None, command: str | None) -> list[Text]:
    """Returns W210 when the devices idled."""
    if used is None or used.idle is None:
        return []
    step = f"\nNext: {command or idle_next_step(used.idle)}"
    return [Text.assemble(("W210", "bold yellow"), f": {idle_sentence(used.idle)}.", step)]


def units_table(graph: ModelGraph, profile: Profile | None = None) -> Group:
    """Returns all units in order with what they hold and cost; times only with a profile, `~` marks
    estimates.
    """
    table = table_style.table(
        ("unit", "left"), *table_style.rights("params", "FLOPs", "saved", "forward", "backward")
    )
    costs: Iterable[UnitCost | None] = profile.units if profile else [None] * len(graph.units)
    for unit, cost in zip(graph.units, costs, strict=True):
        table.add_row(*_unit_row(graph, unit, cost))
    total = f"{len(graph.units)} units, {_size_text(graph)}, one microbatch of {graph.batch_size}"
    estimated = profile is not None and any(cost.source == "roofline" for cost in profile.units)
    legend = ["~ estimated (roofline), not measured"] if estimated else []
    notes = [Text(note) for note in (*legend, *graph.notes)]
    return Group(Text.assemble((graph.model, "bold"), f": {total}"), *table_style.spaced(table, *notes))


def styles_table(styles: TensorStyles) -> Group:
    """Returns each kind of module with its reason; modules that differ only in numbers (`layers.*`) are
    one kind.
    """
    kinds = Counter((m.style, _NUMBER.sub(".*", m.module), _NUMBER.sub(".*", m.why)) for m in styles.modules)
    lines: list[RenderableType] = []
    for (style, module, why), times in kinds.items():
        lines.append(Text(f"{style:<10}  {module}{f' ({times})' if times > 1 else ''}"))
        lines.append(Padding(Text(why, "dim"), (0, 0, 0, 12)))
    degrees = ", ".join(map(str, styles.degrees)) or "none"
    return Group(*lines, Text(f"tp that divides every size: {degrees}"), *map(Text, styles.hints))


def run_facts(
    plan: Plan, measured: Timeline, history: RecordedRun | None = None, used: Utilisation | None = None
) -> list[tuple[str, str]]:
    """Returns `("step", "103 ms measured, 97.0 ms predicted (+6 %)")` and so on, for tables and pages."""
    step_s = measured.duration_s
    facts = [("step", _against(step_s, plan.expected))]
    if step_s:
        facts.append(("throughput", f"{rate_text(plan.batch_size / step_s)} samples/s"))
    facts.append(("bubble", _bubble(measured, plan.expected)))
    facts += used.facts() if used is not None else []
    facts += _history_facts(plan, history) if history is not None else []
    return facts


def _history_facts(plan: Plan, history: RecordedRun) -> Iterator[tuple[str, str]]:
    """Yields memory, loss and norm of a run, as far as they are known."""
    if history.memory:
        peak = max(each.peak_bytes for each in history.memory)
        planned = (
            "" if plan.expected is None else f", {bytes_text(_most_planned(plan, plan.expected))} planned"
        )
        yield "memory", f"{bytes_text(peak)} at most on a device{planned}"
    first, last = history.steps[0], history.steps[-1]
    yield "loss", f"{loss_text(first.loss)} -> {loss_text(last.loss)} in {len(history.steps)} steps"
    imbalances = [step.expert_imbalance for step in history.steps if step.expert_imbalance is not None]
    if imbalances:
        yield "experts", f"the fullest rank had at most {imbalance_text(max(imbalances))}"
    if last.grad_norm is not None:
        yield "gradient norm", f"{last.grad_norm:.4g} at the end"


def _most_planned(plan: Plan, expected: Expected) -> int:
    return max(holding.figures.peak_bytes for holding in holdings(plan, expected))


def loss_text(loss: float | None) -> str:
    """Returns a loss in a sentence; None stands for one that is no finite number."""
    return "not finite" if loss is None else f"{loss:.4f}"


def _against(step_s: float, expected: Expected | None) -> str:
    text = f"{seconds_text(step_s)} measured"
    if expected is None or not expected.step_s:
        return text
    change = step_s / expected.step_s - 1
    sign = "+" if change >= 0 else ""
    return f"{text}, {seconds_text(expected.step_s)} predicted ({sign}{percent_text(change)})"


def _bubble(measured: Timeline, expected: Expected | None) -> str:
    text = f"{percent_text(measured.bubble)} measured"
    return text if expected is None else f"{text}, {percent_text(expected.bubble)} predicted"


def _run_row(plan: Plan, measured: Timeline, rank: int) -> tuple[str, ...]:
    waits_s = sum(s.duration_s for s in measured.spans if s.rank == rank and s.lane == "wait")
    place = rank // plan.axes.group_size if measured.ranks > plan.axes.pp else rank
    known = plan.expected is not None and place < len(plan.expected.stages)
    devices = lanes(plan)
    return (
        str(rank),
        devices[place] if place < len(devices) else "",
        percent_text(measured.utilisation(rank)),
        seconds_text(measured.busy_s(rank)),
        seconds_text(waits_s) if waits_s else "-",
        percent_text(plan.expected.stages[place].busy) if known and plan.expected else "-",
    )


def _plan_heading(plan: Plan, graph: ModelGraph | None) -> Text:
    size = f" ({_size_text(graph)})" if graph else ""
    lines = Text.assemble((plan.model, "bold"), f"{size} on {plan.cluster}\n", how_text(plan))
    if plan.expected is not None and (optimum := optimum_text(plan.expected.gap)):
        lines.append(f"\n{optimum}", "bold")
    if plan.unsupported:
        lines.append(f"\n{unsupported_text(plan)}", "bold yellow")
    return lines


def how_text(plan: Plan) -> str:
    """Returns schedule, batch, optimizer and precision: `1f1b, batch 24 as 6 x 4, optimizer adamw, bf16`."""
    replicas = plan.axes.replicas
    most = "at most " if plan.batch_size % (plan.microbatches * replicas) else ""
    shared = f"{replicas} replicas x " if replicas > 1 else ""
    batch = f"batch {plan.batch_size} as {shared}{plan.microbatches} x {most}{plan.microbatch_size}"
    parts = [plan.schedule, batch, f"optimizer {plan.optimizer}"]
    parts += [] if precision_policy(plan.precision).is_plain else [plan.precision]
    parts += [] if recompute_varies(plan) else [plan.activation_policy(0).text]
    return ", ".join(filter(None, parts))


def unsupported_text(plan: Plan) -> str:
    """Returns the note that the plan cannot be run, with its axes."""
    size = plan.axes.world_size
    devices = f"{size} device{'' if size == 1 else 's'}"
    return f"THIS VERSION CANNOT RUN IT: pp {plan.axes.pp}, {plan.unsupported}; {devices}"


def _size_text(graph: ModelGraph) -> str:
    number = sum(p.count for p in graph.parameters)
    return f"{count_text(number)} parameters, {bytes_text(graph.parameter_bytes)}"


def _stage_table(plan: Plan) -> Table:
    names = ("params", "forward", "backward", "busy", "bubble") if plan.expected else ()
    table = table_style.table(
        ("stage", "right"), ("device", "left"), ("units", "left"), *table_style.rights(*names)
    )
    varies, hosted = recompute_varies(plan), plan.host_stages
    for number, stage in enumerate(plan.stages):
        recomputed = _recomputed_note(plan, number) if varies else ""
        place = ("host of " if number in hosted else "") + device_text(plan, number)
        cells = (str(number), place, _named(stage.units) + recomputed)
        table.add_row(*cells, *(_stage_cells(plan.expected, number) if plan.expected else ()))
    return table


def _recomputed_note(plan: Plan, stage: int) -> str:
    """Returns what is said behind the units of a stage about its activations; empty where it keeps all."""
    policy = plan.activation_policy(stage)
    if policy.lists_units:
        return f" (recomputes {recompute_text(plan, stage)})"
    if policy.recomputes_all:
        return " (recomputed)"
    return f" ({policy.text})" if policy.text else ""


def _named(patterns: Sequence[str]) -> str:
    """Returns the patterns of a stage's units, as many as have room."""
    texts = (short_units(patterns, most) for most in range(MOST_SHOWN, 3, -1))
    return next((text for text in texts if len(text) <= NAMED), short_units(patterns, 3))


def _stage_cells(expected: Expected, number: int) -> tuple[str, ...]:
    figures = expected.stages[number]
    times = seconds_text(figures.forward_s), seconds_text(figures.backward_s)
    idle = percent_text(max(0.0, 1 - figures.busy))
    return count_text(figures.parameters), *times, percent_text(figures.busy), idle


def _memory_table(plan: Plan, expected: Expected) -> Table:
    """Returns a row for each device, which may hold several stages."""
    device_holdings = holdings(plan, expected)
    unit, size = byte_unit(max((h.figures.peak_bytes for h in device_holdings), default=0))
    names = [SHORT.get(name, name) for name, _ in causes(expected.stages[0])]
    each = "each, " if plan.axes.group_size > 1 else ""
    peak_names = ("P50", "P95") if all(h.figures.p95_bytes for h in device_holdings) else ("peak",)
    table = table_style.table(
        (f"memory, {each}{unit}", "left"), *table_style.rights(*names, *peak_names, "full")
    )
    for holding in device_holdings:
        figures = holding.figures
        limit = f" {bytes_text(figures.device_bytes)}" if figures.device_bytes else ""
        numbers = [_of_unit(number / size) for _, number in causes(figures)]
        peaks = (figures.p50_bytes, figures.p95_bytes) if len(peak_names) > 1 else (figures.peak_bytes,)
        bold = [Text(_of_unit(number / size), "bold") for number in peaks]
        table.add_row(f"{holding.device}{limit}", *numbers, *bold, _full(figures))
    return table


def _of_unit(number: float) -> str:
    """Returns `97.7` or `1367`: five characters at most, so that a line of 80 columns holds all causes."""
    return f"{number:.1f}" if number < 999.95 else f"{number:.0f}"


def _full(figures: StageFigures) -> Text:
    if not figures.device_bytes:
        return Text("-")
    fraction = (figures.p95_bytes or figures.peak_bytes) / figures.device_bytes
    return Text(percent_text(fraction), "bold red" if fraction > 1 else "")


def causes(figures: StageFigures) -> list[tuple[str, int]]:
    """Returns the bytes at a stage's peak by cause, in the order in which they are drawn; they add up to
    the peak.
    """
    return [
        ("weights", figures.weights_bytes),
        ("gradients", figures.gradients_bytes),
        ("optimizer", figures.optimizer_bytes),
        ("activations", figures.activations_bytes),
        ("boundary", figures.boundary_bytes),
    ]


def measured_causes(memory: MeasuredMemory) -> list[tuple[str, int]]:
    """Returns the measured bytes by cause; `rest` has activations, messages and workspace."""
    gradients = memory.gradients_bytes
    return [
        ("weights", memory.weights_bytes),
        *([] if gradients is None else [("gradients", gradients)]),
        ("optimizer", memory.optimizer_bytes),
        ("rest", memory.rest_bytes),
    ]


def _step_lines(plan: Plan, expected: Expected, foresight: Foresight | None) -> RenderableType:
    return table_style.facts(
        [
            ("step", f"{seconds_text(expected.step_s)} predicted, {SOURCES[expected.source]}"),
            *([("how sure", sentence(foresight))] if foresight else []),
            ("bits", bits_text(plan, expected.step_s)),
            ("throughput", f"{rate_text(expected.samples_per_s)} samples/s"),
            ("bubble", f"{percent_text(expected.bubble)} of all device time is idle"),
            *([("limited by", sentence(expected.limited_by))] if expected.limited_by else []),
            *(("memory", margin) for margin in sentences(expected.margins)),
        ]
    )


def bits_text(plan: Plan, step_s: float) -> str:
    """Returns whether the results are those of one device bit by bit, and what a step with them takes."""
    if plan.bit_identical:
        return "those of one device"
    exact = next((f for f in plan.why if isinstance(f, NotChosen) and f.bit_identical), None)
    if exact is None:
        return "those of one device within rounding"
    exact_text = f"{seconds_text(exact.step_s)} with one device's bits: --exact"
    return f"{seconds_text(step_s)} within rounding; {exact_text}"


def optimum_text(gap: float | None) -> str:
    """Returns `optimal`, or how far from it the plan can be at most, rounded up, within what was searched.

    It is empty where the bound is too far away to say anything, as that of interleaved plans.
    """
    if gap is None or gap > TOLD:
        return ""
    share = f"within {math.ceil(gap * 1000 - 1e-6) / 10:.1f} % of the best possible"
    return f"{'optimal' if gap <= 0 else share} (of what was searched)"


def _alternatives(plan: Plan, expected: Expected) -> list[RenderableType]:
    """Returns the next best layouts, fastest first; an empty list when none was priced."""
    if not plan.alternatives:
        return []
    made = table_style.table(
        ("instead", "left"), *table_style.rights("step", "samples/s", "against", "fullest")
    )
    for other in plan.alternatives:
        against = f"{round((other.samples_per_s / (expected.samples_per_s or 1) - 1) * 100):+d} %"
        rates = seconds_text(other.step_s), rate_text(other.samples_per_s), against
        made.add_row(way_text(other), *rates, bytes_text(other.peak_bytes))
    return [made]


def way_text(other: Alternative) -> str:
    """Returns `1f1b, 8 microbatches, pp 4`, with stages per device, further axes and recompute where used."""
    chunks = f" x {other.chunks}" if other.chunks > 1 else ""
    count = f"{other.microbatches} microbatch{'' if other.microbatches == 1 else 'es'}"
    parts = [other.schedule + chunks, count, f"pp {other.axes.pp}" if other.axes.pp > 1 else ""]
    parts += [other.axes.beyond_pp, weight_policy(other.weights).text]
    parts += ["sequence parallel"] if other.sequence_parallel else []
    parts += [f"{other.slices} slices"] if other.slices > 1 else []
    policy = activation_policy(other.recompute)
    parts += ["recompute" if policy.recomputes else policy.text]
    return ", ".join(filter(None, parts))


def _check_setting(verdict: Verdict) -> str:
    where = f"{verdict.processes} processes" if verdict.processes else "one process"
    captured = f"captured in {seconds_text(verdict.capture_s)}, " if verdict.capture_s else ""
    return (
        f"{len(verdict.stages)} stages, {verdict.schedule}, {verdict.microbatches} microbatches, {where}; "
        f"{captured}run in {seconds_text(verdict.run_s)}"
    )


def check_notes(verdict: Verdict) -> list[str]:
    """Returns what one may not expect of a run, or of its loss."""
    return [*verdict.notes, *([counts_text(verdict.counts)] if verdict.counts is not None else [])]


def differences(verdict: Verdict) -> list[tuple[str, float]]:
    """Returns what was compared, each with its largest absolute difference."""
    return [
        ("loss", verdict.loss_diff),
        ("gradients", verdict.grad_diff),
        ("buffers", verdict.buffer_diff),
        ("parameters", verdict.parameter_diff),
    ]


def difference_text(number: float) -> str:
    """Returns `0` only for exact equality; else three digits."""
    return "0" if number == 0 else f"{number:.2e}"


def _differences(verdict: Verdict) -> RenderableType:
    table = table_style.table(("compared", "left"), ("largest difference", "right"), ("", "left"))
    for name, number in differences(verdict):
        other = Text("rounding", "yellow") if verdict.holds else Text("differs", "bold red")
        same = other if number else Text("equal", "green")
        table.add_row(name, difference_text(number), same)
    if verdict.first_divergence is None:
        return table
    where = Text.assemble("First difference: ", (verdict.first_divergence, "bold red"))
    return Group(table, where)


def _cuts(verdict: Verdict) -> Table:
    table = table_style.table(("stage", "right"), ("units", "left"))
    for number, patterns in enumerate(verdict.stages):
        table.add_row(str(number), short_units(patterns))
    return table


def _unit_row(graph: ModelGraph, unit: Unit, cost: UnitCost | None) -> tuple[str, ...]:
    parameter_sizes = {
        graph.parameter_of[name].name: graph.parameter_of[name].numel for name in unit.parameters
    }
    estimate_mark = "~" if cost is not None and cost.source == "roofline" else ""
    return (
        unit.name,
        count_text(sum(parameter_sizes.values())) if parameter_sizes else "-",
        flops_text(unit.flops).removesuffix("FLOP") if unit.flops else "-",
        bytes_text(cost.saved_bytes if cost else unit.saved_bytes),
        f"{estimate_mark}{seconds_text(cost.forward_s)}" if cost else "-",
        f"{estimate_mark}{seconds_text(cost.backward_s)}" if cost else "-",
    )
