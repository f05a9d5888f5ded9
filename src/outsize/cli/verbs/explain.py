"""Implements `outsize explain CODE`: what an error means, its usual causes and what to do; works offline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

Code = Annotated[
    str, typer.Argument(metavar="CODE", help="The code in the error's message: E201.", show_default=False)
]


def explain(code: Code, json: options.Json = False) -> None:
    """Explain an error code: its meaning, usual causes and what to do; works offline."""
    from outsize.report.error_pages import explain

    text = explain(code).strip()

    def tables() -> Iterable[RenderableType]:
        from rich.text import Text

        yield Text(text)

    full_code = text[text.index("[") + 1 : text.index("]")]  # CODE may be a name, NoFeasiblePlan
    Screen(json).result({"code": full_code, "text": text}, tables)
