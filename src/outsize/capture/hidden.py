"""Tensors that hide in arguments: in a closure, or in the attributes of an object (a cache).

A tape refers to tensors among the arguments. One inside an object would be the fake of the recording at
every replay, and an object that a leaf fills would be filled again and again (rule 10).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from outsize.capture.fakes import is_fake
from outsize.program.tree import leaves

# An object in an object in an object: transformers' Cache holds layers, which hold keys.
_DEPTH = 4
_HARMLESS = (int, float, complex, str, bytes, type, nn.Module, torch.dtype, torch.device, type(None))


def objects(args: Any) -> list[Any]:
    """The arguments that may hold tensors and are none."""
    return [a for a in leaves(args) if not isinstance(a, (Tensor, *_HARMLESS))]


def hides_tensor(given: list[Any], weights: Iterable[int]) -> bool:
    """Does one of these objects hold a tensor of this forward? `weights` are ids it may hold."""
    return any(id(t) not in weights for a in given for t in _fakes_in(a, _DEPTH))


def _fakes_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if is_fake(value):
            yield value
    elif depth and not isinstance(value, _HARMLESS):
        for part in _parts(value):
            yield from _fakes_in(part, depth - 1)


def _parts(value: Any) -> Iterable[Any]:
    match value:
        case list() | tuple() | set():
            return value
        case dict():
            return value.values()
        case functools.partial():
            return (value.func, *value.args, *value.keywords.values())
        case MethodType():
            return (value.__self__,)
        case FunctionType():
            return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        case _:
            return getattr(value, "__dict__", {}).values()


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
