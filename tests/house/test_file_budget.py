"""A budget of attention: no file over 400 lines, no more than 33,000 lines of code in the package.

Lines of code are those that are not blank, comment or docstring: explaining costs nothing in the total.
Raising a number here is a visible change; write a decision (docs/decisions/0044 was the last).
"""

from __future__ import annotations

import ast
from pathlib import Path

from house import PACKAGE, parse, sources

FILE_LINES = 400
CODE_LINES = 33_000


def too_long(folder: Path) -> dict[str, int]:
    """File -> lines, of the files over the budget."""
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(folder)}
    return {str(path.relative_to(folder)): count for path, count in counts.items() if count > FILE_LINES}


def code_lines(path: Path) -> int:
    """Lines that are not blank, a comment or within a string that stands alone."""
    prose = {
        line
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    return sum(n not in prose and bool(t.strip()) and not t.lstrip().startswith("#") for n, t in lines)


def test_no_file_over_its_budget() -> None:
    assert too_long(PACKAGE) == {}


def test_the_package_within_its_budget() -> None:
    total = sum(code_lines(path) for path in sources(PACKAGE))
    print(f"src/outsize: {total:,} of {CODE_LINES:,} lines of code")
    assert total <= CODE_LINES


def test_the_budget_can_be_broken(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("x = 1\n" * FILE_LINES, encoding="utf-8")
    (tmp_path / "long.py").write_text("x = 1\n" * (FILE_LINES + 1), encoding="utf-8")
    assert too_long(tmp_path) == {"long.py": FILE_LINES + 1}


def test_explaining_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text('"""What.\n\nWhy.\n"""\n\n# because\nx = [\n    1,\n]  # one\n', encoding="utf-8")
    assert code_lines(path) == 3
