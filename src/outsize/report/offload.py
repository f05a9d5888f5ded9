"""What each degree of offload costs, as a table of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.ir.offload import Degree, Weights
from outsize.ir.text import byte_unit, rate_text
from outsize.report import pieces

NOTE = (
    "H2D, D2H: copies to the device and to the host; optim.: the host's optimizer. No step is shorter than "
    "the bound, the longest of the four; step and peak are predicted."
)


def degrees_table(degrees: Sequence[Degree], chosen: Weights) -> list[RenderableType]:
    """A row for each, with the four sums and the bound; nothing where there are none."""
    if not degrees:
        return []
    memory, size = byte_unit(max(degree.peak_bytes for degree in degrees))
    unit, second = ("s", 1.0) if max(degree.step_s for degree in degrees) >= 1 else ("ms", 1e-3)
    names = ("compute", "H2D", "D2H", "optim.", "bound", "step", f"peak {memory}")
    made = pieces.table((f"degree, {unit}", "left"), *pieces.rights(*names), ("fits", "left"))
    for degree in degrees:
        times = [rate_text(seconds / second) if seconds else "-" for seconds in _seconds(degree)]
        name = Text(degree.weights, "bold" if degree.weights == chosen else "")
        made.add_row(name, *times, f"{degree.peak_bytes / size:.1f}", _fits(degree, chosen))
    note = Text(f"{NOTE} {_ways(degrees)}".strip())
    return [Group(Text("What each degree of offload costs", "bold"), made, note)]


def _seconds(degree: Degree) -> tuple[float, ...]:
    return *degree.bound.parts.values(), degree.bound.step_s, degree.step_s


def _fits(degree: Degree, chosen: Weights) -> Text:
    if not degree.fits:
        return Text("no", "red")
    return Text("chosen", "bold") if degree.weights == chosen else Text("yes")


def _ways(degrees: Sequence[Degree]) -> str:
    """How each of them runs, where they differ in more than the degree."""
    ways = {degree.weights: _way(degree) for degree in degrees}
    if len(set(ways.values())) == 1:
        return ""
    return "; ".join(f"{weights}: {way}" for weights, way in ways.items()) + "."


def _way(degree: Degree) -> str:
    plural = "" if degree.microbatches == 1 else "es"
    again = ", recomputed" if degree.recompute else ""
    return f"{degree.microbatches} microbatch{plural}{again}"
