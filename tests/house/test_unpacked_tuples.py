"""A tuple is no way around the law of six parameters: several arguments that belong together are a record.

Two forms are counted, and their numbers may only fall: a tuple that is made for a call and unpacked in it
(`how = a, b, c` and `f(*how)`), and a parameter that is an anonymous tuple (`how: tuple[str, int, int]`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from house import PACKAGE, parse, sources, spot

UNPACKED = 6  # of rich: cells of a row, columns of a table, parts of a bar
PARAMETERS = 6
AT_LEAST = 3
"""Of so many elements. A pair, such as a run of units or an edge between two stages, is one value."""


def unpacked(path: Path) -> Iterator[str]:
    """Yields the calls of a file that unpack a tuple which the same function has made, with the tuple."""
    for function in ast.walk(parse(path)):
        if isinstance(function, ast.FunctionDef):
            made = dict(_made(function))
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                names = [name for arg in call.args if (name := _unpacked_name(arg)) is not None]
                yield from (f"{spot(path, call)} *{name}" for name in names if made.get(name, 0) >= AT_LEAST)


def _unpacked_name(argument: ast.expr) -> str | None:
    """Returns the name in `f(*name)`; None for any other argument."""
    if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name):
        return argument.value.id
    return None


def _made(function: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    """Yields the names to which a function gives tuples, and how many elements these have."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, int]]:
    if isinstance(target, ast.Name) and isinstance(value, ast.Tuple):
        yield target.id, len(value.elts)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each, of in zip(target.elts, value.elts, strict=False):
            yield from _pairs(each, of)


def anonymous(path: Path) -> Iterator[str]:
    """Yields the parameters of a file that are tuples of so many elements, each of its own meaning."""
    for function in ast.walk(parse(path)):
        if isinstance(function, ast.FunctionDef):
            every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            found = (argument for argument in every if _is_anonymous(argument.annotation))
            yield from (f"{spot(path, function)} {argument.arg}" for argument in found)


def _is_anonymous(annotation: ast.expr | None) -> bool:
    if isinstance(annotation, ast.BinOp):  # tuple[...] | None
        return _is_anonymous(annotation.left) or _is_anonymous(annotation.right)
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "tuple":
        return False
    return isinstance(annotation.slice, ast.Tuple) and len(annotation.slice.elts) >= AT_LEAST


def test_no_more_tuples_are_unpacked_into_calls() -> None:
    found = [call for path in sources(PACKAGE) for call in unpacked(path)]
    assert len(found) <= UNPACKED, "\n".join(found)


def test_no_more_parameters_are_anonymous_tuples() -> None:
    found = [parameter for path in sources(PACKAGE) for parameter in anonymous(path)]
    assert len(found) <= PARAMETERS, "\n".join(found)


def test_the_laws_can_be_broken(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        "def f(a: tuple[int, str, int] | None, b: tuple[int, ...], c: tuple[int, int]):\n"
        "    how = 1, 2, 3\n    pair = 1, 2\n    g(*how)\n    g(*pair)\n    g(*b)\n",
        encoding="utf-8",
    )
    assert list(unpacked(path)) == ["some.py:4 *how"]
    assert list(anonymous(path)) == ["some.py:1 a"]
