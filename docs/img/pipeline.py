"""Draw pipeline.svg from pipeline.json (measure.py writes that): a U-Net cut in two, and its step.

    python docs/img/pipeline.py

Above, the units in the order of the forward, as wide as they take long, with the values that jump over
others; below, one 1F1B step as predicted and as measured on one time axis. Colours follow the reader's theme.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from outsize.ir.schedule import Action
from outsize.report.palette import ink, shade
from outsize.report.ticks import ticks

HERE = Path(__file__).resolve().parent
WIDTH, LEFT, RIGHT = 960, 118, 20
INNER = WIDTH - LEFT - RIGHT
MODEL_TOP, MODEL_HEIGHT, ROW, BAR = 84, 30, 30, 24
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11.5px } .mute { fill: #59636e } .strong { font-weight: 600 }
.idle { fill: #eaeef2 } .grid { stroke: #d1d9e0 }
.cut { stroke: #cf222e; stroke-width: 2; stroke-dasharray: 5 3 }
.red { fill: #cf222e } .skip { fill: none; stroke: #8c959f; stroke-width: 1.5 }
.crossing { fill: none; stroke: #cf222e; stroke-width: 2 } .paper { fill: #ffffff }
.one { fill: #b6d7ef } .two { fill: #c9e7cf } .unit { stroke: #ffffff; stroke-width: 1 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .mute { fill: #9198a1 } .idle { fill: #262c36 } .grid { stroke: #3d444d }
  .cut, .crossing { stroke: #ff7b72 } .red { fill: #ff7b72 } .skip { stroke: #7d8590 }
  .paper { fill: #0d1117 }
  .one { fill: #1f4e79 } .two { fill: #1d5a35 } .unit { stroke: #0d1117 }
}
"""


def main() -> None:
    """Read, draw, write."""
    found = json.loads((HERE / "pipeline.json").read_text())
    svg = ET.Element(
        "svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} 376", "role": "img"}
    )
    ET.SubElement(svg, "title").text = "A U-Net cut in two stages, and its 1F1B step, predicted and measured"
    ET.SubElement(svg, "style").text = STYLE
    add(svg, "rect", width=WIDTH, height=376, class_="paper")
    draw_model(svg, found)
    end = 1.02 * max(span["end_s"] for key in ("predicted", "measured") for span in found[key]["spans"])
    draw_axis(svg, 160, 324, end)
    draw_timeline(svg, "Predicted", found["predicted"], 160, end)
    draw_timeline(svg, "Measured", found["measured"], 256, end)
    (HERE / "pipeline.svg").write_text(ET.tostring(svg, encoding="unicode") + "\n", encoding="utf-8")


def add(parent: ET.Element, tag: str, text: str = "", **attributes: Any) -> ET.Element:
    """An element; `class_` and `text_anchor` become `class` and `text-anchor`."""
    named = {
        k.rstrip("_").replace("_", "-"): f"{v:.5g}" if isinstance(v, float) else str(v)
        for k, v in attributes.items()
    }
    element = ET.SubElement(parent, tag, named)
    element.text = text or None
    return element


def draw_model(svg: ET.Element, found: dict[str, Any]) -> None:
    """Units as blocks, their modules' names below, skips as arcs above, the cut as a dashed line."""
    edges = [0.0]
    for unit in found["units"]:
        edges.append(edges[-1] + unit["s"])
    x = [LEFT + INNER * edge / edges[-1] for edge in edges]
    cut, middle = found["bounds"][1], MODEL_TOP + MODEL_HEIGHT / 2 + 4
    add(svg, "text", "a U-Net,", x=8, y=middle - 7, class_="strong")
    add(svg, "text", "unmodified", x=8, y=middle + 9, class_="strong")
    for number in range(len(found["units"])):
        where = {"x": x[number], "width": x[number + 1] - x[number], "y": MODEL_TOP, "height": MODEL_HEIGHT}
        add(svg, "rect", **where, class_=f"unit {'one' if number < cut else 'two'}")
    for name, group in groupby(enumerate(found["units"]), key=lambda pair: pair[1]["name"].split(".")[0]):
        members = [number for number, _ in group]
        left, right = x[members[0]], x[members[-1] + 1]
        if right - left > 7 * len(name):
            add(svg, "text", name, x=(left + right) / 2, y=middle, text_anchor="middle", class_="small")
    for value in found["values"]:
        far = [c for c in value["consumers"] if c > value["producer"] + 1]
        for consumer in far:
            draw_skip(
                svg,
                x[value["producer"] + 1],
                x[consumer],
                value["producer"] < cut <= consumer,
                value["bytes"],
            )
    add(svg, "line", x1=x[cut], x2=x[cut], y1=MODEL_TOP - 14, y2=MODEL_TOP + MODEL_HEIGHT + 14, class_="cut")
    for side, text, anchor in ((-8, "stage 0, rank 0", "end"), (8, "stage 1, rank 1", "start")):
        add(
            svg,
            "text",
            text,
            x=x[cut] + side,
            y=MODEL_TOP + MODEL_HEIGHT + 18,
            text_anchor=anchor,
            class_="small",
        )


def draw_skip(svg: ET.Element, left: float, right: float, crossing: bool, size: int) -> None:
    """An arc from where a value is made to where it is used; red when it crosses the cut."""
    top = MODEL_TOP - 26 - 0.085 * (right - left)
    foot = MODEL_TOP - 2
    path = f"M {left:.1f} {foot} C {left:.1f} {top:.1f}, {right:.1f} {top:.1f}, {right:.1f} {foot}"
    add(svg, "path", d=path, class_="crossing" if crossing else "skip")
    if crossing:
        text = f"skip, {size / 2**20:.1f} MiB a microbatch"
        add(svg, "text", text, x=(left + right) / 2, y=top + 8, text_anchor="middle", class_="small red")


def draw_timeline(svg: ET.Element, title: str, timeline: dict[str, Any], top: float, end: float) -> None:
    """Two rows of compute."""
    spans = [s for s in timeline["spans"] if s["lane"] == "compute"]
    start = min(s["start_s"] for s in timeline["spans"])
    length = max(s["end_s"] for s in timeline["spans"]) - start
    busy = sum(s["end_s"] - s["start_s"] for s in spans) / (2 * length)
    add(svg, "text", title, x=8, y=top + 17, class_="strong")
    add(svg, "text", f"{length * 1e3:.0f} ms,", x=8, y=top + 34, class_="small mute")
    add(svg, "text", f"bubble {1 - busy:.0%}", x=8, y=top + 49, class_="small mute")
    for rank in (0, 1):
        add(svg, "rect", x=LEFT, y=top + rank * ROW, width=INNER * length / end, height=BAR, class_="idle")
        for span in (s for s in spans if s["rank"] == rank):
            draw_span(svg, span, start, top + rank * ROW, end)


def draw_span(svg: ET.Element, span: dict[str, Any], start: float, top: float, end: float) -> None:
    """One forward or backward of a microbatch."""
    action = Action.parse(span["action"])
    left, width = INNER * (span["start_s"] - start) / end, INNER * (span["end_s"] - span["start_s"]) / end
    fill = shade(str(action.kind), action.microbatch)
    add(svg, "rect", x=LEFT + left, y=top, width=width, height=BAR, fill=fill)
    if width > 18:
        where = {"x": LEFT + left + width / 2, "y": top + 16.5, "text_anchor": "middle"}
        add(
            svg,
            "text",
            f"{action.kind}{action.microbatch}",
            **where,
            class_="small",
            style=f"fill: {ink(fill)}",
        )


def draw_axis(svg: ET.Element, top: float, bottom: float, end: float) -> None:
    """Milliseconds."""
    for tick in ticks(0.0, end * 1e3, 6):
        x = LEFT + INNER * tick / 1e3 / end
        add(svg, "line", x1=x, x2=x, y1=top - 8, y2=bottom, class_="grid")
        add(svg, "text", f"{tick:g} ms", x=x, y=bottom + 18, text_anchor="middle", class_="small mute")
    add(svg, "text", "F: forward, B: backward of a microbatch", x=LEFT, y=bottom + 36, class_="small mute")


if __name__ == "__main__":
    main()
