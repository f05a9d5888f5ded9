"""What the house tests share: the source files, their syntax trees, a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "outsize"
THINKING = ("axes", "files", "policies", "ir", "schedules", "planner", "report")


def sources(folder: Path = PACKAGE) -> list[Path]:
    """Every Python file under `folder`, sorted."""
    return sorted(folder.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file; of one of this project, which stays as it is, made once for all rules."""
    return _kept(path) if path.is_relative_to(ROOT) else _parsed(path)


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


_kept = cache(_parsed)


def spot(path: Path, node: ast.expr | ast.stmt) -> str:
    """`capture/recording/recorder.py:12`, as a failing test should say it."""
    name = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.name
    return f"{name}:{node.lineno}"


def last_name(node: ast.expr) -> str:
    """`typing.Protocol[T]` -> `Protocol`; a call is named by what it calls."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def modules_below(packages: Iterable[str]) -> list[str]:
    """`["ir"]` -> `["outsize.ir", "outsize.ir.base", ...]`."""
    files = [file for package in packages for file in sources(PACKAGE / package)]
    dotted = [".".join(file.relative_to(SRC).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in dotted]


def run_python(code: str, *arguments: str) -> str:
    """Standard output of `code` in an interpreter that has imported nothing yet."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
