"""Tabulates what each degree of offload costs, for a terminal of 80 columns and for a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.ir.formatting import byte_unit, rate_text, seconds_text
from outsize.ir.offload import Degree
from outsize.policies.weights import Weights
from outsize.report.tables import table_style

TITLE: Final = "What each degree of offload costs"
NOTE: Final = (
    "H2D, D2H: copies to the device and to the host; optim.: the host's optimizer. No step is shorter than "
    "the bound, the longest of the four; step and peak are predicted."
)
WITH_HOST: Final = "on host: what the host computes itself, which counts for the bound as well."


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """The table for a terminal and for a page: the head, and a row for each degree, of which one is
    chosen.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def degree_rows(degrees: Sequence[Degree], chosen: Weights) -> Rows | None:
    """Returns a row for each degree with its sums and the bound; None where there are no degrees."""
    if not degrees:
        return None
    memory, size = byte_unit(max(degree.peak_bytes for degree in degrees))
    unit, second = ("s", 1.0) if max(degree.step_s for degree in degrees) >= 1 else ("ms", 1e-3)
    rows, chosen_degrees = (
        list[tuple[str, ...]](),
        [degree for degree in degrees if degree.weights == chosen][-1:],
    )
    computes = any(degree.bound.host_s for degree in degrees)
    for degree in degrees:
        times = [rate_text(s / second) if s else "-" for s in _seconds(degree, computes=computes)]
        name = "disk" if degree.disk else degree.weights
        fits = "no" if not degree.fits else "chosen" if degree in chosen_degrees else "yes"
        rows.append((name, *times, f"{degree.peak_bytes / size:.1f}", fits))
    more, notes = (("on host",), (NOTE, WITH_HOST)) if computes else ((), (NOTE,))
    names = ("compute", "H2D", "D2H", "optim.", *more, "bound", "step", f"peak {memory}")
    return Rows((f"degree, {unit}", *names, "fits"), tuple(rows), " ".join([*notes, *_ways(degrees)]))


def degrees_table(degrees: Sequence[Degree], chosen: Weights) -> list[RenderableType]:
    """Returns a table with a row for each degree; an empty list where there are none."""
    degree_table = degree_rows(degrees, chosen)
    if degree_table is None:
        return []
    first, *names, last = degree_table.head
    made = table_style.table((first, "left"), *table_style.rights(*names), (last, "left"))
    for name, *figures, fits in degree_table.rows:
        bold = "bold" if fits == "chosen" else ""
        made.add_row(Text(name, bold), *figures, Text(fits, "red" if fits == "no" else bold))
    return [Group(Text(TITLE, "bold"), made, Text(degree_table.note))]


def _seconds(degree: Degree, *, computes: bool) -> tuple[float, ...]:
    four = tuple(degree.bound.parts.values())[:4]
    more = (degree.bound.host_s,) if computes else ()
    return *four, *more, degree.bound.step_s, degree.step_s


def _ways(degrees: Sequence[Degree]) -> Iterator[str]:
    """Yields how each degree runs, where they differ in more than the degree, and what a disk takes."""
    run_texts = {degree.weights: _way(degree) for degree in degrees}
    if len(set(run_texts.values())) > 1:
        yield "; ".join(f"{weights}: {run_text}" for weights, run_text in run_texts.items()) + "."
    for degree in (degree for degree in degrees if degree.disk):
        yield f"disk: {degree.weights}, and {seconds_text(degree.bound.disk_s)} of a disk."


def _way(degree: Degree) -> str:
    plural = "" if degree.microbatches == 1 else "es"
    again = ", recomputed" if degree.recompute else ""
    return f"{degree.microbatches} microbatch{plural}{again}"
