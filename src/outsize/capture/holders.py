"""What objects among the arguments hold (a cache, layer by layer), and what a call has put into them.

    before   .layers[3].keys  None        after   .layers[3].keys  Tensor        changed: that path

A path is a tuple of steps: an attribute's name as text, an index or a key in a tuple of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any, Final

from torch import Tensor, nn

Path = tuple[Any, ...]
ABSENT: Final = object()
# transformers' EncoderDecoderCache holds caches, which hold lists of layers, which hold keys.
_DEPTH = 6
_CLOSED = (Tensor, nn.Module, FunctionType, type)


def contents(objects: Iterable[Any]) -> dict[Path, Any]:
    """Every part of these objects that is no container itself."""
    found: dict[Path, Any] = {}
    for number, each in enumerate(objects):
        _look(each, ((number,),), found)
    return found


def _look(value: Any, path: Path, found: dict[Path, Any]) -> None:
    parts = None if isinstance(value, _CLOSED) or len(path) > _DEPTH else _parts(value)
    if parts is None:
        found[path] = value
    for step, part in (parts or {}).items():
        _look(part, (*path, step), found)


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, list | tuple):
        return {(n,): part for n, part in enumerate(value)}
    if isinstance(value, dict):
        return {(key,): part for key, part in value.items()}
    return getattr(value, "__dict__", None)


def changed(before: Mapping[Path, Any], after: Mapping[Path, Any]) -> dict[Path, Any]:
    """The paths whose value is another object now; ABSENT for those that are gone."""
    paths = [*after, *(path for path in before if path not in after)]
    return {p: after.get(p, ABSENT) for p in paths if before.get(p, ABSENT) is not after.get(p, ABSENT)}


def look_up(objects: list[Any], path: Path) -> Any:
    """What is at a path, or ABSENT."""
    value: Any = objects
    for step in path:
        try:
            value = value[step[0]] if isinstance(step, tuple) else vars(value)[step]
        except (LookupError, TypeError):
            return ABSENT
    return value


def put(objects: list[Any], path: Path, value: Any) -> None:
    """Bind it there; what holds it is there already."""
    holder, step = look_up(objects, path[:-1]), path[-1]
    if isinstance(step, tuple):
        holder[step[0]] = value
    else:
        vars(holder)[step] = value
