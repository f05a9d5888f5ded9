"""A precision is named in its record alone; all other files ask the record.

So adding one touches its record and no file that ever listed or compared a name. A default may name one
(`precision: str = "fp32"`), and so may what a user is told to type.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from house import PACKAGE, parse, sources, spot
from outsize.policies.precisions import precision_policies

NAMES = frozenset(policy.name for policy in precision_policies())
# The variables that hold a record, such as FP8.
RECORDS = frozenset(policy.name.upper().replace("-", "_") for policy in precision_policies())
HOME = PACKAGE / "policies" / "precisions.py"
# What other tools call each of them.
OWNERS = (HOME, PACKAGE / "errors" / "words.py")


def decided(tree: ast.AST) -> Iterator[ast.AST]:
    """What a file compares with, looks up by, or lists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.Dict):
            yield from (key for key in node.keys if key is not None)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            yield from node.elts
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from node.args if node.func.attr in ("startswith", "endswith") else ()


def named(path: Path) -> list[str]:
    """`file:line name` of each precision by which a file decides."""
    found: list[str] = []
    for node in decided(parse(path)):
        if isinstance(node, ast.Constant) and (node.value in NAMES or node.value == "-mixed"):
            found.append(f"{spot(path, node)} {node.value}")
        if isinstance(node, ast.Attribute) and node.attr == "name" and isinstance(node.value, ast.Name):
            found += [f"{spot(path, node)} {node.value.id}"] * (node.value.id in RECORDS)
    return found


def test_nobody_decides_by_the_name_of_a_precision() -> None:
    assert [found for path in sources(PACKAGE) if path not in OWNERS for found in named(path)] == []


def test_each_record_is_in_a_variable_of_its_name() -> None:
    assigned = {
        n.target.id
        for n in ast.walk(parse(HOME))
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    assert assigned >= RECORDS


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("if precision == 'fp8': pass", ["fp8"]),
        ("half = ('bf16', 'fp8')", ["bf16", "fp8"]),
        ("lower = {'fp32': ()}", ["fp32"]),
        ("is_mixed = precision.endswith('-mixed')", ["-mixed"]),
        ("is_eight = plan.precision == FP8.name", ["FP8"]),
        ("def plan(precision='fp32'): pass", []),
        ("next_step = '--precision bf16-mixed'", []),
    ],
)
def test_a_name_is_seen(tmp_path: Path, text: str, found: list[str]) -> None:
    path = tmp_path / "some.py"
    path.write_text(text, encoding="utf-8")
    assert [each.split()[-1] for each in named(path)] == found
