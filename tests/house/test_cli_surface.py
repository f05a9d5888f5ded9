"""The command line's surface is a list in a file: every verb, option, spelling, type and default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from outsize.cli.app import make_app

Verb = Callable[..., Any]


def verbs() -> Iterator[tuple[str, Verb]]:
    """The root and each verb with the function behind it."""
    app = make_app()
    assert app.registered_callback is not None
    assert app.registered_callback.callback is not None
    yield "outsize", app.registered_callback.callback
    for command in app.registered_commands:
        assert command.callback is not None
        yield f"outsize {command.name or command.callback.__name__}", command.callback


def parameters(verb: Verb) -> Iterator[tuple[inspect.Parameter, type, OptionInfo | ArgumentInfo]]:
    """What a verb takes from the line."""
    hints = get_type_hints(verb, include_extras=True)
    for parameter in inspect.signature(verb).parameters.values():
        if hints[parameter.name] is not typer.Context:
            kind, info = get_args(hints[parameter.name])
            yield parameter, kind, info


def surface() -> Iterator[str]:
    """`outsize plan --batch: int | None = None`, one line for each parameter, in the order of --help."""
    for path, verb in verbs():
        for parameter, kind, info in parameters(verb):
            required = parameter.default is inspect.Parameter.empty
            default = "" if required else f" = {parameter.default}"
            yield f"{path} {_spelling(parameter, info)}: {_words(kind)}{default}"


def _spelling(parameter: inspect.Parameter, info: OptionInfo | ArgumentInfo) -> str:
    # inside Annotated, typer keeps the first spelling where a default would be
    return " ".join((info.default, *(info.param_decls or ()))) if info.default is not ... else parameter.name


def _words(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(kind)
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return " | ".join(map(_words, get_args(kind))) or getattr(kind, "__name__", str(kind))


def test_the_surface_is_frozen(golden: Callable[[str, str], None]) -> None:
    golden("cli.txt", "".join(f"{line}\n" for line in surface()))


def test_every_verb_and_option_has_help() -> None:
    for path, verb in verbs():
        assert verb.__doc__, path
        assert all(info.help for _, _, info in parameters(verb)), path


def test_every_verb_speaks_json() -> None:
    mute = {"outsize"}
    speaking = {path for path, verb in verbs() if any(p.name == "json" for p, _, _ in parameters(verb))}
    assert {path for path, _ in verbs()} - mute == speaking
