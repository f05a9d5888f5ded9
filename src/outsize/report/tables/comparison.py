"""Builds the table of `outsize compare`: what differs between two plans or runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.ir.answers.runs.comparison import ReportComparison, ReportDifference
from outsize.ir.formatting import bytes_text, percent_text, rate_text, seconds_text
from outsize.report.tables import table_style
from outsize.report.tables.stage_units import short_units


def comparison_tables(found: ReportComparison) -> Group:
    """Returns the choices and stages that differ, then the figures of time and memory side by side."""
    heading = Text.assemble((found.first, "bold"), " against ", (found.second, "bold"))
    parts: list[RenderableType] = []
    if found.same_plan:
        parts.append(Text("The plans decide the same."))
    if found.choices:
        rows = [(row.what, _choice(row.first), _choice(row.second)) for row in found.choices]
        parts.append(_table("Plan", rows, ()))
    if found.stages:
        cuts = table_style.table(("stage", "right"), ("units", "left"), ("instead", "left"))
        for row in found.stages:
            cuts.add_row(str(row.stage), short_units(row.first) or "-", short_units(row.second) or "-")
        parts.append(Group(Text("Stages", "bold"), cuts))
    for title, rows in (("Time", found.time), ("Memory", found.memory)):
        if rows:
            parts.append(_table(title, map(_cells, rows), ("change",)))
    return Group(heading, *table_style.spaced(*parts))


def _table(title: str, rows: Iterable[Sequence[str]], more: Sequence[str]) -> Group:
    made = table_style.table(("", "left"), *table_style.rights("first", "second", *more))
    for row in rows:
        made.add_row(*row)
    return Group(Text(title, "bold"), made)


def _cells(row: ReportDifference) -> tuple[str, str, str, str]:
    return _name(row.what), _figure(row.what, row.first), _figure(row.what, row.second), _change(row)


def _name(what: str) -> str:
    return what.replace("step_s", "step").replace("_per_s", "/s").replace("_", " ")


def _choice(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _figure(what: str, value: object) -> str:
    if not isinstance(value, int | float):
        return "-"
    if what.endswith("samples_per_s"):
        return rate_text(value)
    if what.endswith("step_s"):
        return seconds_text(value)
    if what.endswith("bubble"):
        return percent_text(value)
    if what == "last loss":
        return f"{value:.4f}"
    return f"{value:.4g}" if what == "steps" or what.startswith("last ") else bytes_text(value)


def _change(row: ReportDifference) -> str:
    """Returns `+12 %`; a bubble, and what the last step had, change by points of their own, which the figures
    show.
    """
    if row.ratio is None or row.what.endswith("bubble") or row.what.startswith("last "):
        return "-" if row.first is None or row.second is None else ""
    fraction = row.ratio - 1
    return "=" if fraction == 0 else f"{'+' if fraction > 0 else '-'}{percent_text(abs(fraction))}"
