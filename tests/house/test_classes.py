"""Every class is abstract or final (equinox's law), and no class has more than 25 methods.

Nobody inherits from a concrete class of the house. Abstract: ABC or Protocol among the bases. Final:
decorated with typing.final. An Enum with members cannot be subclassed anyway. A TypedDict (its class line
says `total=`) has no instances of its own and no methods.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from house import PACKAGE, last_name, parse, sources, spot

ABSTRACT = {"ABC", "Protocol"}
MOST_METHODS = 25
# Classes that have more, and why their methods belong together.
LARGE = {
    "Instructions": "a method for each kind of bytecode, which the table of opcodes names",
    "Trainer": "its methods are the interface of transformers.Trainer",
    "OutsizeStrategy": "its methods are the interface of a strategy of Lightning",
    "Ownership": "not divided yet: who owns a weight, and how its values are loaded and shown",
    "_Handlers": "a method for each kind of action, which its table names",
    "Crew": "the interface of those who run the ranks together",
    "StageExecutor": "its methods are the interface of RunnableStage",
}
SEALED = {"Enum", "StrEnum", "IntEnum", "Flag", "IntFlag"}


def neither_abstract_nor_final(path: Path) -> list[str]:
    """`file:line Name` of each class that breaks the law."""
    classes = [node for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)]
    return [f"{spot(path, node)} {node.name}" for node in classes if not _lawful(node)]


def _lawful(node: ast.ClassDef) -> bool:
    bases = {last_name(base) for base in node.bases}
    decorators = {last_name(decorator) for decorator in node.decorator_list}
    typed_dict = any(keyword.arg == "total" for keyword in node.keywords)
    return bool(bases & (ABSTRACT | SEALED)) or "final" in decorators or typed_dict


def test_every_class_is_abstract_or_final() -> None:
    assert [found for path in sources(PACKAGE) for found in neither_abstract_nor_final(path)] == []


def methods_by_class() -> dict[str, int]:
    """Each class and how many methods it defines itself."""
    classes = [
        node for path in sources(PACKAGE) for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)
    ]
    methods = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: sum(isinstance(line, methods) for line in node.body) for node in classes}


def test_no_class_has_more_methods_than_one_idea_needs() -> None:
    large = {name for name, count in methods_by_class().items() if count > MOST_METHODS}
    assert large - LARGE.keys() == set(), "two ideas in a class: give each its own, with its state"
    assert LARGE.keys() - large == set(), "these are small enough by now: take them out of the table"


@pytest.mark.parametrize(
    ("text", "lawful"),
    [
        ("class A: ...", False),
        ("class A(Base): ...", False),
        ("@dataclass(frozen=True)\nclass A: ...", False),
        ("def f():\n    class A: ...", False),
        ("@final\n@dataclass(frozen=True)\nclass A: ...", True),
        ("@typing.final\nclass A(Base): ...", True),
        ("class A(Base, ABC): ...", True),
        ("class A(typing.Protocol[T]): ...", True),
        ("class A(StrEnum): ...", True),
        ("class A(B, total=False): ...", True),
    ],
)
def test_the_law_can_be_broken(tmp_path: Path, text: str, lawful: bool) -> None:
    path = tmp_path / "some.py"
    path.write_text(text, encoding="utf-8")
    assert (neither_abstract_nor_final(path) == []) is lawful
