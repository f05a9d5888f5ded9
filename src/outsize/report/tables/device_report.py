"""Builds the table of what `outsize doctor --gpu` found, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from outsize.ir.answers.device_report import CheckResult, DeviceReport, Outcome
from outsize.ir.formatting import bytes_text, seconds_text

_STYLES: Final[dict[Outcome, str]] = {"holds": "green", "fails": "bold red", "measured": "", "skipped": "dim"}


def device_report_tables(report: DeviceReport) -> Group:
    """Returns each check with its outcome and its figures, then a line that counts the outcomes."""
    table = Table.grid(padding=(0, 2))
    for result in report.results:
        table.add_row(Text(result.outcome, _STYLES[result.outcome]), Text(result.question))
        for name, value in _details(result):
            table.add_row("", Text(f"  {name}  {value}", "dim"))
    counts = {outcome: sum(r.outcome == outcome for r in report.results) for outcome in _STYLES}
    line = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    processes = "1 process" if report.processes == 1 else f"{report.processes} processes"
    return Group(table, Text(f"{line}; {report.device_type}, {processes}", "bold"))


def _details(result: CheckResult) -> Iterator[tuple[str, str]]:
    for name, value in result.figures.items():
        yield name.replace("_", " "), _figure(name, value)
    if result.detail:
        yield ("needs" if result.outcome == "skipped" else "because"), result.detail


def _figure(name: str, value: float) -> str:
    """Returns a figure in the unit that its name ends with."""
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:.2f} GB/s"
    if name.endswith("_flops_per_s"):
        return f"{value / 1e12:.3g} TFLOP/s"
    if name.endswith("_bytes"):
        return bytes_text(int(value))
    return seconds_text(value) if name.endswith("_s") else f"{value:.3g}"
