"""Docstrings are whole sentences: none opens with a word that only a fragment opens with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from house import PACKAGE, parse, sources

FRAGMENT = re.compile(r"(?:Of|So many|And|That|The same|As|Beside|Its|Their|Whose)\b")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def fragments(path: Path) -> Iterator[str]:
    """Yields the first line of each docstring of a file that opens as a fragment."""
    for node in ast.walk(parse(path)):
        text = ast.get_docstring(node) if isinstance(node, Documented) else None
        if text is not None and FRAGMENT.match(text):
            yield text.splitlines()[0]


def test_docstrings_are_sentences() -> None:
    assert [
        f"{path.relative_to(PACKAGE)}: {line}" for path in sources(PACKAGE) for line in fragments(path)
    ] == []


@pytest.mark.parametrize(
    ("text", "is_fragment"),
    [
        ('"""Of what stays."""', True),
        ('class A:\n    """So many behind `cpu:2`."""', True),
        ('def f():\n    """As X\'s, but slower."""', True),
        ('class A:\n    def f(self):\n        """The same of Y."""', True),
        ('"""Offers what stays."""', False),
        ('class A:\n    """Asks for Y."""', False),
        ('def f():\n    """Returns the bytes of Y."""', False),
        ("x = 1", False),
    ],
)
def test_a_fragment_is_seen(tmp_path: Path, text: str, is_fragment: bool) -> None:
    path = tmp_path / "some.py"
    path.write_text(text, encoding="utf-8")
    assert bool(list(fragments(path))) is is_fragment
