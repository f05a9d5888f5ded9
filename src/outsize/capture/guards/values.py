"""How guarded values are compared: plain ones by type and value, containers by content, the rest by identity.

`frozen` makes a value of what was read that does not change with it. Arrays above 64 KB and what is nested
deeper than DEPTH are compared by identity.
"""

from __future__ import annotations

import array
import functools
from collections import deque
from itertools import chain
from types import CodeType, EllipsisType, MethodType, NoneType
from typing import Any, Final

import numpy as np
from torch import Tensor

from outsize.program.objects import ABSENT
from outsize.program.tree import Identity
from outsize.program.values.containers import content_of, elements_of, items_of

DEPTH: Final = 6
ARRAY_BYTES: Final = 65536
PLAIN: Final = (bool, int, float, complex, str, bytes, NoneType, EllipsisType, CodeType)
BUFFERS: Final = (np.ndarray, bytearray, array.array)
CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque, functools.partial, *BUFFERS)


def is_container(value: Any) -> bool:
    """Returns whether the content of the value counts where code looks into it."""
    return isinstance(value, CONTAINERS)


def frozen(value: Any, depth: int = DEPTH) -> Any:
    """Returns a value that is equal for equal plain values and containers, and for the same object."""
    if isinstance(value, PLAIN):
        return type(value), repr(value) if value != value else value
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if not depth or not is_container(value):
        return Identity(value)
    if isinstance(value, BUFFERS):
        return _frozen_buffer(value)
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return functools.partial, *(frozen(part, depth - 1) for part in parts)
    if isinstance(value, dict):
        return type(value), *((frozen(k, depth - 1), frozen(v, depth - 1)) for k, v in items_of(value))
    parts = (frozen(part, depth - 1) for part in elements_of(value))
    return type(value), *([frozenset(parts)] if isinstance(value, set | frozenset) else parts)


def _frozen_buffer(buffer: Any) -> Any:
    size = memoryview(buffer).nbytes if isinstance(buffer, bytearray | array.array) else buffer.nbytes
    if size > ARRAY_BYTES or (isinstance(buffer, np.ndarray) and buffer.dtype.hasobject):
        return Identity(buffer)
    if isinstance(buffer, np.ndarray):
        return np.ndarray, buffer.dtype.str, buffer.shape, buffer.tobytes()
    return type(buffer), getattr(buffer, "typecode", ""), bytes(buffer)


def parts_of(value: Any) -> list[Any]:
    """Returns what a container holds."""
    if isinstance(value, dict):
        return list(chain.from_iterable(items_of(value)))
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return [] if isinstance(value, BUFFERS) else list(elements_of(value))


def snapshot_of(value: Any, depth: int = DEPTH) -> Any:
    """Returns a container with what this one holds now, to be shown when it has changed in place."""
    if not depth:
        return value
    if isinstance(value, dict):
        return {key: snapshot_of(part, depth - 1) for key, part in items_of(value)}
    if isinstance(value, list | deque):
        return [snapshot_of(part, depth - 1) for part in elements_of(value)]
    if type(value) is tuple:
        return tuple(snapshot_of(part, depth - 1) for part in value)
    if isinstance(value, (set, *BUFFERS)):
        return content_of(value)
    return value


def is_same_tensor_kind(old: Any, new: Any) -> bool:
    """Returns whether both are tensors of one shape, dtype, device and need of a gradient."""
    return (
        isinstance(old, Tensor)
        and isinstance(new, Tensor)
        and (old.shape, old.dtype, old.device, old.requires_grad)
        == (new.shape, new.dtype, new.device, new.requires_grad)
    )


def short(value: Any) -> str:
    """Returns a short text of a value, or of its absence, for messages."""
    if value is ABSENT:
        return "no value"
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    name = getattr(value, "__qualname__", None)
    if isinstance(value, MethodType) and isinstance(value.__self__, type):
        name = f"{value.__self__.__qualname__}.{value.__name__}"
    text = name if isinstance(name, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
