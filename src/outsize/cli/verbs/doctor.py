"""Implements `outsize doctor`: what this machine offers, what is missing, and whether its devices do what
they should.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from outsize.cli import options
from outsize.cli.model_input import write_text
from outsize.cli.screen import Screen
from outsize.errors import BadOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.ir.answers.device_report import DeviceReport
    from outsize.ops.doctor.table import DeviceCheck

WIDTH: Final = 256
Gpu = Annotated[bool, typer.Option("--gpu", help="Check the accelerators here: numbers, memory, seconds.")]
Nproc = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Processes of joint checks (default: one per device).")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the report, which --cluster of other commands reads."),
]
Only = Annotated[
    str | None, typer.Option("--only", metavar="NAME,...", help="Run these checks alone, by their names.")
]
Width = Annotated[
    int, typer.Option("--width", min=16, help="Width of the checks' models; 32 is for slow devices.")
]


def doctor(
    gpu: Gpu = False,
    nproc: Nproc = None,
    only: Only = None,
    width: Width = WIDTH,
    out: Out = None,
    json: options.Json = False,
) -> None:
    """Show versions, devices, backends and limits here, and what is missing.

    With --gpu each check of the accelerators runs in processes of its own, with a time limit.
    """
    screen = Screen(json)
    if gpu:
        _deliver(screen, _report(screen, nproc, only, width, out), out)
        return
    if nproc is not None or only is not None or out is not None:
        raise BadOption("--nproc, --only and --out belong to --gpu", next_step="outsize doctor --gpu")
    from outsize.ops.doctor.health import doctor

    with screen.working("examining this machine"):
        health = doctor(os.environ)

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables.device_report import health_tables

        return [health_tables(health)]

    screen.result(health.model_dump(mode="json"), tables)


def _report(
    screen: Screen, nproc: int | None, only: str | None, width: int, out: Path | None
) -> DeviceReport:
    """Runs the checks, and writes the report after each of them, so that one that is interrupted leaves it.

    Raises BadOption where there is no accelerator, or no check of a name.
    """
    from outsize.cli.processes.device_checks import run_checks
    from outsize.device.accelerators import accelerator_type, device_count, spoken
    from outsize.ir.answers.device_report import CheckResult, DeviceReport
    from outsize.ops.doctor.health import doctor
    from outsize.ops.doctor.measured_cluster import measured_cluster

    kind, count = accelerator_type(), device_count()
    if kind is None:
        raise BadOption(
            "this machine has no accelerator to check",
            numbers=f"torch sees no {spoken()} device",
            next_step="outsize doctor, which says what is missing",
        )
    if nproc is not None and nproc > count:
        raise BadOption(
            f"--nproc {nproc} needs as many devices",
            numbers=f"torch sees {count}",
            next_step=f"--nproc {count}",
        )
    name, results = "doctor" if out is None else out.name, tuple[CheckResult, ...]()
    checks, processes = _chosen(only), nproc or count
    report = DeviceReport(health=doctor(os.environ), device_type=kind, processes=processes, results=results)
    with screen.bar("checking") as progress:
        for result in run_checks(checks, processes, width, progress):
            results = (*results, result)
            report = report.model_copy(
                update={"results": results, "cluster": measured_cluster(name, results)}
            )
            if out is not None:
                write_text(out, report.to_json() + "\n")
    return report


def _chosen(only: str | None) -> tuple[DeviceCheck, ...]:
    from outsize.ops.doctor.table import CHECKS

    if only is None:
        return CHECKS
    known = {check.name: check for check in CHECKS}
    names = [name.strip() for name in only.split(",")]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise BadOption(f"--only {wrong[0]}: no such check", next_step=f"--only with {', '.join(known)}")
    return tuple(known[name] for name in names)


def _deliver(screen: Screen, report: DeviceReport, out: Path | None) -> None:
    """Shows the report; the exit code is 1 where a check failed."""

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables.device_report import device_report_tables

        return [device_report_tables(report)]

    screen.result(report.model_dump(mode="json"), tables)
    if out is not None:
        screen.note(f"{out}: attach it to an issue, or plan with --cluster {out}")
    if report.failed:
        raise typer.Exit(1)
