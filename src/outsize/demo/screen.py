"""What the demo writes: headings, tables of report/, and a spinner while it works, on a terminal only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import final

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text


@final
class Screen:
    """Standard output, for one act after the other."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def title(self, text: str, about: str) -> None:
        """The name of the whole."""
        self._console.print(Text(text, "bold"), Text(about), sep="\n")

    def heading(self, text: str) -> None:
        """A new act."""
        self._console.print(Padding(Rule(Text(text, "bold"), align="left", style="dim"), (1, 0, 0, 0)))

    def show(self, *parts: RenderableType) -> None:
        """Each part with an empty line before it."""
        for part in parts:
            self._console.print(Padding(part, (1, 0, 0, 0)))

    def line(self, part: RenderableType) -> None:
        """A part without an empty line before it."""
        self._console.print(part)

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """A spinner beside `what` while the block runs."""
        with self._console.status(what) if self._console.is_terminal else contextlib.nullcontext():
            yield
