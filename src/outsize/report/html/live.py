"""Renders the page of a run that goes on: figures, the loss, one step's timeline, memory by cause.

The page is whole when it is loaded. Its script, the only one that outsize writes, fetches the part inside of
`<main>` again each second; without scripts a reload does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from outsize.ir.answers.run_state import CAUSES, RunDevice, RunOnMachine, RunState
from outsize.ir.formatting import byte_unit, bytes_text, percent_text, rate_text, seconds_text
from outsize.ir.timeline import Timeline
from outsize.report.html.figures import BAR, GAP, LABEL, SLIVER, timeline_svg
from outsize.report.html.page import Tile, environment
from outsize.report.html.step_chart import StepChart, smoothed, step_svg
from outsize.report.html.svg import Svg, percent
from outsize.report.palette import BACKWARD, FORWARD, WEIGHT
from outsize.report.palette import CAUSES as COLOURS
from outsize.report.tables.balance import imbalance_text
from outsize.report.tables.runs import elapsed_text, slow_rank_text
from outsize.report.ticks import ticks

_MEASURED: Final = 8  # pixels of the bar of measured memory, below the planned one
_AXIS: Final = 26
_ROWS: Final = 64  # A run of thousands of ranks shows its first ones.


@final
@dataclass(frozen=True, slots=True)
class LossPoint:
    """The loss after so many steps."""

    step: int
    loss: float


@final
@dataclass(frozen=True, slots=True)
class LiveFacts:
    """Holds what the page shows of a run: its state, its latest measured step, and its losses so far."""

    run: RunOnMachine
    timeline: Timeline | None = None
    losses: Sequence[LossPoint] = ()


def live_page(facts: LiveFacts, now_unix_s: float) -> str:
    """Returns the whole page."""
    return environment().get_template("live.html.jinja").render(_shown(facts, now_unix_s), whole=True)


def live_part(facts: LiveFacts, now_unix_s: float) -> str:
    """Returns what is inside of the page's `<main>`."""
    return environment().get_template("live.html.jinja").render(_shown(facts, now_unix_s), whole=False)


def _shown(facts: LiveFacts, now_unix_s: float) -> dict[str, Any]:
    """Returns what the template reads, by its names there."""
    state, timeline = facts.run.state, facts.timeline
    return {
        "run": facts.run.launch,
        "state": state,
        "started": elapsed_text(now_unix_s - facts.run.launch.started_unix_s),
        "tiles": [] if state is None else _tiles(state),
        "facts": [] if state is None else _facts(state, now_unix_s),
        "slow": [] if state is None else [slow_rank_text(slow) for slow in state.slow_ranks],
        "loss": loss_svg(facts.losses) if len(facts.losses) > 1 else "",
        "timeline": "" if timeline is None or state is None else _timeline(timeline, state),
        "memory": "" if state is None or not state.devices else memory_svg(state.devices[:_ROWS]),
        "limit": state is not None and _memory_end(state.devices[:_ROWS])[1],
        "legend": [(COLOURS[cause], _cause_text(cause)) for cause in CAUSES],
        "shades": list(zip(FORWARD, BACKWARD, strict=True)),
        "weight": WEIGHT if timeline and any("W" in s.action for s in timeline.spans) else (),
    }


def _tiles(state: RunState) -> list[Tile]:
    of = "" if state.total_steps is None else f"of {state.total_steps}"
    left = [] if state.left_s is None else [Tile("time left", elapsed_text(state.left_s))]
    evaluated = "" if state.evaluation_loss is None else f"evaluated {state.evaluation_loss:.4g}"
    planned = f"planned {seconds_text(state.planned_step_s)}" if state.planned_step_s else ""
    rate = state.samples_per_s
    tiles = [
        Tile("step", str(state.step), of),
        Tile("loss", "not finite" if state.loss is None else _loss_text(state.loss), evaluated),
        *left,
        Tile("step time", seconds_text(state.step_s), planned),
    ]
    tiles += [] if rate is None else [Tile("samples/s", rate_text(rate))]
    if state.bubble is not None:
        expected = "" if state.planned_bubble is None else f"planned {percent_text(state.planned_bubble)}"
        tiles.append(Tile("bubble", percent_text(state.bubble), expected))
    return tiles


def _loss_text(loss: float) -> str:
    return f"{loss:.5g}" if abs(loss) >= 1e-3 else f"{loss:.3g}"


def _facts(state: RunState, now_unix_s: float) -> list[tuple[str, str]]:
    """Returns further names and figures."""
    saved, rows = state.checkpoint, list[tuple[str, str]]()
    if saved is not None:
        ago = elapsed_text(now_unix_s - saved.saved_unix_s)
        rows.append(("last checkpoint", f"step {saved.step}, {ago} ago, {saved.folder}"))
    if state.learning_rate is not None:
        rows.append(("learning rate", f"{state.learning_rate:.3g}"))
    if state.grad_norm is not None:
        rows.append(("gradient norm", f"{state.grad_norm:.4g}"))
    if state.expert_imbalance is not None:
        rows.append(("fullest rank's rows of experts", imbalance_text(state.expert_imbalance)))
    if state.replans:
        rows.append(("planned again", f"{state.replans} times"))
    return rows


def _timeline(timeline: Timeline, state: RunState) -> str:
    devices = [device.name for device in state.devices]
    return timeline_svg("timeline", timeline, timeline.duration_s or 1.0, devices)


def _cause_text(cause: str) -> str:
    return "messages" if cause == "boundary" else cause


def memory_svg(devices: Sequence[RunDevice]) -> str:
    """Returns two bars for each device: planned memory by cause, and below it what is measured.

    A line marks the device's memory where it lies within the figure.
    """
    end, _ = _memory_end(devices)
    row = LABEL + BAR + _MEASURED + 2 + GAP
    about = "; ".join(f"{d.name} {bytes_text(d.memory_bytes)}" for d in devices)
    svg = Svg("memory", len(devices) * row + _AXIS, "Memory by device, planned and measured", about)
    _bytes_axis(svg, end, len(devices) * row)
    for number, device in enumerate(devices):
        _device_bars(svg, device, number * row, end)
    return svg.text()


def _memory_end(devices: Sequence[RunDevice]) -> tuple[float, bool]:
    """Returns the end of the figure's axis, and whether the devices' memory lies within it."""
    most = max((max(d.memory_bytes, sum(d.planned_by_cause), d.reserved_bytes) for d in devices), default=0)
    limit = max((d.device_bytes for d in devices), default=0)
    is_drawn = limit > 0 and most > SLIVER * limit
    return 1.02 * max(most, limit if is_drawn else 0, 1), is_drawn


def _device_bars(svg: Svg, device: RunDevice, top: float, end: float) -> None:
    planned = f", planned {bytes_text(device.planned_bytes)}" if device.planned_bytes else ""
    name, text = f"rank {device.rank} · {device.name}", f"{bytes_text(device.memory_bytes)}{planned}"
    svg.add("text", name, x="0", y=top + LABEL - 6, class_="label halo strong")
    svg.add("text", text, x="100%", y=top + LABEL - 6, class_="label halo", text_anchor="end")
    left = 0.0
    for cause, size in zip(CAUSES, device.planned_by_cause, strict=False):
        where = {"x": percent(left / end), "y": top + LABEL, "width": percent(size / end), "height": BAR}
        tip = f"{device.name} {_cause_text(cause)}, planned: {bytes_text(size)}"
        svg.add("rect", tip=tip, fill=COLOURS[cause], class_="cell", **where)
        left += size
    where = {"x": "0", "y": top + LABEL + BAR + 2, "height": _MEASURED}
    tip = f"{device.name} measured: {bytes_text(device.memory_bytes)}"
    svg.add("rect", tip=tip, width=percent(device.memory_bytes / end), class_="measured", **where)
    if 0 < device.device_bytes <= end:
        x = percent(device.device_bytes / end)
        tip = f"{device.name} has {bytes_text(device.device_bytes)}"
        svg.add("line", tip=tip, x1=x, x2=x, y1=top + LABEL - 2, y2=top + LABEL + BAR + 12, class_="limit")


def _bytes_axis(svg: Svg, end: float, bottom: float) -> None:
    unit, size = byte_unit(end)
    for tick in ticks(0.0, end / size, 4):
        fraction = tick * size / end
        svg.add("line", x1=percent(fraction), x2=percent(fraction), y1="0", y2=bottom, class_="grid")
        anchor = "start" if fraction < 0.02 else "end" if fraction > 0.9 else "middle"
        text = f"{tick:g} {unit}" if tick else "0"
        svg.add("text", text, x=percent(fraction), y=bottom + 16, class_="tick", text_anchor=anchor)


def loss_svg(points: Sequence[LossPoint]) -> str:
    """Returns the losses over the steps that were told, two at least."""
    losses = [p.loss for p in points]
    chart = StepChart(
        key="loss",
        title="Loss over steps",
        steps=[p.step for p in points],
        values=losses,
        text=lambda loss: f"{loss:.4g}",
        smoothed=smoothed(losses),
    )
    return step_svg(chart)
