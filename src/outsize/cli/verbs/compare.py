"""Implements `outsize compare A B`: what differs between two plans, or two runs with their plans."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

First = Annotated[
    Path, typer.Argument(metavar="A", help="A plan file, or what run --json printed.", show_default=False)
]
Second = Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)]


def compare(first: First, second: Second, json: options.Json = False) -> None:
    """Say what differs between two plans or runs: choices, stages, time, memory."""
    from outsize.ir.answers.runs.comparison import ComparedReport
    from outsize.ir.answers.runs.comparison import compare as compared

    found = compared(ComparedReport.load_report(first), ComparedReport.load_report(second))

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables.comparison import comparison_tables

        yield comparison_tables(found)

    Screen(json).result(found.model_dump(mode="json"), tables)
