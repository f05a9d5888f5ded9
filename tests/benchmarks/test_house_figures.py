"""The counts of benchmarks/house, each on a tree of a few lines."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "house"
SOURCE = '''"""A file."""
from outsize.ir import plan

TABLE = {"host": 1}  # no comparison


class Engine:
    def step(self): ...

    def _hidden(self): ...


def price(pair: tuple[int, str], many: tuple[int, ...]) -> int:
    parts = 1, 2
    # A reason.
    return first(*parts) + first(*many) if pair[1] == "full" or pair[1] in ("host", "tape") else 0
'''


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house_figures", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(figures: ModuleType, tmp_path: Path) -> object:
    package = tmp_path / "src" / "outsize"
    (package / "ir").mkdir(parents=True)
    (package / "ir" / "__init__.py").write_text("")
    (package / "ir" / "plan.py").write_text("AXES = ('tp',)\n")
    (package / "train.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_plan.py").write_text("from outsize.ir.plan import AXES\n")
    return figures.Tree(tmp_path)


def test_lines_and_files(figures: ModuleType, tree: object) -> None:
    rows = dict(figures.size(tree))
    assert rows["**the package**: lines in files"] == f"{len(SOURCE.splitlines()) + 1} in 3"


def test_choices_are_seen(figures: ModuleType, tree: object) -> None:
    rows = dict(figures.choices(tree))
    assert rows["axis `tp`: files in which it stands"] == "1"
    assert rows["`recompute` compared with a literal: lines in files"] == "1 in 1"
    assert rows["`weights` compared with a literal: lines in files"] == "1 in 1"


def test_hidden_parameters_are_seen(figures: ModuleType) -> None:
    function = next(
        n for n in ast.walk(ast.parse(SOURCE)) if isinstance(n, ast.FunctionDef) and n.name == "price"
    )
    assert figures.unpacked_tuples(function) == 1
    assert figures.tuple_parameters(function) == 1


def test_methods_and_comments(figures: ModuleType) -> None:
    engine = next(n for n in ast.walk(ast.parse(SOURCE)) if isinstance(n, ast.ClassDef))
    assert figures.methods_of(engine) == ["step", "_hidden"]
    assert figures.comment_lines(SOURCE) == 2


def test_options_have_those_of_their_bases(figures: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "src" / "outsize"
    package.mkdir(parents=True)
    (package / "options.py").write_text(
        "class AOptions:\n    a: int\nclass BOptions(AOptions):\n    b: int\n"
    )
    assert figures.keys_of_options(figures.Tree(tmp_path))["BOptions"] == 2


def test_a_table_has_a_column_for_each_tree(figures: ModuleType) -> None:
    text = figures.table("Size", ["before", "today"], [{"a": "1"}, {"a": "2", "b": "3"}])
    assert text.splitlines()[2:] == ["| a | 1 | 2 |", "| b | - | 3 |"]
