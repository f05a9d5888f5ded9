"""Reads JSON that strangers wrote. What Python's reader lets pass and no writer means is refused:

- a key that stands twice in an object (the last one would win without a word);
- NaN, Infinity, and numbers that become infinite, such as 1e999;
- bytes that are no UTF-8, more than 256 MiB of them, and more than 64 levels of brackets.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, final

MAX_BYTES = 256 << 20
MAX_DEPTH = 64


@final
class BadJson(ValueError):
    """Text that is no JSON of the kind that is read here; the message has the line where it is known."""


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """Returns the text of a file in UTF-8. Raises OSError, and BadJson for other bytes or too many of
    them.
    """
    with Path(path).open("rb") as file:
        raw = file.read(max_bytes + 1)
    return decode(raw, max_bytes)


def decode(raw: bytes, max_bytes: int = MAX_BYTES) -> str:
    """Returns the bytes as text; see `read_text`."""
    if len(raw) > max_bytes:
        raise BadJson(f"it has more than {max_bytes >> 20} MiB")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadJson(f"line {line}: the byte {raw[error.start]:#04x} is no UTF-8") from None


def parse(text: str | bytes) -> Any:
    """Returns the value that the text is. Raises BadJson."""
    text = decode(text) if isinstance(text, bytes) else text
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise BadJson(f"line {error.lineno} column {error.colno}: {error.msg}") from None
    except _Twice as twice:
        raise BadJson(f"{_lines(text, twice.key)}the key {twice.key!r} stands twice in one object") from None
    except ValueError as error:  # BadJson of the hooks, or an integer of more digits than Python reads
        raise BadJson(str(error)) from None
    except RecursionError:
        raise BadJson(f"more than {MAX_DEPTH} brackets are open at once") from None
    if isinstance(value, (dict, list)):
        _check_depth(value)
    return value


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Returns the object that the text is. Raises BadJson."""
    value = parse(text)
    if not isinstance(value, dict):
        raise BadJson(f"it is a {type(value).__name__}, not an object in braces")
    return value


@final
class _Twice(Exception):
    """A key that stands twice in one object."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for place, key in enumerate(keys) if key in keys[:place]))
    return found


def _no_constant(word: str) -> float:
    raise BadJson(f"{word} is no number that is used here")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadJson(f"the number {digits[:40]} is too large")
    return value


def _lines(text: str, key: str) -> str:
    """Says in which lines a key stands; nothing when it is written with escapes."""
    found = [text.count("\n", 0, m.start()) + 1 for m in re.finditer(rf'"{re.escape(key)}"\s*:', text)]
    return f"lines {', '.join(map(str, found[:4]))}: " if len(found) > 1 else ""


def _check_depth(value: Any) -> None:
    """Raises BadJson for more than MAX_DEPTH containers in each other."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for children in inside for child in children if isinstance(child, (dict, list))]
        if not level:
            return
    raise BadJson(f"more than {MAX_DEPTH} brackets are open at once")
