"""No ambient configuration: only the command line and the launcher look at the environment.

Handing the environment on to a child is reading it, too. Everything else takes arguments.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from house import PACKAGE, parse, sources, spot

OWNERS = {
    *sources(PACKAGE / "cli"),
    PACKAGE / "ops" / "launch" / "launch.py",
    PACKAGE / "train" / "world" / "join.py",
}
NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def environment_reads(path: Path) -> list[str]:
    """`file:line` of each mention of the environment."""
    mentions = (node for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute | ast.ImportFrom))
    return [spot(path, node) for node in mentions if _touches(node)]


def _touches(node: ast.Attribute | ast.ImportFrom) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in NAMES and isinstance(node.value, ast.Name) and node.value.id == "os"
    return node.module == "os" and bool(NAMES & {alias.name for alias in node.names})


def test_only_the_owners_read_the_environment() -> None:
    others = [path for path in sources(PACKAGE) if path not in OWNERS]
    assert [found for path in others for found in environment_reads(path)] == []


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("import os\nrank = os.environ['RANK']", True),
        ("import os\nrank = os.getenv('RANK')", True),
        ("from os import environ", True),
        ("from os import getpid", False),
        ("import os\nos.getpid()", False),
    ],
)
def test_a_read_is_seen(tmp_path: Path, text: str, reads: bool) -> None:
    path = tmp_path / "some.py"
    path.write_text(text, encoding="utf-8")
    assert bool(environment_reads(path)) is reads
