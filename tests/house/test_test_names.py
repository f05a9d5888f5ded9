"""A test file's name is taken once, as pytest imports them by their base name; and all of them are run."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

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


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """pytest's own list of folders not to look into has `dist` in it."""
    patterns: list[str] = pytestconfig.getini("norecursedirs")
    folders = [path for path in TESTS.rglob("*") if path.is_dir()]
    assert [f for f in folders if any(fnmatch(f.name, p) for p in patterns)] == []
    assert any(fnmatch("build", pattern) for pattern in patterns)
