"""Which modules of a model are built alike, and which attributes the code of one reads.

Alike: the same class, the same attributes, children alike. Attributes with plain values, or containers, in
which modules of one class differ (`layer_idx`, dropout's `p`) do not count here; `watched` tells which of
them are read. An object that one module alone has (a processor of attention, a partial of an activation)
counts by its class and attributes, any other by its identity. A module that is shared, scripted or hooked, or
has such a part or a shared parameter, is like no other.

A whole number is lent as an `_Index`, which knows whether anybody has computed with it or compared it: that
layer 7 fills `cache.layers[7]` makes it no other kind of layer than layer 8.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType, NoneType
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.program.objects import (
    MODULE_TABLES,
    NUMBERS_AND_TEXT,
    PLAIN,
    Comparison,
    Scope,
    fingerprint,
)

# Two are recorded to know one.
_LEAST = 3
# Objects are compared by their attributes so far; those within belong to something larger than a block.
_LEVELS = 2
# A layer of peft has its own name in a dict of settings.
_VALUES = (*NUMBERS_AND_TEXT, NoneType, dict, list, tuple)
_HOOKS = sorted(name for name in MODULE_TABLES if name.endswith("_hooks") or "_hooks_with" in name)
_TORCH = "torch.nn.modules.module"
_BUILT_ALIKE = Comparison(by_value=PLAIN, of_tensor=lambda _: Tensor, of_object=id)
_OBJECTS = Scope()


@final
class Kinds:
    """Numbers of the modules by FQN: equal for those built alike. Complexity: O(attributes of the model)."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.varying = _varying(modules.values())
        self._numbers: dict[Any, int] = {}
        self._of_module: dict[int, int] = {}
        shared = _shared(modules.values())
        self._classes = Counter(map(type, modules.values()))
        self._owners = Counter(id(value) for module in modules.values() for value in vars(module).values())
        for module in reversed([*modules.values()]):  # children come behind their parents
            key = self._key(module, shared)
            self._of_module[id(module)] = self._numbers.setdefault(key, len(self._numbers))
        self._kinds = {fqn: self._of_module[id(module)] for fqn, module in modules.items()}
        self._count = Counter(self._kinds.values())

    def repeated(self, fqn: str) -> int | None:
        """The number of a kind that has members enough to be worth a comparison."""
        kind = self._kinds[fqn]
        return kind if self._count[kind] >= _LEAST else None

    def _key(self, module: nn.Module, shared: set[int]) -> Any:
        if self._classes[type(module)] < _LEAST or not _is_ordinary(module, shared):
            return (id(module),)
        kind, attributes = type(module), vars(module)
        varying = self.varying.get(kind, ())
        names = (n for n in sorted(attributes.keys() - MODULE_TABLES) if n not in varying)
        alike = replace(_BUILT_ALIKE, of_object=partial(self._of_object, module, _LEVELS))
        own = [(n, fingerprint(attributes[n], alike)) for n in names]
        children = [(n, self._of_module.get(id(c))) for n, c in module._modules.items()]
        return kind, tuple(own), tuple(children)

    def _of_object(self, module: nn.Module, levels: int, value: Any) -> Any:
        """Returns what is equal for two objects of two modules with which their code does the same."""
        if not levels:
            return id(value)
        alike = replace(_BUILT_ALIKE, of_object=partial(self._of_object, module, levels - 1))
        if type(value) is partial:
            return partial, *(fingerprint(each, alike) for each in (value.func, value.args, value.keywords))
        if isinstance(value, MethodType) and value.__self__ is module:
            return MethodType, value.__func__
        attributes = _OBJECTS.attributes_of(value, is_root=False)
        if attributes is None or self._owners[id(value)] > 1 or not _is_all_attributes(type(value)):
            return id(value)
        return type(value), fingerprint(attributes, alike)


def _is_all_attributes(kind: type) -> bool:
    """Returns whether objects of a class have nothing but their attributes: no slots, no parts in C."""
    slots = any(vars(each).get("__slots__") for each in kind.__mro__)
    return kind.__new__ is object.__new__ and not slots


def _is_ordinary(module: nn.Module, shared: set[int]) -> bool:
    parts = (module, *module._parameters.values(), *module._buffers.values())
    hooked = any(vars(module).get(name) for name in _HOOKS)
    return not (hooked or isinstance(module, torch.jit.ScriptModule) or any(id(p) in shared for p in parts))


def _shared(modules: Iterable[nn.Module]) -> set[int]:
    """Parameters, buffers and modules with several owners."""
    tables = (t for m in modules for t in (m._parameters, m._buffers, m._modules))
    owners = Counter(id(part) for table in tables for part in table.values() if part is not None)
    return {part for part, count in owners.items() if count > 1}


def _varying(modules: Iterable[nn.Module]) -> dict[type, set[str]]:
    """By class: attributes with plain values or containers that are not the same in all of its modules."""
    first: dict[tuple[type, str], Any] = {}
    names: dict[type, set[str]] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name not in MODULE_TABLES and isinstance(value, _VALUES):
                key = type(module), name
                if first.setdefault(key, frozen(value)) != frozen(value):
                    names.setdefault(type(module), set()).add(name)
    return names


def frozen(value: Any) -> Any:
    """Returns plain values and containers of them as values; tensors are all equal, other objects are not."""
    return fingerprint(value, _BUILT_ALIKE)


Attribute = tuple[int, str]  # id of a module, name


@final
@dataclass(frozen=True, slots=True)
class Log:
    """Watched attributes that code has read; those in `indices` alone it has used as nothing else."""

    values: list[Attribute] = field(default_factory=list[Attribute])
    indices: list[Attribute] = field(default_factory=list[Attribute])


@final
class _Index(int):
    """A number that tells when it is used other than as an index of a list."""

    note: Callable[[], None]

    def __reduce__(self) -> Any:
        return int, (int.__index__(self),)


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: _Index, *others: Any) -> Any:
        self.note()
        return plain(self, *others)

    return method


_SILENT = ("__new__", "__getattribute__", "__getnewargs__", "__sizeof__", "__doc__")
for _name in vars(int).keys() - {*_SILENT}:
    if _name.startswith("__"):
        setattr(_Index, _name, _noting(_name))


@contextmanager
def watched(varying: Mapping[type, set[str]], log: Log) -> Iterator[None]:
    """Notes whenever one of these attributes is read."""
    with ExitStack() as stack:
        for kind, names in [(k, n) for k, n in varying.items() if "__getattribute__" not in vars(k)]:
            stack.enter_context(_watched(kind, names, log))
        yield


@contextmanager
def _watched(kind: Any, names: set[str], log: Log) -> Iterator[None]:
    original = kind.__getattribute__

    def read(module: Any, name: str) -> Any:
        value = original(module, name)
        if name in names:
            return _lent(value, (id(module), name), log)
        if name == "__dict__" and not _is_machinery(sys._getframe(1).f_globals.get("__name__", "")):
            log.values.extend((id(module), each) for each in names)
        return value

    kind.__getattribute__ = read
    try:
        yield
    finally:
        del kind.__getattribute__


def _lent(value: Any, attribute: Attribute, log: Log) -> Any:
    if type(value) is not int:
        log.values.append(attribute)
        return value
    log.indices.append(attribute)
    lent = _Index(value)
    lent.note = partial(log.values.append, attribute)
    return lent


def _is_machinery(name: str) -> bool:
    return name == _TORCH or name.startswith("outsize.")
