"""Cells of units break after the separators of a name, so that a name can be read and searched for."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from outsize.report.tables import table_style

NAME = "model.layers.11.self_attn:scaled_dot_product_attention/out_proj"


def lines_of(cell: str | Text, width: int) -> list[str]:
    """Renders a table with one column of units and one of numbers; returns the first column's lines."""
    shown = table_style.table(("unit", "left"), ("n", "right"))
    shown.add_row(cell, "7")
    screen = Console(file=io.StringIO(), width=width)
    with screen.capture() as captured:
        screen.print(shown)
    body = captured.get().splitlines()[2:]
    return [line[: width - 1].removesuffix("7").strip() for line in body]


@pytest.mark.parametrize("width", [20, 24, 30, 41, 64])
def test_a_name_breaks_only_after_its_separators(width: int) -> None:
    lines = lines_of(NAME, width)
    assert "".join(lines) == NAME
    assert all(line[-1] in ".:_/" for line in lines[:-1])


def test_words_move_to_the_next_line_whole() -> None:
    assert lines_of("wte.x, drop.y, head.z", 14) == ["wte.x,", "drop.y,", "head.z"]


def test_a_piece_without_separators_is_folded() -> None:
    lines = lines_of("a" * 30, 14)
    assert len(lines) > 1
    assert "".join(lines) == "a" * 30


def test_a_short_name_stays_on_one_line_with_its_style() -> None:
    assert lines_of(Text("head.z", "bold"), 20) == ["head.z"]
