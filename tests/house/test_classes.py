"""Every class is abstract or final (equinox's law): nobody inherits from a concrete class of the house.

Abstract: ABC or Protocol among the bases. Final: decorated with typing.final. An Enum with members cannot
be subclassed anyway. A TypedDict (its class line says `total=`) has no instances of its own and no methods.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from house import PACKAGE, last_name, parse, sources, spot

ABSTRACT = {"ABC", "Protocol"}
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
