"""An axis of the mesh is named in its record alone; all other files ask the record.

So adding one touches its record, a line of the registry and its mechanism, not every file that ever compared
a name. The mechanism of an axis may read its size as an attribute, `axes.tp`, or name its record, TENSOR.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import outsize.axes
from house import PACKAGE, parse, sources, spot
from outsize.axes.registry import AXES

NAMES = frozenset(axis.name for axis in AXES)
# The variables that hold a record, such as TENSOR.
RECORDS = frozenset({"CONTEXT", "EXPERT", "PIPELINE", "REPLICATE", "SHARD", "TENSOR"})
HOME = Path(outsize.axes.__file__).parent
# What other tools call each axis.
WORDS = PACKAGE / "errors" / "words.py"
# Words that say something else in these files.
OTHER_MEANINGS = {
    # The answer of `axes` that no axis beside the pipeline is searched; over what a curve is drawn.
    "pp": {
        "ir/answers/curve.py",
        "ir/answers/request.py",
        "planner/advice/overview.py",
    },
}


def relative(path: Path) -> str:
    """`planner/fit/fit.py`."""
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name


def named_axes(path: Path) -> list[str]:
    """`file:line name` of each axis that a file names in a string of its own."""
    strings = (node for node in ast.walk(parse(path)) if isinstance(node, ast.Constant))
    return [
        f"{spot(path, node)} {node.value}"
        for node in strings
        if node.value in NAMES and relative(path) not in OTHER_MEANINGS.get(str(node.value), ())
    ]


def compared_axes(path: Path) -> list[str]:
    """`file:line TENSOR` of each record that a file compares something with, or whose name it compares.

    Whether a name is in something else, such as the mesh of a user, is no comparison of axes.
    """
    found: list[str] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Compare):
            is_inside = isinstance(node.ops[0], ast.In | ast.NotIn)
            sides = node.comparators if is_inside else (node.left, *node.comparators)
            listed = (part for side in sides for part in getattr(side, "elts", [side]))
            found += [f"{spot(path, node)} {name}" for part in listed if (name := _record(part)) is not None]
    return found


def _record(side: ast.expr) -> str | None:
    """The record that a side of a comparison is, or has the name of."""
    if isinstance(side, ast.Attribute) and side.attr == "name":
        side = side.value
    return side.id if isinstance(side, ast.Name) and side.id in RECORDS else None


def others() -> list[Path]:
    """All files but those that may name axes."""
    return [path for path in sources(PACKAGE) if path != WORDS and not path.is_relative_to(HOME)]


def test_an_axis_is_named_in_its_record_alone() -> None:
    assert [found for path in others() for found in named_axes(path)] == []


def test_nobody_compares_a_record() -> None:
    assert [found for path in others() for found in compared_axes(path)] == []


def test_each_axis_is_named_by_one_file() -> None:
    found = [text.split()[-1] for path in sources(HOME) for text in named_axes(path)]
    assert sorted(found) == sorted(NAMES)


def test_the_records_are_those_of_the_registry() -> None:
    found = {
        node.id for node in ast.walk(parse(HOME / "registry.py")) if isinstance(node, ast.Name)
    } & RECORDS
    assert found == RECORDS
    assert len(RECORDS) == len(AXES)


def test_each_other_meaning_is_there() -> None:
    missing = [
        f"{file} {name}"
        for name, files in OTHER_MEANINGS.items()
        for file in files
        if not any(isinstance(n, ast.Constant) and n.value == name for n in ast.walk(parse(PACKAGE / file)))
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "names", "records"),
    [
        ("size = sizes['tp']", ["tp"], []),
        ("along = ('dp_replicate', 'dp_shard')", ["dp_replicate", "dp_shard"], []),
        ("why = 'as tp does'", [], []),
        ("size = axes.tp", [], []),
        ("is_whole = axis.name != TENSOR.name", [], ["TENSOR"]),
        ("is_whole = axis is EXPERT", [], ["EXPERT"]),
        ("has_parts = axis in (TENSOR, EXPERT)", [], ["TENSOR", "EXPERT"]),
        ("has_dim = TENSOR.name in mesh.mesh_dim_names", [], []),
        ("mesh = meshes[CONTEXT.name]", [], []),
    ],
)
def test_a_name_is_seen(tmp_path: Path, text: str, names: list[str], records: list[str]) -> None:
    path = tmp_path / "some.py"
    path.write_text(text, encoding="utf-8")
    assert [found.split()[-1] for found in named_axes(path)] == names
    assert [found.split()[-1] for found in compared_axes(path)] == records
