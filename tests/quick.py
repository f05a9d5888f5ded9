"""`make test-quick`: runs the tests nearest to a change, for about a minute.

The change is what differs from the branch `main` (or from HEAD where that is the branch), with the working
tree. The import graph of the package (grimp) says in how many steps a test file reaches a changed module:
0 for a changed test file, 1 for a test that imports a changed module. Files are taken nearest first, the
shortest first among equals, while their recorded seconds (`tests/seconds.json`) fit into the budget. What was
left out is printed. It replaces no `make test`.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import grimp
import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SECONDS = TESTS / "seconds.json"
BUDGET_S = 45.0  # of a minute; collecting and importing take the rest
UNKNOWN_S = 3.0  # for a file without a record


@final
@dataclass(frozen=True)
class Candidate:
    """A test file, the steps from it to a changed module, and its recorded seconds."""

    path: str
    distance: int
    seconds: float


@final
@dataclass(frozen=True)
class Selection:
    """What fits into the budget, and what does not."""

    taken: list[Candidate]
    left_out: list[Candidate]


def main() -> int:
    """Selects and runs; returns pytest's exit code, 0 where no test reaches the change."""
    changed = changed_paths(ROOT)
    graph = grimp.build_graph("outsize")
    importers = {name: graph.find_modules_that_directly_import(name) for name in graph.modules}
    candidates = nearest(changed, importers, imports_of_tests(ROOT), json.loads(SECONDS.read_text()))
    selection = select(candidates, BUDGET_S)
    print(told(changed, selection))
    if not selection.taken:
        return 0
    return int(pytest.main([*(str(ROOT / one.path) for one in selection.taken), *sys.argv[1:]]))


def changed_paths(root: Path) -> list[str]:
    """Paths that differ from the branch point of main, untracked files among them."""

    def lines(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.splitlines() if done.returncode == 0 else []

    base = lines("merge-base", "HEAD", "main") or ["HEAD"]
    untracked = lines("ls-files", "--others", "--exclude-standard")
    return sorted({*lines("diff", "--name-only", base[0]), *untracked})


def module_of(path: str) -> str | None:
    """`src/outsize/ir/plan.py` -> `outsize.ir.plan`."""
    parts = Path(path).with_suffix("").parts
    if not path.endswith(".py") or parts[0] != "src":
        return None
    return ".".join(parts[1:-1] if parts[-1] == "__init__" else parts[1:])


def steps_upward(changed: Iterable[str], importers: Mapping[str, Collection[str]]) -> dict[str, int]:
    """Breadth-first search: for each module the fewest imports from it to a changed one."""
    steps = {name: 0 for name in changed if name in importers}
    waiting = deque(steps)
    while waiting:
        name = waiting.popleft()
        for importer in sorted(importers[name]):
            if importer not in steps:
                steps[importer] = steps[name] + 1
                waiting.append(importer)
    return steps


def imports_of_tests(root: Path) -> dict[str, set[str]]:
    """Each Python file below tests/, and what it names: modules it imports, and files beside it as `x.py`."""
    return {
        str(path.relative_to(root)): names_in(path.read_text(encoding="utf-8"))
        for path in sorted((root / "tests").rglob("*.py"))
    }


def names_in(text: str) -> set[str]:
    """Modules that are imported (with each imported name, which may be one), and scripts named in strings."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
            names.add(Path(node.value).stem)
    return names


def nearest(
    changed: Iterable[str],
    importers: Mapping[str, Collection[str]],
    named: Mapping[str, Collection[str]],
    seconds: Mapping[str, float],
) -> list[Candidate]:
    """Test files that reach the change, nearest first. `named` is what each file below tests/ names."""
    changed = set(changed)
    modules = steps_upward(filter(None, map(module_of, changed)), importers)
    steps = {path: 0 for path in named if path in changed}
    for path, names in named.items():
        reached = [modules[name] + 1 for name in names if name in modules]
        if reached and path not in steps:
            steps[path] = min(reached)
    helpers = {Path(path).stem: path for path in named}
    users: dict[str, set[str]] = {path: set() for path in named}
    for path, names in named.items():
        for name in names:
            if name in helpers:
                users[helpers[name]].add(path)
    for path in sorted(steps, key=lambda path: steps[path]):
        for user, more in steps_upward([path], users).items():
            steps[user] = min(steps.get(user, sys.maxsize), steps[path] + more)
    found = [
        Candidate(path, distance, seconds.get(path, UNKNOWN_S))
        for path, distance in steps.items()
        if Path(path).name.startswith("test_")
    ]
    return sorted(found, key=lambda one: (one.distance, one.seconds, one.path))


def select(candidates: Iterable[Candidate], budget_s: float) -> Selection:
    """Takes each file in turn that still fits."""
    selection, used_s = Selection([], []), 0.0
    for one in candidates:
        fits = used_s + one.seconds <= budget_s
        used_s += one.seconds * fits
        (selection.taken if fits else selection.left_out).append(one)
    return selection


def told(changed: Collection[str], selection: Selection) -> str:
    """What runs and what does not."""
    taken, left_out = selection.taken, selection.left_out
    lines = [
        f"{len(changed)} changed files; "
        f"{len(taken)} test files, about {sum(t.seconds for t in taken):.0f} s; "
        f"left out {len(left_out)} files of {sum(t.seconds for t in left_out):.0f} s"
    ]
    lines += [f"  runs      {one.distance} steps {one.seconds:6.1f} s  {one.path}" for one in taken[:12]]
    lines += [f"  left out  {one.distance} steps {one.seconds:6.1f} s  {one.path}" for one in left_out[:12]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
