"""No two files of the package define classes of one name, private classes included."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from house import PACKAGE, parse, sources


def shared_names(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Maps each class name that several files define to the names of these files."""
    files = defaultdict[str, list[str]](list)
    for path in paths:
        for name in {node.name for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)}:
            files[name].append(path.stem)
    return {name: found for name, found in sorted(files.items()) if len(found) > 1}


def test_every_class_name_is_in_one_file() -> None:
    assert shared_names(sources(PACKAGE)) == {}


def test_a_shared_name_is_seen(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(
        "class A: ...\nclass _B:\n    class C: ...\ndef f():\n    class C: ...\n", encoding="utf-8"
    )
    other.write_text("class _B: ...\nclass D: ...\n", encoding="utf-8")
    assert shared_names([one, other]) == {"_B": ["one", "other"]}
