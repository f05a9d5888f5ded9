"""Effects: what a call changed in the Python objects that its caller can see.

    layers[3].keys       Tensor          a cache that the call filled: the owner keeps the elements
    layers[3].is_initialized  True       plain values are sent, so that every rank decides alike
    layers[4]            a new object    sent whole

Objects are walked before and after the call; a path that leads elsewhere afterwards is a change. Walked are
dicts, lists and attributes; a tuple or anything without attributes is taken as one value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any, final

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_CLOSED = (*_PLAIN, type, tuple, set, frozenset, Tensor, nn.Module, FunctionType, MethodType, ModuleType)
# What torch itself keeps in every module: tables and hooks. `training` is the user's.
_TORCH = frozenset(vars(nn.Module()).keys()) - {"training"}
# An object in an object: EncoderDecoderCache holds caches, which hold layers, which hold dicts.
_DEPTH = 6

Path = tuple[Any, ...]  # number of the root, then ("." | "[]", name), ...


@final
@dataclass(frozen=True, slots=True)
class _Gone:
    """Nothing is at this path any more."""


Change = tuple[Path, Any]
State = dict[Path, tuple[Any, int]]


def has_state(value: Any) -> bool:
    """An argument that a call can fill."""
    return isinstance(value, dict | list) or (hasattr(value, "__dict__") and not isinstance(value, _CLOSED))


def state_of(roots: Sequence[Any]) -> State:
    """Path -> (value, its version if it is a tensor), parents before children."""
    found: State = {}
    seen: set[int] = set()
    for number, root in enumerate(roots):
        _walk(root, (number,), found, seen)
    return found


def changes(before: State, after: State) -> list[Change]:
    """What to do at which path to get from the one to the other."""
    found: list[Change] = []
    new: set[Path] = set()
    for path, (value, version) in after.items():
        if path[:-1] in new:
            new.add(path)
        elif path not in before or not _same(before[path], (value, version)):
            found.append((path, value))
            new.add(path)
    gone = [p for p in before if p not in after and (len(p) == 2 or p[:-1] in after) and p[:-1] not in new]
    return found + [(p, _Gone()) for p in reversed(gone)]


def apply(roots: Sequence[Any], found: Iterable[Change]) -> None:
    """Make the changes on this rank's own objects."""
    for path, value in found:
        holder = roots[path[0]]
        for step in path[1:-1]:
            holder = _get(holder, *step)
        kind, name = path[-1]
        if isinstance(value, _Gone):
            _remove(holder, kind, name)
        elif kind == ".":
            setattr(holder, name, value)
        elif isinstance(holder, list) and name == len(holder):
            holder.append(value)
        else:
            holder[name] = value


def _walk(value: Any, path: Path, found: State, seen: set[int]) -> None:
    if id(value) in seen or len(path) > _DEPTH:
        return
    seen.add(id(value))
    for step, part in _parts(value):
        found[*path, step] = (part, part._version if _counts_writes(part) else 0)
        if has_state(part):
            _walk(part, (*path, step), found, seen)


def _parts(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(value, dict):
        yield from ((("[]", key), part) for key, part in value.items())
    elif isinstance(value, list):
        yield from ((("[]", index), part) for index, part in enumerate(value))
    if hasattr(value, "__dict__"):
        hidden = _TORCH if isinstance(value, nn.Module) else frozenset[str]()
        named = ((name, part) for name, part in vars(value).items() if name not in hidden)
        yield from (((".", name), part) for name, part in named if not isinstance(part, nn.Module))


def _counts_writes(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _same(before: tuple[Any, int], after: tuple[Any, int]) -> bool:
    old, new = before[0], after[0]
    if old is new:
        return before[1] == after[1]
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(_same((a, 0), (b, 0)) for a, b in zip(old, new, strict=True))
    return type(old) is type(new) and isinstance(old, _PLAIN) and old == new


def _get(holder: Any, kind: str, name: Any) -> Any:
    return getattr(holder, name) if kind == "." else holder[name]


def _remove(holder: Any, kind: str, name: Any) -> None:
    if kind == ".":
        delattr(holder, name)
    else:
        del holder[name]
