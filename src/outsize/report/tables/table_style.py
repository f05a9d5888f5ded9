"""Builds the pieces of all text tables: one look, 80 columns, no meaning that is only in a colour."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from outsize.errors import visible, visible_lines

Column = tuple[str, Literal["left", "right"]]
FLUID = {"unit", "units", "instead", "what it costs", "stages begin with"}
# A word with the blanks after it, and a piece of a name up to a separator.
_WORD, _PIECE = re.compile(r"\S+\s*"), re.compile(r"[^.:_/]*[.:_/]|[^.:_/]+")


@final
class Shown:
    """Shows a text or a table without the characters that act on a terminal, whatever names are in it."""

    def __init__(self, part: RenderableType) -> None:
        self._part = Text(part) if isinstance(part, str) else part

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._part)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._part, options):
            yield segment if segment.control else Segment(visible_lines(segment.text), segment.style)


@final
class NameCell:
    """A cell with names of units; it breaks between words, and within a word after `.`, `:`, `_` or `/`."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self._text.divide(_breaks(self._text.plain, options.max_width)):
            line.rstrip()
            yield line


def _breaks(text: str, width: int) -> Iterator[int]:
    """Yields where the lines of `width` columns begin, without the first."""
    used = 0
    for word in _WORD.finditer(text):
        length = cell_len(word.group().rstrip())
        if used and used + length > width:
            yield word.start()
            used = 0
        for piece in _PIECE.finditer(word.group()):
            length = cell_len(piece.group().rstrip())
            if used and used + length > width:
                yield word.start() + piece.start()
                used = 0
            used += cell_len(piece.group())


@final
class NameTable(Table):
    """A table whose columns that may wrap hold names of units."""

    def add_row(
        self, *renderables: RenderableType | None, style: StyleType | None = None, end_section: bool = False
    ) -> None:
        """Adds a row; text in a column that may wrap becomes a NameCell."""
        texts = [Text(visible(cell)) if isinstance(cell, str) else cell for cell in renderables]
        cells = [
            NameCell(cell) if isinstance(cell, Text) and not column.no_wrap else cell
            for column, cell in zip(self.columns, texts, strict=False)
        ]
        super().add_row(*cells, style=style, end_section=end_section)


def table(*columns: Column) -> Table:
    """Returns an empty table; only the columns of units are wrapped."""
    made = NameTable(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim"
    )
    for name, justify in columns:
        made.add_column(name, justify=justify, no_wrap=name not in FLUID, overflow="fold")
    return made


def spaced(*parts: RenderableType) -> list[RenderableType]:
    """Returns the parts with an empty line before each."""
    return [Padding(part, (1, 0, 0, 0)) for part in parts]


def rights(*names: str) -> list[Column]:
    """Returns columns of numbers, aligned to the right."""
    return [(name, "right") for name in names]


def facts(pairs: Sequence[tuple[str, str]]) -> Table:
    """Returns a table of names, each with its text."""
    made = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for name, text in pairs:
        made.add_row(Text(visible(name), "dim"), Text(visible(text)))
    return made


def listed(heading: str, sentences: Sequence[str]) -> list[RenderableType]:
    """Returns the sentences below a heading; an empty list when there are none."""
    if not sentences:
        return []
    made = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    for sentence in sentences:
        made.add_row("-", Text(visible(sentence)))
    return [Group(Text(heading, "bold"), made)]


def full(share: float) -> Text:
    """Returns how full a device is; red beyond its memory."""
    return Text(f"{share * 100:.0f} %", "bold red" if share > 1 else "")
