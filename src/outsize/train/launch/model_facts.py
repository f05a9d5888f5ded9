"""Short texts of what a model's numbers follow from besides its weights, to compare between processes.

Weights and shapes do not tell a ReLU from a GELU, nor a dropout of 0.1 from one of 0.5. The facts of a module
are its class, the code of its forward, and its attributes: numbers, texts and containers of them by value,
functions by their code, defaults and closures, tensors by shape and dtype, other objects by their class and
their public attributes. No text holds an address or depends on the order of a set, so equal models have equal
facts in every process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from types import CodeType, FunctionType, MethodType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from outsize.program.objects import MODULE_TABLES, is_filled

DEPTH = 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, np.generic)


def facts_of(model: nn.Module, loss_fn: Callable[..., Any] | None) -> dict[str, str]:
    """Maps `layers.3.act` (a module's attribute) or `layers.3.class` to a text; the loss is `loss_fn`."""
    facts: dict[str, str] = {}
    for fqn, module in model.named_modules():
        facts.update((f"{fqn}.{key}".lstrip("."), text) for key, text in _facts_of_module(module))
    if isinstance(loss_fn, nn.Module):
        facts.update((f"loss_fn.{key}", text) for key, text in _facts_of_module(loss_fn))
    elif loss_fn is not None:
        facts["loss_fn"] = text_of(loss_fn, DEPTH)
    return facts


def digest_of(facts: Mapping[str, str]) -> str:
    """Returns 12 hexadecimal digits that are equal for equal facts."""
    return sha256("\n".join(f"{name}={text}" for name, text in facts.items()).encode()).hexdigest()[:12]


def _facts_of_module(module: nn.Module) -> Iterator[tuple[str, str]]:
    yield "class", _name(type(module))
    yield "forward", text_of(getattr(type(module).forward, "__func__", type(module).forward), DEPTH)
    for name, value in sorted(vars(module).items()):
        if name not in MODULE_TABLES and not isinstance(value, nn.Module):
            yield name, text_of(value, DEPTH)
            yield from ((f"{name}.{part}", text_of(held, DEPTH)) for part, held in _public(value).items())


def text_of(value: Any, depth: int = DEPTH) -> str:
    """Returns a text of a value that is equal for equal values in every process."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor | np.ndarray):
        return _text_of_numbers(value)
    if isinstance(value, type | nn.Module):
        return _name(value if isinstance(value, type) else type(value))
    if isinstance(value, dict | list | tuple | set | frozenset):
        return _text_of_container(value, depth)
    if isinstance(value, functools.partial):
        return f"partial({text_of(value.func, depth)}, {text_of((value.args, value.keywords), depth)})"
    if isinstance(value, MethodType):
        owner = value.__self__
        return (
            f"{text_of(value.__func__, depth)} of {_name(owner if isinstance(owner, type) else type(owner))}"
        )
    if isinstance(value, FunctionType):
        held = (
            value.__defaults__,
            [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)],
        )
        return f"{_name(value)} {_digest_of_code(value.__code__)} {text_of(held, depth - 1)}"
    if hasattr(value, "__qualname__"):
        return _name(value)
    return _name(type(value))


def _text_of_numbers(value: Tensor | np.ndarray[Any, Any]) -> str:
    """Returns shape and dtype; of an array, which a program holds as constants, a checksum as well."""
    kind = f"{tuple(value.shape)} {value.dtype}"
    return f"tensor {kind}" if isinstance(value, Tensor) else f"array {kind} {crc32(value.tobytes()):08x}"


def _public(value: Any) -> dict[str, Any]:
    """Returns the public attributes of an object such as a config; private ones may hold hashes."""
    has_own_text = isinstance(value, type | Tensor | nn.Module | FunctionType | MethodType)
    if has_own_text or not hasattr(value, "__dict__"):
        return {}
    return {name: part for name, part in sorted(vars(value).items()) if not name.startswith("_")}


def _text_of_container(value: Any, depth: int) -> str:
    if depth <= 0:
        return type(value).__name__
    if isinstance(value, dict):
        parts = [f"{text_of(key, depth - 1)}: {text_of(part, depth - 1)}" for key, part in value.items()]
    else:
        parts = [text_of(part, depth - 1) for part in value]
    # Lists of names are often made of sets, whose order differs between processes.
    unordered = isinstance(value, dict | set | frozenset) or all(isinstance(part, str) for part in value)
    ordered = sorted(parts) if unordered else parts
    return f"{type(value).__name__}({', '.join(ordered)})"


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}"


def _digest_of_code(code: CodeType) -> str:
    """Covers instructions, names and constants; not the file, which may lie elsewhere on another machine."""
    constants = [
        _digest_of_code(constant) if isinstance(constant, CodeType) else text_of(constant, DEPTH)
        for constant in code.co_consts
    ]
    parts = [code.co_code.hex(), *code.co_names, *code.co_varnames, *constants]
    return sha256("\n".join(parts).encode()).hexdigest()[:8]
