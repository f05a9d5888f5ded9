"""Draws the network as a row of units with its cuts: above what each unit computes, below what crosses.

Every boundary between two units could be a cut; the lower half shows the bytes that would cross there, so
that one sees whether a plan's cuts lie where few bytes cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from outsize.ir.formatting import bytes_text, seconds_text
from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.planner.costs.stage_edges import crossing_bytes
from outsize.report.html.svg import Svg, percent
from outsize.report.palette import STAGES

# Pixels: stage names, compute bars, gap, crossing bars, names of modules.
HEAD, WORK, GAP, CROSS, FOOT = 24, 110, 18, 80, 22
# A module's name is written when it has this share of the width for each character.
CHARACTER = 1 / 140


def network_svg(key: str, graph: ModelGraph, profile: Profile, bounds: Sequence[int]) -> str:
    """Returns the drawing; `bounds` as in `Plan.bounds`, `profile` is of this graph."""
    count = len(graph.units)
    names = [unit.name for unit in graph.units]
    runs = enumerate(pairwise(bounds))
    about = "; ".join(f"stage {stage}: {names[a]} to {names[b - 1]}" for stage, (a, b) in runs)
    svg = Svg(key, HEAD + WORK + GAP + CROSS + FOOT, "The cuts in the network", about)
    for stage, (first, end) in enumerate(pairwise(bounds)):
        _stage(svg, stage, first, end, count)
    _compute(svg, graph, profile, bounds)
    _crossing(svg, graph, bounds)
    _modules(svg, graph)
    for cut in bounds[1:-1]:
        x = percent(cut / count)
        svg.add("line", x1=x, x2=x, y1=HEAD - 6, y2=HEAD + WORK + GAP + CROSS, class_="limit")
    return svg.text()


def _stage(svg: Svg, stage: int, first: int, end: int, count: int) -> None:
    if (end - first) / count >= (len(f"stage {stage}") + 3) * CHARACTER:
        middle = percent((first + end) / 2 / count)
        svg.add("text", f"stage {stage}", x=middle, y="14", class_="label strong", text_anchor="middle")


def _compute(svg: Svg, graph: ModelGraph, profile: Profile, bounds: Sequence[int]) -> None:
    """Draws a bar for each unit, as high as its seconds."""
    seconds = [c.forward_s + c.backward_s for c in profile.units]
    highest, count = max(seconds) or 1.0, len(seconds)
    for stage, (first, end) in enumerate(pairwise(bounds)):
        for unit in range(first, end):
            height = max(1.0, WORK * seconds[unit] / highest)
            svg.add(
                "rect",
                tip=f"{graph.units[unit].name}: {seconds_text(seconds[unit])} a microbatch, stage {stage}",
                x=percent(unit / count),
                y=HEAD + WORK - height,
                width=percent(1 / count),
                height=height,
                fill=STAGES[stage % len(STAGES)],
            )


def _crossing(svg: Svg, graph: ModelGraph, bounds: Sequence[int]) -> None:
    """Draws hanging bars at every boundary, as deep as the bytes that cross it; those of the cuts stand
    out.
    """
    count, top = len(graph.units), HEAD + WORK + GAP
    sizes: list[int] = crossing_bytes(graph)[1:-1].tolist()
    largest = max(sizes, default=0) or 1
    for cut, size in enumerate(sizes, 1):
        svg.add(
            "rect",
            tip=f"before {graph.units[cut].name}: {bytes_text(size)} would cross",
            x=percent((cut - 0.5) / count),
            y=top,
            width=percent(1 / count),
            height=max(1.0, CROSS * size / largest),
            class_="crossing chosen" if cut in bounds else "crossing",
        )
    svg.add("text", f"crosses, at most {bytes_text(largest)}", x="0", y=top - 4, class_="tick halo")


def _modules(svg: Svg, graph: ModelGraph) -> None:
    """Draws the names of the outer modules below their units, where there is room."""
    count, y, start = len(graph.units), HEAD + WORK + GAP + CROSS + 16, 0
    for name, run in groupby(graph.units, key=lambda u: _outer(u.name)):
        length = len(list(run))
        if length / count >= (len(name) + 1) * CHARACTER:
            middle = percent((start + length / 2) / count)
            svg.add("text", name, x=middle, y=y, class_="tick", text_anchor="middle")
        start += length


def _outer(name: str) -> str:
    """Returns `layer3` for `backbone.layer3.5.conv1`: the first part that is not a mere wrapper."""
    parts = name.split(":")[0].split("#")[0].split(".")
    wrapped = len(parts) > 1 and parts[0] in ("backbone", "model", "transformer", "features")
    inner = parts[1] if wrapped else parts[0]
    return f"{inner}.{parts[2]}" if wrapped and inner in ("layers", "h") and len(parts) > 2 else inner
