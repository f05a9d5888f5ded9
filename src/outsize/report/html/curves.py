"""Draws what-if curves: samples per second by the value of one choice, the plan's own value marked."""

from __future__ import annotations

from outsize.ir.answers.curve import ThroughputCurve
from outsize.ir.formatting import rate_text
from outsize.report.html.svg import Svg, percent
from outsize.report.ticks import ticks

# Heights in pixels, and the share of the width that stays free on both sides.
HEIGHT, HEAD, AXIS, MARGIN = 180, 26, 40, 0.13


def curve_svg(key: str, curve: ThroughputCurve) -> str:
    """Returns points in equal steps, since counts double; where nothing fits, a cross at the bottom says
    so.
    """
    rates = [rate for rate in curve.samples_per_s if rate is not None]
    top = 1.12 * max(rates, default=1.0)
    svg = Svg(key, HEAD + HEIGHT + AXIS, f"Samples per second by {curve.choice}", _about(curve))
    for tick in ticks(0.0, top, 4):
        y = HEAD + HEIGHT * (1 - tick / top)
        svg.add("line", x1="0", x2="100%", y1=y, y2=y, class_="grid")
        svg.add("text", rate_text(tick) if tick else "0", x="0", y=y - 4, class_="tick halo")
    places = [_place(i, len(curve.values)) for i in range(len(curve.values))]
    _line(svg, curve, places, top)
    for x, value, rate in zip(places, curve.values, curve.samples_per_s, strict=True):
        _point(svg, x, value, rate, top, chosen=value == curve.chosen)
    svg.add("text", curve.choice, x="100%", y=HEAD + HEIGHT + 36, class_="tick", text_anchor="end")
    return svg.text()


def _about(curve: ThroughputCurve) -> str:
    pairs = zip(curve.values, curve.samples_per_s, strict=True)
    return "; ".join(f"{v}: {'nothing fits' if r is None else rate_text(r)}" for v, r in pairs)


def _place(index: int, count: int) -> float:
    return MARGIN + (1 - 2 * MARGIN) * (index / (count - 1) if count > 1 else 0.5)


def _line(svg: Svg, curve: ThroughputCurve, places: list[float], top: float) -> None:
    area = svg.nest("0 0 1 1", x="0", y=f"{HEAD}", width="100%", height=f"{HEIGHT}")
    pairs = zip(places, curve.samples_per_s, strict=True)
    points = " ".join(f"{x:.5f},{1 - rate / top:.5f}" for x, rate in pairs if rate is not None)
    area.add("polyline", points=points, class_="loss")


def _point(svg: Svg, x: float, value: int, rate: float | None, top: float, *, chosen: bool) -> None:
    where = {"x": percent(x), "text_anchor": "middle"}
    mark = "label strong" if chosen else "label"
    svg.add("text", f"{value}", y=HEAD + HEIGHT + 18, class_=mark, **where)
    if rate is None:
        svg.add("text", "✗ does not fit", y=HEAD + HEIGHT - 8, class_="label over", **where)
        return
    y = HEAD + HEIGHT * (1 - rate / top)
    tip = f"{value}: {rate_text(rate)} samples/s"
    kind = "point chosen" if chosen else "point"
    svg.add("circle", tip=tip, cx=percent(x), cy=y, r=6 if chosen else 4, class_=kind)
    text = f"{rate_text(rate)} chosen" if chosen else rate_text(rate)
    svg.add("text", text, y=y - 12, class_=f"{mark} halo", **where)
