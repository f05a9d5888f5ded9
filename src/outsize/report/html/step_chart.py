"""Draws one figure of a run over its steps: the loss with a smoothed line, seconds, learning rate, norm.

    value |\\                         thin: each step, thick: smoothed
          | \\/\\__ ------------      dashed: what the plan expects
          +---------------------- step

The smoothed value is the exponential mean with the correction for its start (Kingma and Ba,
arXiv 1412.6980, sec. 3): s <- w s + (1 - w) x, shown as s / (1 - w^n) after n finite values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Final, final

from outsize.report.html.svg import Svg, percent
from outsize.report.ticks import ticks

HEIGHT: Final = 180  # pixels
AXIS: Final = 26
_MARGIN: Final = 0.06
# A value beyond this multiple of the median lies outside of a figure that begins at 0, as a first step does.
_FAR: Final = 2.5
_MOST_POINTS: Final = 2000


@final
@dataclass(frozen=True, slots=True)
class StepChart:
    """A value of each step, two at least; None where it is no finite number, and the line has a gap.

    `smoothed` has a value for each step, too. `expected` is drawn as a line across. `from_zero`: the axis
    begins at 0, and a few steps that are much higher than the others lie beyond it.
    """

    key: str
    title: str
    steps: Sequence[int]
    values: Sequence[float | None]
    text: Callable[[float], str]
    smoothed: Sequence[float | None] = ()
    expected: float | None = None
    from_zero: bool = False

    @property
    def is_drawn(self) -> bool:
        """Tells whether there is a line to draw."""
        return len(self.values) > 1

    @property
    def bounds(self) -> tuple[float, float]:
        """Returns the lower and upper end of the axis."""
        finite = [v for v in self.values if v is not None] or [0.0]
        if self.from_zero:
            far = _FAR * median(finite)
            return 0.0, 1.1 * max(*(v for v in finite if v <= far), self.expected or 0.0, 0.0) or 1.0
        low, high = min(finite), max(finite)
        margin = (high - low) * _MARGIN or abs(high) * 0.1 or 1.0
        return low - margin, high + margin

    @property
    def beyond(self) -> list[int]:
        """Returns the steps whose values lie beyond the axis."""
        high = self.bounds[1]
        return [s for s, v in zip(self.steps, self.values, strict=True) if v is not None and v > high]


def smoothing_steps(count: int) -> int:
    """Returns over about how many steps a run of `count` steps is smoothed: a twentieth, from 2 to 50."""
    return max(2, min(50, count // 20))


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Returns the exponential mean at each value; where a value is None, so is its mean."""
    weight = 1 - 1 / smoothing_steps(len(values))
    mean, known, result = 0.0, 0, list[float | None]()
    for value in values:
        if value is not None:
            mean, known = weight * mean + (1 - weight) * value, known + 1
        result.append(None if value is None else mean / (1 - weight**known))
    return result


def step_svg(chart: StepChart) -> str:
    """Returns the figure."""
    low, high = chart.bounds
    finite = [v for v in chart.values if v is not None]
    ends = f", from {chart.text(finite[0])} to {chart.text(finite[-1])}" if finite else ""
    svg = Svg(chart.key, HEIGHT + AXIS, chart.title, f"steps {chart.steps[0]} to {chart.steps[-1]}{ends}")
    rows = [(tick, HEIGHT * (high - tick) / (high - low)) for tick in ticks(low, high, 4)]
    for _, y in rows:
        svg.add("line", x1="0", x2="100%", y1=y, y2=y, class_="grid")
    _step_axis(svg, chart.steps[0], chart.steps[-1])
    span = max(1, chart.steps[-1] - chart.steps[0])
    area = svg.nest(f"0 0 {span} 1", x="0", y="0", width="100%", height=f"{HEIGHT}")
    if chart.expected is not None and low <= chart.expected <= high:
        y = (high - chart.expected) / (high - low)
        area.add("line", x1="0", x2=f"{span}", y1=y, y2=y, class_="expected")
    for path in _paths(chart, chart.values):
        area.add("polyline", points=path, class_="loss faint" if chart.smoothed else "loss")
    for path in _paths(chart, chart.smoothed):
        area.add("polyline", points=path, class_="loss")
    for tick, y in rows:
        svg.add("text", chart.text(tick) if tick else "0", x="0", y=y - 4, class_="tick halo")
    return svg.text()


def _step_axis(svg: Svg, first: int, last: int) -> None:
    svg.add("text", "step", x="0", y=HEIGHT + 18, class_="tick")
    for tick in (t for t in ticks(first, last, 5) if t == int(t)):
        fraction = (tick - first) / max(1, last - first)
        if fraction >= 0.1:
            anchor = "end" if fraction > 0.94 else "middle"
            svg.add(
                "text", f"{tick:.0f}", x=percent(fraction), y=HEIGHT + 18, class_="tick", text_anchor=anchor
            )


def _paths(chart: StepChart, values: Sequence[float | None]) -> Iterator[str]:
    """Yields `x,y x,y ...` of each run of values that are there, in steps and shares of the height.

    Of a long run as many steps are drawn as a screen has pixels.
    """
    low, high = chart.bounds
    stride = max(1, len(values) // _MOST_POINTS)
    points = list(zip(chart.steps, values, strict=False))[::stride]
    for is_there, run in groupby(points, key=lambda point: point[1] is not None):
        if is_there:
            known = ((step - chart.steps[0], value) for step, value in run if value is not None)
            yield " ".join(f"{x},{(high - value) / (high - low):.5f}" for x, value in known)
