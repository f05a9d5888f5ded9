"""A test file's name is taken once: pytest imports them by their base name, all folders together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def taken_twice(folder: Path) -> list[str]:
    """Base names that more than one file under ``folder`` has."""
    shared = {"__init__.py", "conftest.py"}
    names = Counter(path.name for path in folder.rglob("*.py") if path.name not in shared)
    return sorted(name for name, count in names.items() if count > 1)


def test_no_name_is_taken_twice() -> None:
    assert taken_twice(TESTS) == []


def test_a_name_taken_twice_is_seen(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_same.py").touch()
    assert taken_twice(tmp_path) == ["test_same.py"]
