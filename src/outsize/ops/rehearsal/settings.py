"""Reads the numbers that make a model large, and names the same model with smaller ones.

    transformers:LlamaConfig, ./config.json   the whole numbers of its config, also those of configs within it
    package.module:builder?width=512          the numbers of the query, and of the builder's defaults
    all others                                none: repeated modules are left out (small_model.py)

Which number is a width and which a depth is not known here: small_model.py finds out by building.
"""

from __future__ import annotations

import inspect
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

from torch import nn

from outsize.capture.models.load import parse_spec

Name = tuple[str | int, ...]
Numbers = Mapping[Name, int]
# A config names tokens so, and they have to be in its vocabulary.
_OF_TOKENS: Final = ("_id", "_ids", "2id")
_LEAST_TOKENS: Final = 16


class Settings(ABC):
    """The numbers of a model, by name."""

    @property
    @abstractmethod
    def numbers(self) -> dict[Name, int]:
        """Returns all numbers that may be changed."""

    @abstractmethod
    def spec(self, changed: Numbers) -> str:
        """Returns the MODEL spec of the same model with these numbers."""


def settings_of(spec: str, model: nn.Module, folder: Path) -> Settings | None:
    """Returns the settings of a model that was built of a spec; `folder` is for the files that they write."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string") and type(model).__module__.startswith("transformers."):
        return ConfigSettings(config.to_json_string(use_diff=False), type(model).__name__, folder)
    made = QuerySettings(spec)
    return made if made.numbers else None


def named(name: Name) -> str:
    """Returns a name as people write it: `text_config.hidden_size`, `depths[2]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in name).lstrip(".")


@final
class ConfigSettings(Settings):
    """The numbers of a config of transformers, which is written to a file."""

    def __init__(self, text: str, architecture: str, folder: Path) -> None:
        self._data: dict[str, Any] = json.loads(text) | {"architectures": [architecture]}
        self._folder, self._written = folder, 0

    @property
    def numbers(self) -> dict[Name, int]:
        return dict(_numbers(self._data, ()))

    def spec(self, changed: Numbers) -> str:
        data = json.loads(json.dumps(self._data))
        for name, value in changed.items():
            _shorten(data, name, self.numbers[name], value)
        for name, value in changed.items():
            _set(data, name, value)
        if changed:
            _rename_tokens(data)
        self._written += 1
        file = self._folder / f"config{self._written}.json"
        file.write_text(json.dumps(data), encoding="utf-8")
        return f"transformers:{file}"


@final
class QuerySettings(Settings):
    """The numbers of a builder's query and of its defaults."""

    def __init__(self, spec: str) -> None:
        self._parsed = parse_spec(spec)
        builder = getattr(sys.modules.get(self._parsed.provider), self._parsed.name, None)
        self._options = {**_defaults(builder), **self._parsed.options}

    @property
    def numbers(self) -> dict[Name, int]:
        return dict(_numbers(self._options, ()))

    def spec(self, changed: Numbers) -> str:
        options = json.loads(json.dumps(dict(self._parsed.options)))
        whole = json.loads(json.dumps(self._options))
        for name, value in changed.items():
            _set(whole, name, value)
            options[name[0]] = whole[name[0]]
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"{self._parsed}?{query}" if query else str(self._parsed)


def _defaults(builder: Any) -> dict[str, int]:
    """Returns the whole numbers that a builder takes where nothing is said."""
    if not callable(builder) or isinstance(builder, nn.Module):
        return {}
    parameters = inspect.signature(builder).parameters.values()
    return {each.name: each.default for each in parameters if type(each.default) is int}


def _numbers(data: Any, name: Name) -> Iterator[tuple[Name, int]]:
    """Yields the numbers of a tree, but those that name tokens."""
    if type(data) is int and data > 1:
        yield name, data
    elif isinstance(data, dict):
        for key, value in data.items():
            if isinstance(key, str) and not key.endswith(_OF_TOKENS):
                yield from _numbers(value, (*name, key))
    elif isinstance(data, list):
        for place, value in enumerate(data):
            yield from _numbers(value, (*name, place))


def _at(data: Any, name: Sequence[str | int]) -> Any:
    for part in name:
        data = data[part]
    return data


def _set(data: Any, name: Name, value: int) -> None:
    _at(data, name[:-1])[name[-1]] = value


def _shorten(data: Any, name: Name, before: int, now: int) -> None:
    """Shortens lists beside a number that have an entry for each of what it counts: the first of each kind of
    entry stays, then the first ones.
    """
    beside = _at(data, name[:-1])
    items = beside.items() if isinstance(beside, dict) else ()
    lists = [key for key, value in items if isinstance(value, list) and len(value) == before]
    if not lists or now >= before:
        return
    entries = [json.dumps([beside[key][place] for key in lists]) for place in range(before)]
    first = [place for place, entry in enumerate(entries) if entry not in entries[:place]]
    rest = [place for place in range(before) if place not in first]
    kept = sorted([*first, *rest][:now])
    for key in lists:
        beside[key] = [beside[key][place] for place in kept]


def _rename_tokens(data: Any) -> None:
    """Gives tokens with a name the first numbers of the vocabulary, where they have later ones."""
    known: dict[int, int] = {}

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(each) for each in value]
        if type(value) is not int or value < _LEAST_TOKENS:
            return value
        return known.setdefault(value, len(known) % _LEAST_TOKENS)

    def walk(part: Any) -> None:
        for key, value in part.items() if isinstance(part, dict) else ():
            if isinstance(key, str) and key.endswith(_OF_TOKENS):
                part[key] = renamed(value)
            else:
                walk(value)

    walk(data)
