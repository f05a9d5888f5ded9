"""The standard output of the demo: headings, the tables of report/, and what is done at present."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import final

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.text import Text


@final
class DemoScreen:
    """Writes the parts of the demo one below the other."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)

    def heading(self, text: str) -> None:
        """Writes a ruled heading below an empty line."""
        self._console.print()
        self._console.print(Rule(Text(text, "bold"), align="left", style="dim"))

    def show(self, *parts: RenderableType) -> None:
        """Writes each part below an empty line."""
        for part in parts:
            self._console.print()
            self._console.print(part)

    def line(self, part: RenderableType) -> None:
        """Writes a part directly below the last one."""
        self._console.print(part)

    def begin(self, what: str) -> None:
        """Writes a line of what is done from here on."""
        self._console.print()
        self._console.print(Text(f"... {what}", "dim"))

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Shows a spinner and `what` while the block runs; a line of it where there is no terminal."""
        if not self._console.is_terminal:
            self.begin(what)
            yield
            return
        with self._console.status(Text(what)):
            yield


def verdict_text(bit_equal: bool) -> Text:
    """Returns the verdict in words and in colour."""
    return Text("bit-equal", "green") if bit_equal else Text("NOT bit-equal", "bold red")
