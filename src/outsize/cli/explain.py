"""`outsize explain CODE`: what an error means, what usually causes it and what to do; works offline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

Code = Annotated[str, typer.Argument(metavar="CODE", help="As in the message, E201.", show_default=False)]


def explain(code: Code, json: options.Json = False) -> None:
    """Say more about an error code, offline."""
    from outsize.report.explain import explain

    text = explain(code).strip()

    def tables() -> Iterable[RenderableType]:
        from rich.text import Text

        yield Text(text)

    found = text[text.index("[") + 1 : text.index("]")]  # CODE may be a name, NoFeasiblePlan
    Screen(json).result({"code": found, "text": text}, tables)
