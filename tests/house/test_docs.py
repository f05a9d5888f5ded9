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
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
REFERENCE = re.compile(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+?)(?:::?(\w+))?`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
DECISIONS = ROOT / "docs" / "decisions"
NUMBERS = ROOT / "docs" / "rooms" / "numbers.md"
LAW = re.compile(r"\b[Ll]aw (\d+)\b")
MOST_LINES = {"README.md": 120, "CHANGELOG.md": 120, "AGENTS.md": 40}
PAGE_LINES, DECISION_LINES = 250, 60
# These are written by `make parity` and by benchmarks/ecosystem/tried.py.
WRITTEN = {"coverage.md", "tried.md"}
NAVIGATION = re.compile(r"^ +- ([\w-]+\.md)$", re.M)
FROM_OUTSIDE = (
    "index.md",
    "contributing.md",
    "changelog.md",
)  # docs/site/hooks.py adds them, and the decisions
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


def line_count(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").splitlines())


def test_first_pages_are_short() -> None:
    assert {
        name: line_count(ROOT / name) for name, most in MOST_LINES.items() if line_count(ROOT / name) > most
    } == {}
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_the_changelog_has_each_heading_once() -> None:
    version = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert re.findall(r"^### (.+)$", version, re.M) == ["Added", "Changed", "Fixed"]


def test_a_page_can_be_read_at_once() -> None:
    # The index of the decisions has a line for each of them, and is searched and not read.
    pages = [page for page in PAGES if page.parent != DECISIONS]
    longest = {page.name for page in pages if line_count(page) > PAGE_LINES}
    assert longest == WRITTEN


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = NAVIGATION.findall((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert sorted(listed) == sorted([*pages, *FROM_OUTSIDE])


def test_the_reference_has_every_public_name() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    described = re.findall(r"^::: outsize\.(?:[\w.]+\.)?(\w+)$", reference, re.M)
    described = [name for name in described if not name.endswith("Options")]  # keyword arguments
    package = parse(ROOT / "src" / "outsize" / "__init__.py")
    assigned = [node for node in package.body if isinstance(node, ast.Assign)]
    public = next(ast.literal_eval(a.value) for a in assigned if ast.unparse(a.targets[0]) == "__all__")
    assert sorted(described) == sorted(set(public) - {"__version__"})


def test_decisions_have_a_number_each_and_fit_a_page() -> None:
    """A number may be missing: it is given out when the work begins."""
    decisions = sorted(page for page in DECISIONS.glob("*.md") if page.name != "README.md")
    numbers = [page.name[:4] for page in decisions]
    assert all(number.isdigit() for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert [page.name for page in decisions if line_count(page) > DECISION_LINES] == []


def test_the_index_has_a_status_for_each_decision() -> None:
    rows = re.findall(
        r"^\| \[\d+\]\((.+?)\) \| .+ \| (?:holds|superseded .+) \|$",
        (DECISIONS / "README.md").read_text(encoding="utf-8"),
        re.M,
    )
    assert sorted(rows) == sorted(page.name for page in DECISIONS.glob("*.md") if page.name != "README.md")


def test_a_room_has_its_laws_and_a_picture() -> None:
    rooms = sorted((ROOT / "docs" / "rooms").glob("*.md"))
    assert rooms
    assert [page.name for page in rooms if lacking(page.read_text(encoding="utf-8"))] == []


def lacking(page: str) -> list[str]:
    """What a newcomer would miss on the page of a room."""
    wanted = {"laws": r"^## Laws$", "a picture": r"^```text$", "decisions": r"\]\(\.\./decisions/\d{4}"}
    return [what for what, pattern in wanted.items() if not re.search(pattern, page, re.M)]


def test_a_room_without_a_picture_is_seen() -> None:
    assert lacking("## Laws\n\n1. One ([1](../decisions/0001-x.md)).\n") == ["a picture"]


def test_laws_that_are_cited_are_written_down() -> None:
    laws = set(re.findall(r"^(\d+)\. \*\*", NUMBERS.read_text(encoding="utf-8"), re.M))
    files = [path for room in ("src", "tests") for path in (ROOT / room).rglob("*.py")]
    cited = {number for path in files for number in LAW.findall(path.read_text(encoding="utf-8"))}
    assert cited
    assert cited <= laws


def test_a_dangling_reference_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    good, bad = "`src/outsize/ir/plan.py:Plan`", "`src/outsize/ir/plan.py:Plane` `src/outsize/no.py`"
    page.write_text(f"{good} {bad} [x](no.md) [y](page.md) [z](https://example.com)", encoding="utf-8")
    assert dangling(page) == ["src/outsize/ir/plan.py:Plane", "src/outsize/no.py:", "no.md"]
