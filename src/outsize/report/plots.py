"""Draws figures as PNG files, for slides and papers. Only this file imports matplotlib, and only when
called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from outsize.errors import BadOption
from outsize.ir.formatting import byte_unit, bytes_text, percent_text, seconds_text
from outsize.ir.plan import Plan
from outsize.ir.schedule import Action
from outsize.ir.timeline import Span, Timeline
from outsize.report.palette import CAUSES, ink, shade
from outsize.report.tables.placement import holdings
from outsize.report.tables.plan_tables import causes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches, and dots per inch.
WIDTH, ROW, MARGIN, DPI = 10.0, 0.42, 1.1, 160
SOFT, LINE, IDLE, LIMIT, LOSS = "#59616e", "#e2e5ea", "#eceef2", "#c3272f", "#1f5fa8"
INK, BAR = "#2b303a", "#aab2bf"
# A label of n characters fits a bar when the figure is this many characters wide.
CHARACTERS = 120
# A device's limit is drawn when it is at most this many times the peak.
NEAR = 3


def timeline_png(predicted: Timeline | None, measured: Timeline | None, path: str | Path) -> None:
    """Draws both timelines on one time axis, a row for each rank.

    Raises BadOption without matplotlib.
    """
    timelines = [t for t in (predicted, measured) if t is not None]
    end_s = max((t.duration_s for t in timelines), default=0.0)
    if not end_s:
        raise BadOption("there is no step to draw", next_step="give a predicted or a measured timeline")
    rows = sum(t.ranks for t in timelines)
    figure, axes = _figure(rows * ROW + len(timelines) * MARGIN, len(timelines), [t.ranks for t in timelines])
    for axis, timeline in zip(axes, timelines, strict=True):
        _draw_timeline(axis, timeline, end_s)
    names = {"F": "forward", "B": "backward"}
    if any("W" in span.action for timeline in timelines for span in timeline.spans):
        names["W"] = "gradient of weights"
    for kind, name in names.items():
        axes[0].barh(0, 0, color=shade(kind, 1), label=name)
    axes[0].legend(ncols=len(names), loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    _save(figure, path)


def memory_png(plan: Plan, path: str | Path) -> None:
    """Draws the predicted bytes at the peak of a step, by cause, for each device.

    Raises BadOption without matplotlib, or for a plan without expectations.
    """
    if plan.expected is None:
        raise BadOption(
            "the plan has no figures to draw", next_step="outsize plan MODEL --plan FILE to price it"
        )
    device_holdings = holdings(plan, plan.expected)
    stages = [h.figures for h in device_holdings]
    unit, size = byte_unit(max((f.peak_bytes for f in stages), default=0))
    near_limits = [f.device_bytes for f in stages if f.device_bytes <= NEAR * f.peak_bytes]
    end = max([f.peak_bytes for f in stages] + near_limits) / size
    figure, (axis,) = _figure(len(stages) * ROW * 1.3 + 1.3, 1, [1])
    for number, figures in enumerate(stages):
        left = 0.0
        for cause, number_bytes in causes(figures):
            width = number_bytes / size
            label = cause if number == 0 else None
            axis.barh(number, width, 0.62, left, color=CAUSES[cause], edgecolor="white", lw=0.8, label=label)
            left += width
        limit = f" of {bytes_text(figures.device_bytes)}" if figures.device_bytes else ""
        axis.text(end * 1.02, number, f"{bytes_text(figures.peak_bytes)}{limit}", va="center", fontsize=9)
        if figures.device_bytes in near_limits and figures.device_bytes:
            axis.vlines(figures.device_bytes / size, number - 0.4, number + 0.4, colors=LIMIT, lw=2.5)
    _rows(axis, [h.name for h in device_holdings])
    axis.set_xlim(0, end * 1.22)
    axis.set_xlabel(f"{unit} at the peak of a step, predicted", color=SOFT)
    axis.legend(ncols=len(CAUSES), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=9)
    _save(figure, path)


def loss_png(losses: Sequence[float], path: str | Path) -> None:
    """Draws the loss over the steps of a run.

    Raises BadOption without matplotlib.
    """
    figure, (axis,) = _figure(3.6, 1, [1])
    axis.plot(range(1, len(losses) + 1), losses, color=LOSS, lw=1.8)
    axis.set_xlabel("step", color=SOFT)
    axis.set_ylabel("loss", color=SOFT)
    axis.grid(axis="y", color=LINE)
    axis.margins(x=0.01)
    _save(figure, path)


def laps_bars_png(laps: Mapping[str, Sequence[float]], path: str | Path) -> None:
    """Draws a bar for each system: mean seconds of a step, standard deviation, speed-up over the first.

    Raises BadOption without matplotlib.
    """
    figure, (axis,) = _figure(4.2, 1, [1])
    base = fmean(next(iter(laps.values())))
    for number, seconds in enumerate(laps.values()):
        mean, spread = fmean(seconds), _deviation(seconds)
        axis.bar(number, mean, 0.62, color=LOSS if number == len(laps) - 1 else BAR, yerr=spread, capsize=5)
        label = f"{seconds_text(mean)}\n{base / mean:.2f}x"
        axis.text(number, mean + spread, label, ha="center", va="bottom", fontsize=9)
    axis.set_xticks(range(len(laps)), list(laps), fontsize=10)
    _seconds_axis(axis)
    _save(figure, path)


def laps_curve_png(
    laps: Mapping[int, Sequence[float]],
    levels: Mapping[str, Sequence[float]],
    xlabel: str,
    path: str | Path,
) -> None:
    """Draws mean seconds of a step with standard deviations over a choice, other systems as lines across.

    Raises BadOption without matplotlib.
    """
    figure, (axis,) = _figure(4.2, 1, [1])
    means, spreads = [fmean(s) for s in laps.values()], [_deviation(s) for s in laps.values()]
    axis.errorbar(list(laps), means, spreads, color=INK, marker="o", lw=1.8, capsize=4, label="pipelined")
    for number, (name, seconds) in enumerate(levels.items()):
        last = number == len(levels) - 1
        color, dashes = (LOSS, "-") if last else (SOFT, ("--", ":")[number % 2])
        axis.axhline(fmean(seconds), lw=1.6, label=name, color=color, ls=dashes)
    axis.set_xscale("log")
    axis.set_xticks(list(laps), [str(size) for size in laps])
    axis.minorticks_off()
    axis.set_xlabel(xlabel, color=SOFT)
    axis.legend(frameon=False, fontsize=9, ncols=len(levels) + 1, loc="lower left", bbox_to_anchor=(0, 1))
    _seconds_axis(axis)
    _save(figure, path)


def _seconds_axis(axis: Axes) -> None:
    axis.set_ylim(bottom=0)
    axis.margins(y=0.18)
    axis.set_ylabel("seconds of a step", color=SOFT)
    axis.grid(axis="y", color=LINE)


def _deviation(seconds: Sequence[float]) -> float:
    return stdev(seconds) if len(seconds) > 1 else 0.0


def _draw_timeline(axis: Axes, timeline: Timeline, end_s: float) -> None:
    start_s = min((s.start_s for s in timeline.spans), default=0.0)
    for rank in range(timeline.ranks):
        axis.barh(rank, timeline.duration_s, 0.72, 0.0, color=IDLE)
    for span in (s for s in timeline.spans if s.lane == "compute"):
        _draw_span(axis, span, start_s, end_s)
    busy = [percent_text(timeline.utilisation(rank)) for rank in range(timeline.ranks)]
    _rows(axis, [f"rank {rank}  {share}" for rank, share in enumerate(busy)])
    axis.set_xlim(0, end_s)
    axis.xaxis.set_major_formatter(lambda value, _: seconds_text(value) if value else "0")
    title = f"{timeline.source}: {seconds_text(timeline.duration_s)}, bubble {percent_text(timeline.bubble)}"
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")


def _draw_span(axis: Axes, span: Span, start_s: float, end_s: float) -> None:
    action = Action.parse(span.action)
    fill = shade(str(action.kind), action.microbatch)
    left = span.start_s - start_s
    axis.barh(span.rank, span.duration_s, 0.72, left, color=fill, edgecolor="white", lw=0.6)
    label = f"{action.kind}{action.microbatch}"
    if span.duration_s / end_s * CHARACTERS >= len(label) + 1:
        middle = left + span.duration_s / 2
        axis.text(middle, span.rank, label, ha="center", va="center", fontsize=7.5, color=ink(fill))


def _figure(height: float, rows: int, ratios: Sequence[int]) -> tuple[Figure, list[Axes]]:
    """Returns a figure with axes below each other, without pyplot's global state."""
    figure = _figure_class()(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    grid: Any = figure.subplots(rows, 1, squeeze=False, height_ratios=ratios)
    axes: list[Axes] = list(grid[:, 0])
    for axis in axes:
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.spines["bottom"].set_color(LINE)
        axis.tick_params(length=0, labelsize=9, labelcolor=SOFT)
        axis.set_axisbelow(True)
    return figure, axes


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadOption(
            "plots need matplotlib, which is not installed", next_step="pip install 'outsize[plot]'"
        ) from None
    return Figure


def _rows(axis: Axes, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()


def _save(figure: Figure, path: str | Path) -> None:
    figure.savefig(path)
