"""Whoever expects any error of a user's code passes on what interrupts it: an alarm is no error of a model.

Where a capture or a search goes on after `except Exception`, the first thing it does is to ask
`raise_interruption`; `suppress(Exception)` is `suppressed()`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from house import PACKAGE, last_name, parse, sources, spot

ROOMS = ("api", "capture", "planner", "train/batch", "train/measure", "train/variants")


def swallowing(path: Path) -> list[str]:
    """`file:line` of each place that goes on after any error without asking what it is."""
    tree = parse(path)
    handlers = [n for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and _is_broad(n.type)]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and last_name(n.func) == "suppress"]
    silent = [n for n in handlers if not (_asks(n.body[0]) or _raises_again(n))]
    return [spot(path, n.body[0]) for n in silent] + [
        spot(path, n) for n in calls if any(map(_is_broad, n.args))
    ]


def _is_broad(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(map(_is_broad, kind.elts))
    return kind is None or last_name(kind) in ("Exception", "BaseException")


def _asks(first: ast.stmt) -> bool:
    call = first.value if isinstance(first, ast.Expr) else None
    return isinstance(call, ast.Call) and last_name(call.func) == "raise_interruption"


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_nobody_swallows_an_alarm() -> None:
    assert [place for room in ROOMS for path in sources(PACKAGE / room) for place in swallowing(path)] == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("try:\n    f()\nexcept Exception:\n    pass\n", True),
        ("try:\n    f()\nexcept (ValueError, Exception) as error:\n    g(error)\n", True),
        ("try:\n    f()\nexcept:\n    pass\n", True),
        ("with contextlib.suppress(Exception):\n    f()\n", True),
        ("try:\n    f()\nexcept Exception as error:\n    raise_interruption(error)\n", False),
        ("try:\n    f()\nexcept BaseException:\n    g()\n    raise\n", False),
        ("try:\n    f()\nexcept ValueError:\n    pass\n", False),
        ("with suppress(OSError):\n    f()\n", False),
    ],
)
def test_a_plant_is_found(tmp_path: Path, text: str, is_found: bool) -> None:
    path = tmp_path / "planted.py"
    path.write_text(text, encoding="utf-8")
    assert bool(swallowing(path)) is is_found
