"""Folders say what is where: each package opens with a paragraph, and none has too many entries.

Files have no budget of lines: they are as large as their idea.
"""

from __future__ import annotations

import ast
from pathlib import Path

from house import PACKAGE, parse

MOST_ENTRIES = 15
# The rooms of the house: each kind of choice that a plan makes has one of its own.
MOST_ROOMS = 17
LEAST_WORDS = 12


def packages(folder: Path) -> list[Path]:
    """`folder` and all packages below it."""
    return [folder, *sorted(path.parent for path in folder.rglob("*/__init__.py"))]


def entries(package: Path) -> list[str]:
    """Files and folders of a package that a reader sees, without its `__init__.py` and the typing marker."""
    hidden = {"__init__.py", "py.typed", "__pycache__"}
    return sorted(path.name for path in package.iterdir() if path.name not in hidden)


def crowded(folder: Path) -> dict[str, int]:
    """Package -> number of entries, of the packages with too many."""
    counts = {str(path.relative_to(folder)): len(entries(path)) for path in packages(folder)}
    most = {".": MOST_ROOMS}
    return {name: count for name, count in counts.items() if count > most.get(name, MOST_ENTRIES)}


def without_paragraph(folder: Path) -> list[str]:
    """Packages whose docstring is too short to say which question they answer."""
    return [
        str(path.relative_to(folder))
        for path in packages(folder)
        if len((ast.get_docstring(parse(path / "__init__.py")) or "").split()) < LEAST_WORDS
    ]


def test_no_folder_is_crowded() -> None:
    assert crowded(PACKAGE) == {}


def test_each_package_says_what_it_answers() -> None:
    assert without_paragraph(PACKAGE) == []


def test_a_crowded_folder_and_a_silent_package_are_seen(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for folder in (tmp_path, inner):
        (folder / "__init__.py").write_text('"""Too short."""\n', encoding="utf-8")
    for number in range(MOST_ENTRIES + 1):
        (inner / f"file{number}.py").touch()
    assert crowded(tmp_path) == {"inner": MOST_ENTRIES + 1}
    assert without_paragraph(tmp_path) == [".", "inner"]
