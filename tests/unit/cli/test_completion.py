"""A shell asks the command line itself how a word may go on."""

from __future__ import annotations

import pytest

from outsize.cli.app import run


def test_bash_completes_a_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {
        "_OUTSIZE_COMPLETE": "complete_bash",
        "COMP_WORDS": "outsize em",
        "COMP_CWORD": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run([])
    assert capsys.readouterr().out.split() == ["emit"]
