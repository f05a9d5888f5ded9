"""Implements `outsize doctor`: what this machine offers, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from outsize.cli import options
from outsize.cli.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType


def doctor(json: options.Json = False) -> None:
    """Show versions, devices, backends and limits here, and what is missing."""
    from outsize.api.health import doctor

    screen = Screen(json)
    with screen.working("examining this machine"):
        health = doctor()

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables.health import health_tables

        return [health_tables(health)]

    screen.result(health.model_dump(mode="json"), tables)
