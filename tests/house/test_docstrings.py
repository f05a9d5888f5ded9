"""Every module, public class and public function says what it is.

Public: no leading underscore, at module level or in a public class. A method that overrides a documented
one says it there; an overload says it in its implementation; functions inside functions are details.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from house import PACKAGE, last_name, parse, sources, spot

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Promises = dict[str, set[str]]


def undocumented(paths: Sequence[Path]) -> list[str]:
    """`file:line name` of everything public without a docstring."""
    trees = {path: parse(path) for path in paths}
    promised = _promises(trees.values())
    modules = [f"{path.name}:1 the module" for path, tree in trees.items() if not ast.get_docstring(tree)]
    public = [(path, node) for path, tree in trees.items() for node in _public(tree, promised)]
    return modules + [f"{spot(path, node)} {node.name}" for path, node in public if not _says(node)]


def _promises(trees: Iterable[ast.Module]) -> Promises:
    """Class name -> documented methods of it and its bases, which a subclass need not explain again."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    said = {c.name: {m.name for m in c.body if isinstance(m, Documented) and _says(m)} for c in classes}
    bases = {c.name: [*_bases(c)] for c in classes}

    def promised(name: str, below: tuple[str, ...] = ()) -> set[str]:
        above = (base for base in bases[name] if base in said and base not in below)
        return said[name].union(*(promised(base, (*below, name)) for base in above))

    return {name: promised(name) for name in said}


def _bases(node: ast.ClassDef) -> Iterator[str]:
    """The names of the bases of a class, also of generic ones."""
    yield from (last_name(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases)


def _public(parent: ast.Module | ast.ClassDef, promised: Promises) -> Iterator[Documented]:
    bases = _bases(parent) if isinstance(parent, ast.ClassDef) else ()
    inherited = {name for base in bases for name in promised.get(base, ())}
    for node in parent.body:
        if not isinstance(node, Documented) or node.name.startswith("_") or node.name in inherited:
            continue
        yield node
        if isinstance(node, ast.ClassDef):
            yield from _public(node, promised)


def _says(node: Documented) -> bool:
    return bool(ast.get_docstring(node)) or "overload" in map(last_name, node.decorator_list)


def test_everything_public_is_documented() -> None:
    assert undocumented(sources(PACKAGE)) == []


BASE = '"""Module."""\nclass Base(ABC):\n    """Base."""\n    def f(self):\n        """F."""\n'
GENERIC = 'class A(Base, Generic[T]):\n    """A."""\nclass B(A[int]):\n    """B."""\n'


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("x = 1", 1),
        ('"""Module."""\ndef f(): ...', 1),
        (BASE + 'class A:\n    """A."""\n    def f(self): ...', 1),
        (BASE + 'class A(Base):\n    """A."""\n    def f(self): ...', 0),
        (BASE + 'class A(Base):\n    """A."""\n    def g(self): ...', 1),
        (BASE + "class A(Base): ...", 1),
        (BASE + GENERIC + "    def f(self): ...", 0),
        (BASE + GENERIC + "    def g(self): ...", 1),
    ],
)
def test_a_missing_docstring_is_seen(tmp_path: Path, text: str, missing: int) -> None:
    path = tmp_path / "some.py"
    path.write_text(text, encoding="utf-8")
    assert len(undocumented([path])) == missing
