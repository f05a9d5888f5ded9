"""What a screen writes into a pipe."""

from __future__ import annotations

import pytest
from rich.text import Text

from outsize.cli.screen import Screen
from outsize.report.tables import table_style


def test_lines_in_a_pipe_end_with_their_last_word(capsys: pytest.CaptureFixture[str]) -> None:
    table = table_style.table(("unit", "left"), ("note", "left"))
    table.add_row("h.0", "a long note")
    table.add_row("h.1", Text("short"))
    Screen().result({}, lambda: [table, Text("")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert [line.split() for line in lines][-3:-1] == [["h.0", "a", "long", "note"], ["h.1", "short"]]
