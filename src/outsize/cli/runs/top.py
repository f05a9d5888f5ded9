"""Implements `outsize top`: the runs of this user on this machine, again each second on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from outsize.cli import options
from outsize.cli.screen import Screen
from outsize.ir.answers.run_state import RunOnMachine, runs_on_machine

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_S: Final = 1.0

Once = Annotated[bool, typer.Option("--once", help="Show the runs once, and exit.")]


def top(once: Once = False, json: options.Json = False) -> None:
    """Show the runs on this machine: steps, loss, time left, and each device's use against the plan.

    On a terminal the table is shown anew each second until Ctrl-C; elsewhere, with --once or --json, once.
    """
    if once or json or not sys.stdout.isatty():
        runs = runs_on_machine()
        Screen(json).result({"runs": [document(run) for run in runs]}, lambda: _tables(runs))
        return
    from rich.console import Group
    from rich.live import Live

    def shown() -> Group:
        return Group(*_tables(runs_on_machine()))

    with Live(shown(), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(shown(), refresh=True)


def document(run: RunOnMachine) -> dict[str, Any]:
    """Returns what --json gives of a run: what it has published, and what follows from that."""
    state = run.state
    derived = {} if state is None else {"samples_per_s": state.samples_per_s, "left_s": state.left_s}
    return {**run.model_dump(mode="json"), **derived}


def _tables(runs: list[RunOnMachine]) -> Iterable[RenderableType]:
    from outsize.report.tables.runs import run_tables
    from outsize.report.tables.table_style import Shown

    yield from map(Shown, run_tables(runs, time.time()))
