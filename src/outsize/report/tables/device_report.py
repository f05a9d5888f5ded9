"""Builds the tables of `outsize doctor` in 80 columns: what a machine offers, and what `--gpu` found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from outsize.ir.answers.device_report import CheckResult, DeviceReport, Outcome
from outsize.ir.answers.health import Health
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


def health_tables(health: Health) -> Group:
    """Returns one line for each thing that works, then what is missing with what to do."""
    table = Table.grid(padding=(0, 2))
    for name, value in _health_rows(health):
        table.add_row(Text(name, "bold"), Text(value))
    if not health.missing:
        return Group(table, Text("nothing is missing"))
    return Group(table, Text("missing", "bold"), *(Text(f"  {line}") for line in health.missing))


def _health_rows(health: Health) -> Iterator[tuple[str, str]]:
    for name, version in health.versions.items():
        if version is not None:
            yield name, version
    yield "python", f"{health.python} on {health.system}"
    for device in health.devices:
        yield device.name, f"{device.kind}, {bytes_text(device.memory_bytes)}"
    yield "threads", f"{health.threads} in each process, of {health.cores} usable cores"
    yield "backends", ", ".join(f"{name} {'yes' if on else 'no'}" for name, on in health.backends.items())
    yield "shared memory", "between processes of this machine" if health.shared_memory else "no"
    yield "captures", f"an engine stores the programs of {health.captures} shapes (captures=)"
