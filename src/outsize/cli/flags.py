"""Reads the options of a verb as records of their subjects: each field of a record is an option.

    def run(target: Target, saves: SaveFlags, ...)      what a verb is written as
    outsize run MODEL --checkpoint run --every 10m      what a user types

The verb that typer sees has a parameter for each field, in the place of its record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from inspect import Parameter, signature
from typing import Any, get_type_hints

Verb = Callable[..., None]


def with_records(verb: Verb) -> Verb:
    """Returns the verb with its records' fields as parameters; it is called with the records."""
    hints = get_type_hints(verb, include_extras=True)
    records: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @functools.wraps(verb)
    def flat(**given: Any) -> None:
        for name, record in records.items():
            given[name] = record(**{one.name: given.pop(one.name) for one in fields(record)})
        verb(**given)

    written = signature(verb)
    shown = [each for one in written.parameters.values() for each in _shown(one, hints)]
    vars(flat)["__signature__"] = written.replace(parameters=shown)
    flat.__annotations__ = {one.name: one.annotation for one in shown}
    return flat


def _shown(parameter: Parameter, hints: dict[str, Any]) -> Iterator[Parameter]:
    """Yields the parameters that stand for one of the verb: itself, or the fields of its record."""
    kind: Any = hints[parameter.name]
    if not is_dataclass(kind):
        yield parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY)
        return
    annotations = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        yield Parameter(
            one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=annotations[one.name]
        )
