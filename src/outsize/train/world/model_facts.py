"""Short texts of what a model's numbers follow from besides its weights, to compare between processes.

Weights and shapes do not tell a ReLU from a GELU, nor a dropout of 0.1 from one of 0.5. The facts of a module
are its class, the code of its forward, and its attributes: numbers, texts and containers of them by value,
functions by their code, defaults and closures, tensors by shape and dtype, other objects by their class and
their public attributes. No text holds an address or depends on the order of a set, so equal models have equal
facts in every process. An address is a number that tells where a live object or the memory of a weight lies:
libraries keep them to recognize an object (torch.compile does), and they say nothing about the numbers.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from hashlib import sha256
from itertools import chain, starmap
from threading import get_ident
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from outsize.program.objects import MODULE_TABLES, is_filled
from outsize.run.weights.freed import FreedWeight

DEPTH = 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, np.generic)
# Linux gives no process memory below this address.
_FIRST_ADDRESS: Final = 1 << 16
_AN_ADDRESS: Final = "an address"
_WRITTEN_ADDRESS: Final = re.compile(r"\bat 0x[0-9a-fA-F]+")  # as `repr` writes it


def facts_of(model: nn.Module, loss_fn: Callable[..., Any] | None) -> dict[str, str]:
    """Maps `layers.3.act` (a module's attribute) or `layers.3.class` to a text; the loss is `loss_fn`."""
    facts: dict[str, str] = {}
    weights = (w for w in (*model.parameters(), *model.buffers()) if not isinstance(w, FreedWeight))
    texts = ValueTexts(tuple(weights))
    for fqn, module in model.named_modules():
        facts.update((f"{fqn}.{key}".lstrip("."), text) for key, text in _facts_of_module(module, texts))
    if isinstance(loss_fn, nn.Module):
        facts.update((f"loss_fn.{key}", text) for key, text in _facts_of_module(loss_fn, texts))
    elif loss_fn is not None:
        facts["loss_fn"] = texts.of(loss_fn)
    return facts


def digest_of(facts: Mapping[str, str]) -> str:
    """Returns 12 hexadecimal digits that are equal for equal facts."""
    return sha256("\n".join(f"{name}={text}" for name, text in facts.items()).encode()).hexdigest()[:12]


def _facts_of_module(module: nn.Module, texts: ValueTexts) -> Iterator[tuple[str, str]]:
    yield "class", _name(type(module))
    yield "forward", texts.of(getattr(type(module).forward, "__func__", type(module).forward))
    for name, value in sorted(vars(module).items()):
        if name not in MODULE_TABLES and not isinstance(value, nn.Module):
            yield name, texts.of(value)
            yield from ((f"{name}.{part}", texts.of(held)) for part, held in _public(value).items())


def _every_address() -> frozenset[int]:
    """Returns where the objects that live now lie; several threads ask for it."""
    # The list of all objects holds also a tuple that another thread is still filling, and Python cannot
    # shorten a tuple that somebody else holds (SystemError). So no bytecode runs while there is the list,
    # before which Python might let that thread go on.
    addresses = map(functools.partial(map, id), starmap(gc.get_objects, [()]))
    return frozenset(chain.from_iterable(addresses))


def text_of(value: Any) -> str:
    """Returns a text of a value that is equal for equal values in every process."""
    return ValueTexts().of(value)


@final
class ValueTexts:
    """Makes texts of values that are equal for equal values in every process."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        """The memory of these weights lies elsewhere in every process."""
        self._weights = weights

    def of(self, value: Any, depth: int = DEPTH) -> str:
        """Returns the text of one value; containers are looked into up to `depth` levels."""
        if isinstance(value, _PLAIN):
            return self._of_plain(value)
        if isinstance(value, Tensor | np.ndarray):
            return _text_of_numbers(value)
        if isinstance(value, type | nn.Module):
            return _name(value if isinstance(value, type) else type(value))
        if isinstance(value, dict | list | tuple | set | frozenset):
            return self._of_container(value, depth)
        if isinstance(value, functools.partial):
            return f"partial({self.of(value.func, depth)}, {self.of((value.args, value.keywords), depth)})"
        if isinstance(value, MethodType):
            owner = value.__self__
            of_owner = _name(owner if isinstance(owner, type) else type(owner))
            return f"{self.of(value.__func__, depth)} of {of_owner}"
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
            held = self.of((value.__defaults__, cells), depth - 1)
            return f"{_name(value)} {self._digest_of_code(value.__code__)} {held}"
        return _name(value if hasattr(value, "__qualname__") else type(value))

    def _of_plain(self, value: Any) -> str:
        is_number = isinstance(value, int | np.integer)
        if is_number and value >= _FIRST_ADDRESS and int(value) in self._addresses:
            return _AN_ADDRESS
        text = repr(value)
        return _WRITTEN_ADDRESS.sub(_AN_ADDRESS, text) if isinstance(value, str) else text

    @cached_property
    def _addresses(self) -> frozenset[int]:
        """Returns where the objects that live now lie, and the memory of the weights."""
        memory = {t.untyped_storage().data_ptr() for t in self._weights if t.layout is torch.strided}
        memory |= {t.data_ptr() for t in self._weights if t.layout is torch.strided}
        return _every_address() | memory | {get_ident()}

    def _of_container(self, value: Any, depth: int) -> str:
        if depth <= 0:
            return type(value).__name__
        if isinstance(value, dict):
            pairs = value.items()
            parts = [f"{self.of(key, depth - 1)}: {self.of(part, depth - 1)}" for key, part in pairs]
        else:
            parts = [self.of(part, depth - 1) for part in value]
        # Lists of names are often made of sets, whose order differs between processes.
        unordered = isinstance(value, dict | set | frozenset) or all(isinstance(part, str) for part in value)
        ordered = sorted(parts) if unordered else parts
        return f"{type(value).__name__}({', '.join(ordered)})"

    def _digest_of_code(self, code: CodeType) -> str:
        """Covers instructions, names and constants; not the file, which may lie elsewhere on another
        machine.
        """
        constants = [
            self._digest_of_code(constant) if isinstance(constant, CodeType) else self.of(constant)
            for constant in code.co_consts
        ]
        parts = [code.co_code.hex(), *code.co_names, *code.co_varnames, *constants]
        return sha256("\n".join(parts).encode()).hexdigest()[:8]


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


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
