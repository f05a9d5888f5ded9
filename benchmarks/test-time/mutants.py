"""Which changes of one place in the code do the nearest tests find?

    python benchmarks/test-time/mutants.py --count 40 --out before.json
    python benchmarks/test-time/mutants.py --again before.json --out after.json    # the same, on this tree
    python benchmarks/test-time/mutants.py --compare before.json after.json

Each mutant is one change of one place of `src/outsize`: a comparison turned, a number one larger, a branch
taken the other way, a call left out, a plus for a minus, an `and` for an `or`. A seed chooses them, the rooms
in turn. The files of tests nearest to it (`tests/quick.py`, within a budget of recorded seconds) run until
one fails, in a fork of this process, which has imported torch and the libraries. A mutant is caught where
a test fails or cannot be collected, or where the tests take longer than the limit.

Problem: mutation testing, Jia and Harman, "An Analysis and Survey of the Development of Mutation Testing",
IEEE TSE 37(5), 2011, https://doi.org/10.1109/TSE.2010.62. Deviation: a sample, and only the nearest tests, so
the share of caught mutants is a lower bound; what counts is whether two trees of tests catch the same ones.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = Path("src", "outsize")
PRELOADED: Final = (
    "torch",
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
    "hypothesis",
    "pytest",
)
TURNED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@final
@dataclass(frozen=True)
class Mutant:
    """One place, what is changed there, and the files of tests that are asked."""

    file: str
    line: int
    column: int
    kind: str
    before: str
    after: str
    tests: tuple[str, ...] = ()

    @property
    def room(self) -> str:
        """The folder of the package."""
        return Path(self.file).relative_to(PACKAGE).parts[0]

    def applied(self, text: str) -> str:
        """The file's text with the change."""
        lines = text.encode().splitlines(keepends=True)
        at = sum(map(len, lines[: self.line - 1])) + self.column
        data, old = text.encode(), self.before.encode()
        if data[at : at + len(old)] != old:
            raise SystemExit(f"{self.file}:{self.line} is no longer `{self.before}`; choose new mutants")
        return (data[:at] + self.after.encode() + data[at + len(old) :]).decode()


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """All mutants of a file, without those of annotations and of texts."""
    for node in ast.walk(ast.parse(text)):
        for kind, changed in changes_of(node):
            before = ast.get_source_segment(text, node)
            if before is not None and "\n" not in before:
                line, column = getattr(node, "lineno"), getattr(node, "col_offset")  # noqa: B009
                yield Mutant(file, line, column, kind, before, changed)


def changes_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The kinds of change of one node of the syntax tree, and the text that takes its place."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in TURNED:
            yield "comparison", f"({ast.unparse(ast.Compare(left, [TURNED[type(op)]()], [right]))})"
        case ast.Constant(int(number)) if not isinstance(node.value, bool):
            yield "number", str(number + 1)
        case ast.IfExp(test, body, other):
            yield "branch", f"({ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), test), body, other))})"
        case ast.Expr(ast.Call()):
            yield "call", "pass"
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right):
            other_op = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
            yield "sum", f"({ast.unparse(ast.BinOp(left, other_op, right))})"
        case ast.BoolOp(op, values):
            other_bool = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and or", f"({ast.unparse(ast.BoolOp(other_bool, values))})"
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", "return None"
        case _:
            pass


def chosen(count: int, seed: int) -> list[Mutant]:
    """So many mutants, the rooms in turn, each of another function's file where there are enough."""
    draw, rooms = random.Random(seed), dict[str, list[Path]]()
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        room = path.relative_to(ROOT / PACKAGE).parts[0]
        if path.name != "__init__.py" and not room.endswith(".py"):
            rooms.setdefault(room, []).append(path)
    found = list[Mutant]()
    while len(found) < count:
        for room in sorted(rooms):
            path = draw.choice(rooms[room])
            every = list(mutants_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")))
            kinds = sorted({mutant.kind for mutant in every})
            if kinds:
                kind = draw.choice(kinds)
                found.append(draw.choice([mutant for mutant in every if mutant.kind == kind]))
    return found[:count]


def with_tests(mutants: list[Mutant], budget_s: float) -> list[Mutant]:
    """The mutants with the files of tests that are asked."""
    import grimp

    sys.path.insert(0, str(ROOT / "tests"))
    import quick

    graph = grimp.build_graph("outsize")
    importers = {name: graph.find_modules_that_directly_import(name) for name in graph.modules}
    named, seconds = quick.imports_of_tests(ROOT), json.loads(quick.SECONDS.read_text())
    asked = list[Mutant]()
    for mutant in mutants:
        candidates = [
            one
            for one in quick.nearest([mutant.file], importers, named, seconds)
            if not one.path.startswith(("tests/house", "tests/integrations", "tests/gpu"))
        ]
        taken = tuple(one.path for one in quick.select(candidates, budget_s).taken)
        asked.append(Mutant(**{**asdict(mutant), "tests": taken}))
    return asked


def judged(mutant: Mutant, clone: Path, limit_s: float, options: tuple[str, ...]) -> dict[str, Any]:
    """Runs the tests on the mutant, and says which one failed first; files that fail without the mutant, too,
    are left out.
    """
    begin, tests = time.perf_counter(), mutant.tests
    while True:
        with changed(mutant, clone):
            caught, by = in_fork(partial(run_tests, clone, (*options, *tests)), limit_s)
        red = by.partition("::")[0]
        if red not in tests or not in_fork(partial(run_tests, clone, (*options, by)), limit_s)[0]:
            break
        tests = tuple(test for test in tests if test != red)
    taken_s = round(time.perf_counter() - begin, 1)
    return {**asdict(mutant), "tests": tests, "caught": caught, "by": by, "seconds": taken_s}


@contextmanager
def changed(mutant: Mutant, clone: Path) -> Iterator[None]:
    """Has the mutant in the clone within the context."""
    path = clone / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(text), encoding="utf-8")
    os.utime(path, (time.time(), 60 * random.getrandbits(24)))  # no compiled file is as old
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def in_fork(work: Callable[[Path], int], limit_s: float) -> tuple[bool, str]:
    """Whether the tests found something in a fork, and what: a test, or the limit."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        child = os.fork()
        if child == 0:
            code = 3
            try:
                os.setsid()
                code = int(work(said))
            finally:
                os._exit(code)
        end = time.monotonic() + limit_s
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                by = said.read_text() if said.exists() else ""
                code = os.waitstatus_to_exitcode(status)
                return code not in (0, 5), by or f"exit {code}" * (code not in (0, 5))
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return True, f"took more than {limit_s:.0f} s"
            time.sleep(0.2)


def run_tests(clone: Path, asked: tuple[str, ...], said: Path) -> int:
    """pytest in this process, quietly; the first failure's name goes into a file."""
    import pytest

    class FirstFailure:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not said.exists():
                said.write_text(report.nodeid)

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and not said.exists():
                said.write_text(report.nodeid)

    os.chdir(clone)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    sys.path.insert(0, str(clone / "src"))
    os.putenv("PYTHONPATH", str(clone / "src"))  # of programs that tests start
    return pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *asked], [FirstFailure()])


def compared(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """By room how many are caught before and after, and those that only one tree catches."""
    names = ("file", "line", "column", "kind")
    late = {tuple(each[n] for n in names): each for each in after}
    both = [(each, late[key]) for each in before if (key := tuple(each[n] for n in names)) in late]
    rooms = Counter(mutant_of(one).room for one, _ in both)
    lines = ["| room | mutants | caught before | after |", "|---|---:|---:|---:|"]
    for room in [*sorted(rooms), "all"]:
        own = [pair for pair in both if room in ("all", mutant_of(pair[0]).room)]
        caught = [sum(found["caught"] for found in tree) for tree in zip(*own, strict=True)]
        lines.append(f"| {room} | {len(own)} | {caught[0]} | {caught[1]} |")
    for one, other in both:
        if one["caught"] != other["caught"]:
            word = "no longer" if one["caught"] else "newly"
            lines.append(f"{word} caught: {one['file']}:{one['line']} {one['kind']} `{one['before']}`")
    return "\n".join(lines)


def mutant_of(found: dict[str, Any]) -> Mutant:
    """The mutant of a written answer."""
    fields = {name: found[name] for name in Mutant.__dataclass_fields__}
    return Mutant(**{**fields, "tests": tuple(found["tests"])})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=40.0, help="recorded seconds of tests for a mutant")
    parser.add_argument(
        "--limit-s", type=float, default=300.0, help="a mutant whose tests take longer is caught"
    )
    parser.add_argument("--tree", default="HEAD", help="the commit whose tests and code run")
    parser.add_argument("--again", type=Path, help="the mutants of this file, with the same files of tests")
    parser.add_argument("--survivors", action="store_true", help="with --again: only those not caught there")
    parser.add_argument("--all", action="store_true", help="also the tests that only `make parity` runs")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    asked = parser.parse_args()
    if asked.compare:
        print(compared(*(json.loads(path.read_text()) for path in asked.compare)))
        return
    if asked.again:
        found = json.loads(asked.again.read_text())
        mutants = [mutant_of(each) for each in found if not (asked.survivors and each["caught"])]
    else:
        mutants = with_tests(chosen(asked.count, asked.seed), asked.budget_s)
    for name in PRELOADED:
        __import__(name)
    answers = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "outsize"
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(clone)], check=True)
        subprocess.run(["git", "checkout", "-q", asked.tree], cwd=clone, check=True)
        for mutant in mutants:
            answers.append(judged(mutant, clone, asked.limit_s, ("--all",) if asked.all else ()))
            asked.out.write_text(json.dumps(answers, indent=1) + "\n")
            word = "caught by " + answers[-1]["by"] if answers[-1]["caught"] else "NOT caught"
            print(f"{mutant.file}:{mutant.line} {mutant.kind} `{mutant.before}` {word}", flush=True)


if __name__ == "__main__":
    main()
