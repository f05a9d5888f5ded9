"""`outsize demo` hands its options to the demo and the demo's verdict to the shell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize import demo

Outsize = Callable[..., Any]


def test_demo_hands_over(outsize: Outsize, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(demo, "main", lambda out, quick: calls.append((out, quick)) or 5)
    assert outsize("demo", "--out", "there", "--quick").code == 5
    assert calls == [(Path("there"), True)]
