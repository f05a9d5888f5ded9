"""Reads the options of a verb as records of their subjects.

    def run(target: Target, training: TrainingFlags, watch: Watch, ...)     what a verb is written as
    outsize run MODEL --steps 20 --watch hang_timeout=60,dashboard          what a user types

The fields of a plain record are a flag each. A `KeyFlag` is one flag for all rare settings of a subject:

    --watch hang_timeout=60,on_hang=wait,dashboard     a key without a value is true
    --checkpoint run,every=10m                         the first key (folder) needs no name
    --watch help                                       each key, with what it says and an example

The verb that typer sees has a parameter for each flag, in the place of its record.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Annotated, Any, Final, final, get_args, get_type_hints

import typer
from pydantic import TypeAdapter, ValidationError

from outsize.errors import BadOption
from outsize.errors.words import nearest
from outsize.ir.base import first_problem

Verb = Callable[..., None]
HELP: Final = "help"
_COMMA: Final = re.compile(r"(?<!\\),")  # a comma within a value has a backslash before it


def with_records(verb: Verb) -> Verb:
    """Returns the verb with its records' fields as parameters; it is called with the records."""
    hints = get_type_hints(verb, include_extras=True)
    records: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    by_keys = {name: flag for name, kind in hints.items() if (flag := _key_flag(kind)) is not None}

    @functools.wraps(verb)
    def flat(**given: Any) -> None:
        for name, record in records.items():
            given[name] = record(**{one.name: given.pop(one.name) for one in fields(record)})
        for name, flag in by_keys.items():
            given[name] = flag.read(given[name])
        verb(**given)

    written = signature(verb)
    shown = [each for one in written.parameters.values() for each in _shown(one, hints)]
    vars(flat)["__signature__"] = written.replace(parameters=shown)
    flat.__annotations__ = {one.name: one.annotation for one in shown}
    return flat


def _shown(parameter: Parameter, hints: dict[str, Any]) -> Iterator[Parameter]:
    """Yields the parameters that stand for one of the verb: itself, or the flags of its record."""
    kind: Any = hints[parameter.name]
    if (flag := _key_flag(kind)) is not None:
        yield Parameter(parameter.name, Parameter.KEYWORD_ONLY, default=None, annotation=flag.annotation)
        return
    if not is_dataclass(kind):
        yield parameter.replace(annotation=_briefly(kind), kind=Parameter.KEYWORD_ONLY)
        return
    annotations = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        kind = _briefly(annotations[one.name])
        yield Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=kind)


def _key_flag(kind: Any) -> KeyFlag | None:
    return next((one for one in getattr(kind, "__metadata__", ()) if isinstance(one, KeyFlag)), None)


@final
@dataclass(frozen=True)
class Brief:
    """How a verb shows an option that others explain at length: Annotated[options.Input, Brief(...)]."""

    metavar: str
    help: str


def _briefly(kind: Any) -> Any:
    """Returns an option as its Brief says, if it has one."""
    metadata: Any = getattr(kind, "__metadata__", ())
    brief = next((one for one in metadata if isinstance(one, Brief)), None)
    if brief is None:
        return kind
    option: Any = copy(metadata[0])
    option.metavar, option.help = brief.metavar, brief.help
    option.show_default = option.show_envvar = False
    return Annotated[get_args(kind)[0], option]


def setting(name: str, value: str | None) -> str:
    """Returns KEY=VALUE as a KeyFlag reads it, or KEY alone for a key that is true."""
    return name if value is None else f"{name}=" + value.replace(",", r"\,")


@final
@dataclass(frozen=True)
class Key:
    """Explains a key, with an example of its value as one types it; it is the annotation of a field."""

    example: str
    help: str


@final
@dataclass(frozen=True, eq=False)
class KeyFlag:
    """A flag whose settings, KEY=VALUE,..., make a `subject`, a frozen dataclass whose fields have a `Key`.

    `plain` is what help calls the value of the first key, where that needs no name. A value is checked
    against the type of its field.
    """

    flag: str
    subject: type
    help: str
    plain: str = ""
    panel: str | None = None

    @property
    def annotation(self) -> Any:
        """Returns the flag as typer takes it."""
        option: Any = typer.Option(
            self.flag,
            metavar=f"{self.plain},..." if self.plain else "KEY=VALUE",
            help=self.help,
            rich_help_panel=self.panel,
            callback=self._explained,
            is_eager=True,  # keys are explained before an argument is missed
            show_default=False,
        )
        return Annotated[str | None, option]

    def read(self, text: str | None) -> Any:
        """Returns the subject with what is given. Raises BadOption."""
        return self.subject(**dict(self._settings(text or "")))

    def _explained(self, text: str | None) -> str | None:
        """Returns what is given; `help` shows the keys, and leaves."""
        if text != HELP:
            return text
        for name, key in self._keys.items():
            typer.echo(f"{self._example(name)}\n    {key.help}")
        raise typer.Exit

    @cached_property
    def _types(self) -> dict[str, Any]:
        return get_type_hints(self.subject, include_extras=True)

    @cached_property
    def _keys(self) -> dict[str, Key]:
        return {
            name: one
            for name, kind in self._types.items()
            for one in kind.__metadata__
            if isinstance(one, Key)
        }

    def _settings(self, text: str) -> Iterator[tuple[str, Any]]:
        for place, written in enumerate(filter(None, _COMMA.split(text))):
            part = written.replace(r"\,", ",").strip()
            name, equals, value = part.partition("=")
            name = name.replace("-", "_")
            if name not in self._keys:
                is_typo = bool(equals) and nearest(name, self._keys) is not None
                if place or not self.plain or is_typo:
                    raise self._no_key(part, name)
                name, equals, value = self._first, "=", part
            yield name, self._value(name, value if equals else None)

    @property
    def _first(self) -> str:
        return next(iter(self._keys))

    def _value(self, name: str, text: str | None) -> Any:
        """Returns the value of a key, None for one that is alone. Raises BadOption for none of its type."""
        kind: Any = self._types[name]
        if text is None and get_args(kind)[0] is bool:
            return True
        problem = "it has no value"
        if text:
            try:
                return TypeAdapter(kind).validate_strings(text)
            except ValidationError as error:
                problem = first_problem(error)[1]
        raise BadOption(
            f"{self.flag} {name}{'' if text is None else f'={text}'} makes no sense",
            numbers=problem,
            next_step=self._typed(name),
        )

    def _no_key(self, part: str, name: str) -> BadOption:
        near = nearest(name, self._keys)
        return BadOption(
            f"{self.flag} has no key {name!r}" + (f"; did you mean `{near}`?" if near else ""),
            numbers=f"in {part!r}; keys: {', '.join(self._keys)}",
            next_step=self._typed(near or self._first),
        )

    def _typed(self, name: str) -> str:
        return f"{self.flag} {self._example(name)}, or {self.flag} {HELP}"

    def _example(self, name: str) -> str:
        """Returns a key as one types it: `hang_timeout=60`, `dashboard`; the plain value of the first."""
        example = self._keys[name].example
        is_plain = bool(self.plain) and name == self._first
        return example if is_plain or example == name else f"{name}={example}"
