"""Says what a field of a record of options takes, by its annotation, and explains each field in `help()`.

    Ranks(own_batches="no")      BadOption: own_batches='no' is a str, no True or False
    help(outsize.Ranks)          each field with its type, its default, what it says and an example

One check for all fields: what a type checker would refuse is refused when the record is made.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, final, get_args, get_origin

from outsize.errors import BadOption
from outsize.errors.arguments import shown
from outsize.errors.words import value_here

# What is taken for a type, where that is more or less than its objects: a flag is no number.
_TAKEN: Final[Mapping[Any, Callable[[Any], bool]]] = {
    NoneType: lambda value: value is None,
    int: lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    float: lambda value: isinstance(value, Real) and not isinstance(value, bool),
    Path: lambda value: isinstance(value, PathLike),
}
_WORDS: Final[Mapping[Any, str]] = {
    bool: "True or False",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
}
_NUMBERS: Final = (int, float)


@final
@dataclass(frozen=True)
class FieldType:
    """Says which type a field takes, `kind`, with an example as one types it."""

    kind: Any
    example: str

    def insist(self, value: Any, name: str, typed: str) -> None:
        """Raises BadOption for a value of another kind; `typed` has braces in the place of the example."""
        if takes(self.kind, value):
            return
        kinds = [one for one in _parts(self.kind) if one is not NoneType]
        words = [word for one in kinds if get_origin(one) is Literal for word in get_args(one)]
        near = value_here(name, value)
        if words and all(get_origin(one) is Literal for one in kinds):
            first, *others = sorted(words, key=lambda word: word != near)
            raise BadOption(
                f"{name}={shown(value)} makes no sense",
                numbers=f"values: {', '.join(map(repr, words))}",
                next_step=", or ".join((typed.format(repr(first)), *(map(repr, others[:1])))),
            )
        known = " or ".join(dict.fromkeys(map(_word, kinds)))
        known = known.replace("text or path", "path")  # a text is one
        is_plain = any(one in _NUMBERS for one in kinds) or kinds == [str]
        wrong = "makes no sense" if is_plain else f"is a {type(value).__name__}, no {known}"
        raise BadOption(
            f"{name}={shown(value)} {wrong}",
            numbers=f"it takes a {known}" if is_plain else "",
            next_step=typed.format(self.example if near is None else repr(near)),
        )


def takes(kind: Any, value: Any) -> bool:
    """Tells whether a value is of a kind: a class, a union, literals, a sequence, a mapping, a function."""
    if kind is Any or kind is ...:
        return True
    if kind in _TAKEN:
        return _TAKEN[kind](value)
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(takes(one, value) for one in inside)
    if origin is Annotated:
        return takes(inside[0], value)
    if origin is Literal:
        return any(value == word and type(value) is type(word) for word in inside)
    if origin is Callable:
        return callable(value)
    if origin is Mapping:
        # what is no axis is named by who reads the mapping
        return isinstance(value, Mapping)
    if origin is Sequence:
        is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
        return is_sequence and all(takes(inside[0], one) for one in value)
    return isinstance(value, origin or kind)


def _parts(kind: Any) -> Iterator[Any]:
    """Yields the members of a union, or the kind itself."""
    if get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _parts(one)
    elif get_origin(kind) is Annotated:
        yield get_args(kind)[0]
    else:
        yield kind


def _word(kind: Any) -> str:
    """Returns what a sentence calls a kind."""
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin is Callable:
        return "function"
    if origin is Sequence:
        return f"list of {' or '.join(map(_word, _parts(get_args(kind)[0])))}"
    if origin is Mapping:
        return "mapping"
    return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))


@final
class FieldHelp:
    """The docstring of a record, followed by its fields; it is made when somebody reads it."""

    def __init__(self, record: type) -> None:
        self._record, self._about = record, record.__doc__

    @classmethod
    def attach(cls, record: type) -> None:
        """Lets `help(record)` explain each field."""
        record.__doc__ = cls(record)  # pyright: ignore[reportAttributeAccessIssue]

    def __get__(self, _: object, __: type | None = None) -> str | None:
        """Returns the text, which Python asks for as the docstring of the class."""
        try:
            lines = [line for name, text in self._said() for line in self._explained(name, text)]
        except (OSError, TypeError, SyntaxError):  # a package without its source
            return self._about
        return "\n".join((inspect.cleandoc(self._about or ""), "", "Fields:", *lines))

    def _said(self) -> Iterator[tuple[str, str]]:
        """Yields each field with the string below it."""
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(self._record))).body
        assert isinstance(tree, ast.ClassDef)
        for field, said in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr):
                yield ast.unparse(field.target), str(ast.literal_eval(said.value))

    def _explained(self, name: str, text: str) -> Iterator[str]:
        (field,) = (one for one in fields(self._record) if one.name == name)
        kind = ast.parse(str(field.type), mode="eval").body
        assert isinstance(kind, ast.Subscript)
        assert isinstance(kind.slice, ast.Tuple)
        annotation, example = kind.slice.elts
        yield f"  {name}: {ast.unparse(annotation)} = {field.default!r}"
        yield from textwrap.wrap(
            " ".join(text.split()), 96, initial_indent="      ", subsequent_indent="      "
        )
        yield f"      Example: outsize.{self._record.__name__}({name}={ast.literal_eval(example)})"
