"""What the pages point at exists: files and names in code quotes, links between pages, decisions in a row.

A reference is a path from the root, and after a colon a function or class: `src/outsize/ir/plan.py:Plan`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from house import ROOT, parse

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
REFERENCE = re.compile(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+?)(?:::?(\w+))?`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
Named = ast.FunctionDef | ast.ClassDef


def dangling(page: Path) -> list[str]:
    """References and links of a page that lead nowhere."""
    text = page.read_text(encoding="utf-8")
    references = [f"{path}:{name}" for path, name in REFERENCE.findall(text) if not exists(path, name)]
    return references + [link for link in LINK.findall(text) if not (page.parent / link).exists()]


def exists(path: str, name: str) -> bool:
    """Is there such a file, and does it define the name?"""
    file = ROOT / path
    if not name:
        return file.exists()
    return file.is_file() and any(isinstance(n, Named) and n.name == name for n in ast.walk(parse(file)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_reference_leads_somewhere(page: Path) -> None:
    assert dangling(page) == []


def test_decisions_are_numbered_in_a_row_and_fit_a_page() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [page.name[:4] for page in decisions] == [f"{i:04}" for i in range(1, len(decisions) + 1)]
    assert [page.name for page in decisions if len(page.read_text(encoding="utf-8").splitlines()) > 60] == []


def test_a_dangling_reference_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    good, bad = "`src/outsize/ir/plan.py:Plan`", "`src/outsize/ir/plan.py:Plane` `src/outsize/no.py`"
    page.write_text(f"{good} {bad} [x](no.md) [y](page.md) [z](https://example.com)", encoding="utf-8")
    assert dangling(page) == ["src/outsize/ir/plan.py:Plane", "src/outsize/no.py:", "no.md"]
