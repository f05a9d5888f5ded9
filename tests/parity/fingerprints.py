"""Says what a model, and whatever its modules hold, is at one moment; shares no code with what it judges.

Tensors count with their identity, memory, values, flags and the attributes that were set on them, containers
with their items in order, objects with their attributes. Two fingerprints are compared path by path.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

Fingerprint = dict[str, Any]
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType)
_DEEPEST = 8


def fingerprint(*roots: Any) -> Fingerprint:
    """Maps the path of everything that the roots hold to what is there."""
    found: Fingerprint = {}
    seen: set[int] = set()
    for number, root in enumerate(roots):
        _look(f"root{number}", root, found, seen, 0)
    return found


def changes(before: Fingerprint, now: Fingerprint) -> list[str]:
    """The paths under which something else is now."""
    return [path for path in {**before, **now} if before.get(path) != now.get(path)]


def _look(path: str, value: Any, found: Fingerprint, seen: set[int], depth: int) -> None:
    found[path] = value if isinstance(value, _LEAVES) else (type(value), id(value))
    if isinstance(value, _LEAVES) or id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        found[f"{path}!"] = _of_tensor(value)
    for name, part in _parts(value):
        _look(f"{path}{name}", part, found, seen, depth + (not isinstance(value, nn.Module)))


def _parts(value: Any) -> list[tuple[str, Any]]:
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts += [(f"[{number}: {key!r}]", part) for number, (key, part) in enumerate(value.items())]
    elif isinstance(value, list | tuple | deque):
        parts += [(f"[{number}]", part) for number, part in enumerate(value)]
    elif isinstance(value, set | frozenset):
        parts += [(f"{{{number}}}", part) for number, part in enumerate(sorted(value, key=repr))]
    return parts + [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


def _of_tensor(tensor: Tensor) -> Any:
    about = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, tensor.grad is None)
    if tensor.is_meta or tensor.layout is not torch.strided:
        return about
    values = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.detach()
    return *about, tensor.data_ptr(), tensor.stride(), hashlib.sha256(values.numpy().tobytes()).hexdigest()
