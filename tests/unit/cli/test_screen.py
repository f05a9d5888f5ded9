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


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_line_is_improved_in_place_on_a_terminal_without_json(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with Screen(as_json).working("planning") as tell:
        tell("0.1 s  pp 4: " + "x" * 200)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("0.1 s  pp 4" in shown.err) == (not as_json)
    assert "x" * 78 not in shown.err
    assert shown.err.endswith("\x1b[2K"), "the line is cleared"


def test_nothing_is_told_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen().working("planning") as tell:
        tell("0.1 s  pp 4")
    assert capsys.readouterr() == ("", "")
