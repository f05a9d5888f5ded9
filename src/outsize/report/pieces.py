"""The pieces that all text tables are made of: one look, 80 columns, no word that is only a colour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outsize.ir.advice import Advice

Column = tuple[str, Literal["left", "right"]]
FLUID = {"unit", "units", "instead", "what it costs", "stages begin with"}


def table(*columns: Column) -> Table:
    """An empty table; only the columns of units are wrapped."""
    made = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim"
    )
    for name, justify in columns:
        made.add_column(name, justify=justify, no_wrap=name not in FLUID, overflow="fold")
    return made


def spaced(*parts: RenderableType) -> list[RenderableType]:
    """The parts with an empty line before each."""
    return [Padding(part, (1, 0, 0, 0)) for part in parts]


def rights(*names: str) -> list[Column]:
    """Columns of numbers."""
    return [(name, "right") for name in names]


def facts(pairs: Sequence[tuple[str, str]]) -> Table:
    """Names and what is said of them."""
    made = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for name, text in pairs:
        made.add_row(Text(name, "dim"), text)
    return made


def listed(heading: str, sentences: Sequence[str]) -> list[RenderableType]:
    """Sentences below a heading; nothing when there are none."""
    if not sentences:
        return []
    made = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    for sentence in sentences:
        made.add_row("-", Text(sentence))
    return [Group(Text(heading, "bold"), made)]


def full(share: float) -> Text:
    """How full a device is; red beyond its memory."""
    return Text(f"{share * 100:.0f} %", "bold red" if share > 1 else "")


def said(advice: Advice) -> str:
    """The sentence and what to type."""
    return f"{advice.sentence}. Next: {advice.next_step}"
