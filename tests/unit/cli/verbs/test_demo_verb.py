"""`outsize demo` hands its options to the demo and the demo's verdict to the shell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.cli import demo

Outsize = Callable[..., Any]


def test_demo_hands_over(outsize: Outsize, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(demo, "main", lambda out, quick: calls.append((out, quick)) or 5)
    assert outsize("demo", "--out", "there", "--quick").code == 5
    assert calls == [(Path("there"), True)]


def test_under_json_the_document_alone_is_on_stdout(
    outsize: Outsize, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def perform(out: Path, quick: bool) -> int:
        print("a table")
        out.mkdir()
        (out / "plan.json").touch()
        return 0

    monkeypatch.setattr(demo, "main", perform)
    answer = outsize("demo", "--out", "there", "--json")
    assert json.loads(answer.out) == {"holds": True, "out": "there", "files": ["there/plan.json"]}
    assert (answer.code, answer.err) == (0, "a table\n")
