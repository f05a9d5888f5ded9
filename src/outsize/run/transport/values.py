"""Turns Python values into JSON and tensors, and back, without running code that a message names.

    value     (loss, {"logits": y, "cache": cache})
    body      ["tuple", [["sent", 0], ["dict", [["logits", ["sent", 1]], ["cache", ["object", ...]]]]]]
    tensors   loss, y       sent beside it as their bytes

The vocabulary is closed. It holds None, numbers, texts, bytes; list, tuple, dict, set, slice, range; dtypes,
devices, sizes and layouts; members of an Enum; numpy's numbers and arrays; tensors; and objects of classes
that the receiving process has loaded already: named tuples, dataclasses, `ModelOutput`, exceptions, and every
class that pickles as Python does by default. A class is looked up among the loaded modules, never imported.
Its object is made by the built-in type below it and filled directly, so neither `__init__` nor `__setstate__`
nor a property of it runs. Functions, classes, modules and open files have no words: `NotSendable`.

What occurs twice in a value is one object for the receiver too; cycles through lists, dicts and objects stay.
Oracle: tests/unit/run/transport/test_values.py.
"""

from __future__ import annotations

import base64
import copyreg
import dataclasses
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import EllipsisType, MemberDescriptorType, ModuleType
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from outsize.program.values.containers import refill
from outsize.run.transport.wire_layout import WireLayout, packed_bytes

_ATOMS: Final = (type(None), bool, int, float, str)
_PLAIN_ARRAYS: Final = frozenset("biufcSU")  # numpy's kinds that hold numbers and texts, and no objects
_BUILTIN_BASES: Final = (OrderedDict, dict, list, set, frozenset, tuple)
_PLAIN_BASES: Final = (*_BUILTIN_BASES, object)
_OWN_STATE: Final = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__del__")
_TORCH_WORDS: Final[Mapping[str, type]] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
_LENGTH_BYTES: Final = 8
_ALIGNMENT_BYTES: Final = 16

Word = Callable[[Any], list[Any] | None]
"""Returns what stands for an object in place of its parts; None where its parts are sent."""
Meaning = Callable[[list[Any]], Any]
"""Returns the object that such a word stands for."""


@final
class NotSendable(TypeError):
    """Says that a value, or a message, has a part for which there is no word."""


@final
class ValueWriter:
    """Writes one value; `tensors` are those whose elements are sent beside it, each of them once."""

    def __init__(self, word: Word = lambda _: None) -> None:
        self._word = word
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._open: set[int] = set()
        self._alive: list[Any] = []  # ids are compared, so nothing may be freed meanwhile

    def write(self, value: Any) -> Any:
        """Returns the value as what JSON can hold. Raises NotSendable."""
        if type(value) in _ATOMS:
            return value
        word = self._word(value)
        if word is not None:
            return word
        if isinstance(value, Tensor):
            return self._tensor(value)
        single = _single(value)
        return self._container(value) if single is None else single

    def _tensor(self, tensor: Tensor) -> list[Any]:
        if tensor.layout is torch.sparse_coo:
            parts = [self.write(tensor._indices()), self.write(tensor._values())]
            return ["sparse", list(tensor.shape), tensor.is_coalesced(), *parts]
        if tensor.layout is not torch.strided:
            raise NotSendable(f"a tensor of layout {tensor.layout}")
        if tensor.is_meta:
            return ["meta", list(tensor.shape), _torch_name(tensor.dtype)]
        # A tensor that is in a value twice is one tensor at the other end, too: writes show in both places.
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return ["sent", self._places[id(tensor)]]

    def _container(self, value: Any) -> list[Any]:
        known = self._known.get(id(value))
        if known is not None:
            # A tuple is made of its items, so at the other end it could not be among them.
            if known in self._open and isinstance(value, tuple | frozenset):
                raise NotSendable(f"a {type(value).__name__} that holds itself")
            return ["again", known]
        # Both ends number containers when they come to them, before what is in them: numbers need no message.
        number = self._known[id(value)] = len(self._known)
        self._alive.append(value)
        self._open.add(number)
        written = self._parts(value)
        self._open.discard(number)
        return written

    def _parts(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, [self.write(item) for item in value]]
        if kind is dict:
            return ["dict", self._items(value)]
        if kind is slice:
            return ["slice", [self.write(part) for part in (value.start, value.stop, value.step)]]
        base = _base_of(kind)
        if isinstance(value, BaseException):
            return ["error", _name_of(kind), self.write(value.args), self._state(value)]
        if base in (dict, OrderedDict):
            return ["object", _name_of(kind), self._items(value), self._state(value)]
        # The base's own method: a class may iterate over something else than what it holds.
        items = None if base is object else [self.write(item) for item in base.__iter__(value)]
        return ["object", _name_of(kind), items, self._state(value)]

    def _items(self, mapping: Mapping[Any, Any]) -> list[Any]:
        # `OrderedDict` keeps its order beside the table of the dict, which `move_to_end` does not touch.
        base = OrderedDict if isinstance(mapping, OrderedDict) else dict
        return [[self.write(key), self.write(value)] for key, value in base.items(mapping)]  # pyright: ignore[reportArgumentType]

    def _state(self, value: Any) -> list[Any]:
        """Returns names and values of the attributes and filled slots."""
        slots = [(n, getattr(value, n)) for n in copyreg._slotnames(type(value)) if hasattr(value, n)]  # pyright: ignore[reportAttributeAccessIssue]
        held = [*getattr(value, "__dict__", {}).items(), *slots]
        return [[name, self.write(part)] for name, part in held]


@final
class ValueReader:
    """Reads what a ValueWriter wrote, given the tensors that came beside it."""

    def __init__(self, tensors: Sequence[Tensor], meaning: Meaning | None = None) -> None:
        self._tensors, self._meaning = tensors, meaning
        self._known: list[Any] = []

    def read(self, written: Any) -> Any:
        """Returns the value. Raises NotSendable for a word that is not of the vocabulary."""
        if type(written) in _ATOMS:
            return written
        if not isinstance(written, list) or not written or not isinstance(written[0], str):
            raise NotSendable(f"a message with {str(written)[:80]!r}")
        kind, *parts = written
        try:
            if kind in _SINGLES:
                return _SINGLES[kind](*parts)
            if kind in _CONTAINERS:
                return _CONTAINERS[kind](self, *parts)
        except NotSendable:  # It is a TypeError, and says already what is wrong.
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise NotSendable(f"a message with a wrong {kind!r}: {error}") from error
        if self._meaning is None:
            raise NotSendable(f"a message with the word {kind[:80]!r}")
        return self._meaning(written)

    def _sent(self, place: int) -> Tensor:
        return self._tensors[place]

    def _sparse(self, shape: list[int], coalesced: bool, indices: Any, values: Any) -> Tensor:
        return torch.sparse_coo_tensor(
            self.read(indices), self.read(values), shape, is_coalesced=coalesced, check_invariants=True
        )

    def _again(self, number: int) -> Any:
        return self._known[number]

    def _reserve(self) -> int:
        self._known.append(None)
        return len(self._known) - 1

    def _list(self, items: list[Any]) -> list[Any]:
        made: list[Any] = []
        self._known.append(made)  # Before its items, which may hold it.
        made.extend(map(self.read, items))
        return made

    def _tuple(self, items: list[Any]) -> tuple[Any, ...]:
        number = self._reserve()
        made = self._known[number] = tuple(map(self.read, items))
        return made

    def _set(self, items: list[Any]) -> set[Any]:
        made: set[Any] = set()
        self._known.append(made)
        made.update(map(self.read, items))
        return made

    def _frozenset(self, items: list[Any]) -> frozenset[Any]:
        number = self._reserve()
        made = self._known[number] = frozenset(map(self.read, items))
        return made

    def _dict(self, items: list[list[Any]]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        self._known.append(made)
        made.update((self.read(key), self.read(value)) for key, value in items)
        return made

    def _slice(self, parts: list[Any]) -> slice:
        number = self._reserve()
        made = self._known[number] = slice(*map(self.read, parts))
        return made

    def _error(self, name: str, args: Any, state: list[list[Any]]) -> BaseException:
        number = self._reserve()
        kind = _class_of(name)
        builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        if not issubclass(builtin, BaseException):
            raise NotSendable(f"{name}, which is no exception")
        given = self.read(args)
        # The constructor of the class may want other arguments than those that `args` keeps, and run code.
        made = self._known[number] = builtin.__new__(kind, *given)
        builtin.__init__(made, *given)
        self._fill(made, state)
        return made

    def _object(self, name: str, items: list[Any] | None, state: list[list[Any]]) -> Any:
        number = self._reserve()
        kind = _class_of(name)
        base = _base_of(kind)
        if base in (tuple, frozenset):
            made = self._known[number] = base.__new__(kind, [self.read(item) for item in items or ()])
        else:
            made = self._known[number] = base.__new__(kind)
            # By methods of the base alone: no code of the class runs while a message is read.
            if base in (dict, OrderedDict):
                refill(made, {self.read(key): self.read(value) for key, value in items or ()})
            elif base in (list, set):
                base.__init__(made)
                (list.extend if base is list else set.update)(made, [self.read(i) for i in items or ()])
        self._fill(made, state)
        return made

    def _fill(self, made: Any, state: list[list[Any]]) -> None:
        """Sets attributes and slots directly: no `__setattr__` and no property of the class runs."""
        attributes = getattr(made, "__dict__", None)
        for name, part in state:
            slot = getattr(type(made), name, None) if isinstance(name, str) else None
            if isinstance(slot, MemberDescriptorType):
                slot.__set__(made, self.read(part))
            elif isinstance(attributes, dict) and isinstance(name, str):
                attributes[name] = self.read(part)
            else:
                raise NotSendable(f"an attribute {str(name)[:80]!r} of {_name_of(type(made))}")


# -- values without parts -----------------------------------------------------------------------------------


def _single(value: Any) -> list[Any] | None:
    """Returns the words of a value that has no parts; None for one that has."""
    kind = type(value)
    if kind in (bytes, bytearray):
        return [kind.__name__, _text(value)]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is range:
        return ["range", value.start, value.stop, value.step]
    if kind is torch.Size:
        return ["size", list(value)]
    if kind is torch.device:
        return ["device", str(value)]
    if kind is EllipsisType:
        return ["ellipsis"]
    if isinstance(value, Enum):
        return ["enum", _name_of(kind), value.name]
    if isinstance(value, np.generic | np.ndarray):
        return _array(value)
    word = next((name for name, each in _TORCH_WORDS.items() if kind is each), None)
    return None if word is None else ["torch", word, _torch_name(value)]


def _array(value: Any) -> list[Any]:
    if value.dtype.kind not in _PLAIN_ARRAYS:
        raise NotSendable(f"a numpy array of {value.dtype}")
    word = "array" if type(value) is np.ndarray else "number"
    return [word, value.dtype.str, list(value.shape), _text(np.ascontiguousarray(value).tobytes())]


def _made_array(dtype: str, shape: list[int], data: str) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    if kind.kind not in _PLAIN_ARRAYS:
        raise NotSendable(f"a numpy array of {dtype}")
    return np.frombuffer(bytearray(_bytes(data)), dtype=kind).reshape(shape)


def _torch_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def torch_word(kind: str, name: str) -> Any:
    """Returns torch's dtype, layout or memory format of this name. Raises NotSendable."""
    found = getattr(torch, name, None)
    if kind not in _TORCH_WORDS or not isinstance(found, _TORCH_WORDS[kind]):
        raise NotSendable(f"a {kind} of torch called {name[:80]!r}")
    return found


def _member(name: str, member: str) -> Enum:
    kind = _loaded(name)
    if not issubclass(kind, Enum):
        raise NotSendable(f"{name}, which is no Enum")
    return kind.__members__[member]


_SINGLES: Final[Mapping[str, Callable[..., Any]]] = {
    "bytes": lambda data: _bytes(data),
    "bytearray": lambda data: bytearray(_bytes(data)),
    "complex": complex,
    "range": range,
    "size": torch.Size,
    "device": torch.device,
    "ellipsis": lambda: ...,
    "enum": _member,
    "array": _made_array,
    "number": lambda dtype, shape, data: _made_array(dtype, shape, data)[()],
    "torch": torch_word,
    "meta": lambda shape, name: torch.empty(shape, dtype=torch_word("dtype", name), device="meta"),
}
_CONTAINERS: Final[Mapping[str, Callable[..., Any]]] = {
    "sent": ValueReader._sent,
    "sparse": ValueReader._sparse,
    "again": ValueReader._again,
    "list": ValueReader._list,
    "tuple": ValueReader._tuple,
    "set": ValueReader._set,
    "frozenset": ValueReader._frozenset,
    "dict": ValueReader._dict,
    "slice": ValueReader._slice,
    "error": ValueReader._error,
    "object": ValueReader._object,
}


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# -- classes ------------------------------------------------------------------------------------------------


def _name_of(kind: type) -> str:
    """Returns `module:Class` of a class whose objects can be sent. Raises NotSendable."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _loaded(name) is not kind:
        raise NotSendable(f"{name}, which its module does not have under this name")
    if not issubclass(kind, Enum):
        _insist_on_plain_state(kind, name)
    return name


def _class_of(name: str) -> Any:
    kind = _loaded(name)
    _insist_on_plain_state(kind, name)
    return kind


def _loaded(name: str) -> type:
    """Returns the class of that name in a module that this process has loaded. Raises NotSendable."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        if not isinstance(found, ModuleType | type):
            break
        found = vars(found).get(part)
    if not isinstance(found, type):
        raise NotSendable(f"{name[:200]}, which is no class that this process has loaded")
    return found


@lru_cache(maxsize=1024)
def _insist_on_plain_state(kind: type, name: str) -> None:
    """Raises NotSendable unless an object is what its built-in container, attributes and slots say."""
    refused = NotSendable(f"a {name}")
    if issubclass(kind, type | ModuleType | torch.nn.Module | Tensor):
        raise refused
    own = (base for base in kind.__mro__ if base.__module__ == "builtins" and base not in _PLAIN_BASES)
    if not all(issubclass(base, BaseException) for base in own):
        raise refused
    builtins = {base for base in kind.__mro__ if _is_builtin(base)}
    exempt = _OWN_STATE[:2] if dataclasses.is_dataclass(kind) else ()  # ModelOutput's is as by default
    for method in _OWN_STATE:
        owner = next((base for base in kind.__mro__ if method in vars(base)), object)
        if owner not in builtins and method not in exempt and not _is_generated(owner, method):
            raise NotSendable(f"a {name}, which defines {method}")
    try:
        if not issubclass(kind, BaseException):
            _base_of(kind).__new__(kind)
    except TypeError as error:  # a class of C code, with a state of its own
        raise refused from error


def _is_builtin(kind: type) -> bool:
    return kind is OrderedDict or kind.__module__ == "builtins" or kind.__module__ == "typing"


def _is_generated(owner: type, method: str) -> bool:
    """Tells whether `dataclass(slots=True, frozen=True)` has made the method."""
    made = getattr(vars(owner)[method], "__module__", None)
    return dataclasses.is_dataclass(owner) and made == "dataclasses"


def _base_of(kind: type) -> Any:
    """Returns the built-in container below a class, or object."""
    if issubclass(kind, BaseException):
        return BaseException
    return next((base for base in _BUILTIN_BASES if issubclass(kind, base)), object)


# -- one value as bytes -------------------------------------------------------------------------------------


def value_bytes(value: Any) -> Tensor:
    """Returns a value with its tensors, copied to the host, as one tensor of bytes. Raises NotSendable."""
    writer = ValueWriter()
    body = writer.write(value)
    layouts = list(map(WireLayout.of, writer.tensors))
    header = json.dumps([[_described(layout) for layout in layouts], body]).encode()
    begin = _aligned(_LENGTH_BYTES + len(header))
    parts: list[Tensor] = [_as_bytes(len(header).to_bytes(_LENGTH_BYTES, "little") + header, begin)]
    for tensor in writer.tensors:
        data = packed_bytes(tensor).cpu()
        parts += [data, torch.zeros(_aligned(len(data)) - len(data), dtype=torch.uint8)]
    return torch.cat(parts)


def value_of_bytes(data: Tensor) -> Any:
    """Returns the value that `value_bytes` wrote; its tensors are on the host. Raises NotSendable."""
    length = int.from_bytes(data[:_LENGTH_BYTES].numpy().tobytes(), "little")
    try:
        layouts, body = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes())
    except ValueError as error:
        raise NotSendable(f"bytes that are no value: {error}") from error
    begin, tensors = _aligned(_LENGTH_BYTES + length), list[Tensor]()
    for layout in map(layout_of, layouts):
        tensor = layout.empty(torch.device("cpu"))
        part = data[begin : begin + layout.size_bytes]
        if len(part) != layout.size_bytes:
            raise NotSendable("bytes that end within a tensor")
        if len(part):
            layout.memory(tensor).view(torch.uint8).copy_(part)
        tensors.append(tensor)
        begin += _aligned(layout.size_bytes)
    return ValueReader(tensors).read(body)


def write_value(file: Path, value: Any) -> None:
    """Writes a value to a file. Raises NotSendable."""
    file.write_bytes(value_bytes(value).numpy().data)


def read_value(file: Path) -> Any:
    """Returns the value that `write_value` wrote. Raises NotSendable."""
    return value_of_bytes(torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8))


def described(layouts: Iterable[WireLayout]) -> list[Any]:
    """Returns layouts as what JSON can hold."""
    return [_described(layout) for layout in layouts]


def _described(layout: WireLayout) -> list[Any]:
    return [list(layout.shape), list(layout.stride), _torch_name(layout.dtype)]


def layout_of(written: list[Any]) -> WireLayout:
    """Returns the layout that `described` wrote. Raises NotSendable."""
    shape, stride, name = written
    numbers = [*shape, *stride]
    if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise NotSendable(f"a tensor of shape {shape} and strides {stride}")
    distinct = [size if step else min(size, 1) for size, step in zip(shape, stride, strict=True)]
    reach = 1 + sum((size - 1) * step for size, step in zip(distinct, stride, strict=True))
    if all(distinct) and reach > math.prod(distinct):
        raise NotSendable(f"a tensor of shape {shape} whose strides {stride} lead out of it")
    return WireLayout(tuple(shape), tuple(stride), torch_word("dtype", name))


def _as_bytes(data: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
