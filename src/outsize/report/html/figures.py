"""Draws the figures of the HTML report: timelines on one time axis, memory by cause."""

from __future__ import annotations

from collections.abc import Sequence

from outsize.ir.answers.runs.recorded_run import MeasuredMemory
from outsize.ir.formatting import byte_unit, bytes_text, percent_text, seconds_text
from outsize.ir.plan import Expected, Plan, StageFigures
from outsize.ir.schedule import Action
from outsize.ir.timeline import Span, Timeline
from outsize.report.html.svg import Svg, percent
from outsize.report.palette import CAUSES, ink, shade
from outsize.report.tables.placement import DeviceMemory, device_memory, holdings
from outsize.report.tables.plan_tables import causes, measured_causes
from outsize.report.ticks import ticks

# Pixels.
LABEL, BAR, THIN, STRIP, GAP, AXIS = 18, 24, 12, 6, 14, 26
ROW = LABEL + BAR + STRIP + GAP
# A label of n characters fits a bar when the figure is this many characters wide.
CHARACTERS = 130
# Memory is drawn up to the devices' limit, unless the fullest device uses less than this share of it.
SLIVER = 0.2


def timeline_svg(key: str, timeline: Timeline, end_s: float, devices: Sequence[str]) -> str:
    """Returns one Timeline, a row for each rank: compute above, transfers and waits as a thin strip below.

    `end_s` is the axis's end, the same for all timelines of a page.
    """
    start_s = min((s.start_s for s in timeline.spans), default=0.0)
    height = timeline.ranks * ROW + AXIS
    title = f"{timeline.source.capitalize()} timeline"
    about = (
        f"{timeline.ranks} ranks, {seconds_text(timeline.duration_s)}, bubble {percent_text(timeline.bubble)}"
    )
    svg = Svg(key, height, title, about)
    ranks = timeline.ranks if several_stages(timeline) else 0
    _time_axis(svg, end_s, timeline.ranks * ROW)
    for rank in range(timeline.ranks):
        name = f"rank {rank}" + (f" · {devices[rank]}" if rank < len(devices) else "")
        top = rank * ROW
        busy = f"{percent_text(timeline.utilisation(rank))} busy"
        svg.add("text", name, x="0", y=top + LABEL - 6, class_="label halo strong")
        svg.add("text", busy, x="100%", y=top + LABEL - 6, class_="label halo", text_anchor="end")
        svg.add(
            "rect",
            x="0",
            y=top + LABEL,
            width=percent(timeline.duration_s / end_s),
            height=BAR,
            class_="idle",
        )
        for span in (s for s in timeline.spans if s.rank == rank):
            _draw_span(svg, span, top + LABEL, start_s, end_s, ranks)
    return svg.text()


def several_stages(timeline: Timeline) -> bool:
    """Returns whether a rank computes for more than one stage."""
    ranks_and_stages = {(s.rank, Action.parse(s.action).stage) for s in timeline.spans if s.lane == "compute"}
    return len(ranks_and_stages) > len({rank for rank, _ in ranks_and_stages})


def _draw_span(svg: Svg, span: Span, top: float, start_s: float, end_s: float, ranks: int) -> None:
    """Draws one span.

    `ranks` is 0 unless there are several stages on each rank: then bars name their stage, and later stages
    are lighter.
    """
    left, width = (span.start_s - start_s) / end_s, span.duration_s / end_s
    tip = (
        f"{span.action} {span.lane}: {seconds_text(span.start_s - start_s)} + {seconds_text(span.duration_s)}"
    )
    where = {"x": percent(left), "width": percent(width)}
    if span.lane != "compute":
        svg.add("rect", tip=tip, y=top + BAR + 2, height=STRIP - 2, class_=f"lane {span.lane}", **where)
        return
    action = Action.parse(span.action)
    fill = shade(str(action.kind), action.stage // ranks if ranks else action.microbatch)
    svg.add("rect", tip=tip, y=top, height=BAR, fill=fill, class_="cell", **where)
    label = str(action) if ranks else f"{action.kind}{action.microbatch}"
    if width * CHARACTERS >= len(label) + 1:
        middle = {"x": percent(left + width / 2), "y": top + BAR / 2 + 4, "text_anchor": "middle"}
        svg.add("text", label, class_="cell-label", fill=ink(fill), **middle)


def _time_axis(svg: Svg, end_s: float, bottom: float) -> None:
    for tick in ticks(0.0, end_s, 6):
        fraction = tick / end_s
        svg.add("line", x1=percent(fraction), x2=percent(fraction), y1="0", y2=bottom, class_="grid")
        anchor = "start" if fraction < 0.02 else "end" if fraction > 0.96 else "middle"
        text = seconds_text(tick) if tick else "0"
        svg.add("text", text, x=percent(fraction), y=bottom + 16, class_="tick", text_anchor=anchor)


def memory_svg(key: str, plan: Plan, expected: Expected, measured: Sequence[MeasuredMemory] = ()) -> str:
    """Returns a bar for each device, stacked by cause, with the device's limit where it lies within the
    figure; below it a bar of what was measured, if anything was.
    """
    shown = device_memory(plan, expected, measured)
    end = 1.02 * _end_bytes(plan, expected, shown)
    about = "; ".join(filter(None, map(_about, shown)))
    heights = [_row_height(row) for row in shown]
    svg = Svg(key, sum(heights) + AXIS, "Memory at the peak of a step, by cause", about)
    _bytes_axis(svg, end, sum(heights))
    top = 0
    for row, height in zip(shown, heights, strict=True):
        _device_row(svg, row, top, end)
        top += height
    return svg.text()


def _row_height(row: DeviceMemory) -> int:
    return GAP + (LABEL + BAR if row.planned else 0) + (LABEL + THIN if row.measured else 0)


def _about(row: DeviceMemory) -> str:
    planned = "" if row.planned is None else _memory_text(row.planned.device, row.planned.figures)
    return ", ".join(filter(None, (planned, f"{row.name} {_measured_text(row)}" if row.measured else "")))


def _measured_text(row: DeviceMemory) -> str:
    """Returns `measured 200 MiB (-3 %)`, against what is planned for the same device."""
    if row.measured is None:
        return ""
    text, planned = f"measured {bytes_text(row.measured.peak_bytes)}", row.planned
    if planned is None or not planned.figures.peak_bytes:
        return text
    change = row.measured.peak_bytes / planned.figures.peak_bytes - 1
    return f"{text} ({'+' if change >= 0 else ''}{percent_text(change)})"


def _device_row(svg: Svg, row: DeviceMemory, top: float, end: float) -> None:
    svg.add("text", row.name, x="0", y=top + LABEL - 6, class_="label strong")
    if row.planned is not None:
        figures = row.planned.figures
        over = " over" if 0 < figures.device_bytes < sure_bytes(figures) else ""
        text = _memory_text("", figures)
        svg.add("text", text, x="100%", y=top + LABEL - 6, class_=f"label halo{over}", text_anchor="end")
        _draw_stack(svg, row.planned.device, figures, top + LABEL, end)
        top += LABEL + BAR
    if row.measured is not None:
        text = _measured_text(row)
        svg.add("text", text, x="100%", y=top + LABEL - 4, class_="label halo", text_anchor="end")
        left = 0.0
        for cause, number in measured_causes(row.measured):
            where = {"x": percent(left / end), "width": percent(number / end)}
            tip = f"{row.name} {cause}, measured: {bytes_text(number)}"
            fill = CAUSES.get(cause, CAUSES["activations"])
            svg.add("rect", tip=tip, y=top + LABEL, height=THIN, fill=fill, class_="cell", **where)
            left += number


def _end_bytes(plan: Plan, expected: Expected, shown: Sequence[DeviceMemory]) -> float:
    """Returns the end of the axis: the longest bar, or the limit where that lies within the figure."""
    fullest, limit = _extremes(plan, expected)
    measured = max((row.measured.peak_bytes for row in shown if row.measured), default=0)
    return max(fullest, measured, limit if limit_drawn(plan, expected) else 0, 1)


def limit_drawn(plan: Plan, expected: Expected) -> bool:
    """Returns whether the memory figure reaches to the devices' limit."""
    fullest, limit = _extremes(plan, expected)
    return limit > 0 and fullest >= SLIVER * limit


def _extremes(plan: Plan, expected: Expected) -> tuple[int, int]:
    """Returns the highest P95 and the largest memory of a device."""
    device_holdings = holdings(plan, expected)
    fullest = max((sure_bytes(h.figures) for h in device_holdings), default=0)
    return fullest, max((h.figures.device_bytes for h in device_holdings), default=0)


def sure_bytes(figures: StageFigures) -> int:
    """Returns what has to fit: P95, or the peak where P95 is unknown."""
    return figures.p95_bytes or figures.peak_bytes


def sure_text(figures: StageFigures) -> str:
    """Returns `P95 79.0 GiB of 79.1 GiB (100 %)`, as much of it as is known."""
    text = f"P95 {bytes_text(figures.p95_bytes)}" if figures.p95_bytes else ""
    if figures.device_bytes:
        filled = percent_text(sure_bytes(figures) / figures.device_bytes)
        text += f" of {bytes_text(figures.device_bytes)} ({filled})"
    return text.strip()


def _memory_text(device: str, figures: StageFigures) -> str:
    joint = ", " if figures.p95_bytes else " "
    return f"{device} {bytes_text(figures.peak_bytes)}{joint}{sure_text(figures)}".strip(" ,")


def _draw_stack(svg: Svg, device: str, figures: StageFigures, top: float, end: float) -> None:
    left = 0.0
    for cause, number in causes(figures):
        where = {"x": percent(left / end), "y": top, "width": percent(number / end), "height": BAR}
        svg.add(
            "rect", tip=f"{device} {cause}: {bytes_text(number)}", fill=CAUSES[cause], class_="cell", **where
        )
        left += number
    if figures.p95_bytes > left:
        where = {"x": percent(left / end), "width": percent((figures.p95_bytes - left) / end)}
        tip = f"{device} P95: {bytes_text(figures.p95_bytes)}"
        svg.add("rect", tip=tip, y=top, height=BAR, class_="cell margin", **where)
    if 0 < figures.device_bytes <= end:
        x = percent(figures.device_bytes / end)
        tip = f"{device} has {bytes_text(figures.device_bytes)}"
        for layer in ("limit under", "limit"):
            svg.add("line", tip=tip, x1=x, x2=x, y1=top - 2, y2=top + BAR + 3, class_=layer)


def _bytes_axis(svg: Svg, end: float, bottom: float) -> None:
    unit, size = byte_unit(end)
    for tick in ticks(0.0, end / size, 5):
        fraction = tick * size / end
        svg.add("line", x1=percent(fraction), x2=percent(fraction), y1="0", y2=bottom, class_="grid")
        anchor = "start" if fraction < 0.02 else "end" if fraction > 0.94 else "middle"
        text = f"{tick:g} {unit}" if tick else "0"
        svg.add("text", text, x=percent(fraction), y=bottom + 16, class_="tick", text_anchor=anchor)
