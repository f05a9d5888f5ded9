"""Computes a digest of all that a recording of a model depends on, which is equal in every process.

    modules, their attributes, configs, tables    by value, shared objects and storages by their place
    tensors                                       shape, strides, type; values where they have any
    classes and functions of the user's           bytecode, defaults, closures, the globals that they read
    those of packages                             where they are, whom they wrap, which functions they read
    torch's own functions, files of the user's    where they are; by contents

A digest is made only of what is known to be all that an object consists of. Of anything else (a lock, an open
file, an object with a part in C, a tensor of a subclass) nothing is known: there is no identity then, and
nothing is kept (decision 250). Complexity: O(attributes of the model), each class and function once.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from outsize.capture.kept import sources
from outsize.program.objects import elements_of, is_filled, items_of
from outsize.program.replaying.modes import current_modes

# A digest reads about a GB in a second: what is larger is recorded sooner than compared.
MOST_VALUES_BYTES: Final = 256 << 20
_MOST_COUNT: Final = 1 << 40
_POINTER_BYTES: Final = 8
_TEXT: Final = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented))
_BY_NAME: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format, range, slice, PurePath)
_SEQUENCES: Final = (list, tuple, deque)
_TABLES: Final = (dict, OrderedDict, defaultdict)
_PLAIN_TENSORS: Final = (Tensor, nn.Parameter)
_IN_C: Final = (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
# What a class holds besides its code.
_OF_CLASSES: Final = (
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__annotations__",
    "__abstractmethods__",
)
_CACHES_OF_CLASSES: Final = re.compile(r"_abc_impl|__\w*cache\w*__|__static_attributes__|__firstlineno__")


@final
class Unknown(Exception):
    """An object of which it is not known what it consists of."""


def identity_of(parts: Iterable[Any]) -> str | None:
    """Returns the digest of some objects, and of all code that can change what they do; None where it is not
    known.
    """
    try:
        files = sources.sources_of_outsize(), sources.users_files(), sources.packages_with_torch()
        digest = _Digest()
        digest.add(
            (*files, sys.version, sys.path, sys.warnoptions, str(torch.__version__), _settings_of_torch())
        )
        for namespace in (torch, torch.nn.functional, torch.Tensor, torch.autograd.Function):
            digest.add_places(namespace)
        for part in parts:
            digest.add(part)
    except (Unknown, OSError, RecursionError):
        return None
    return digest.hexdigest()


def digest_of(values: Any) -> str | None:
    """Returns the digest of values alone; None where it is not known what they consist of."""
    digest = _Digest()
    try:
        digest.add(values)
    except (Unknown, RecursionError):
        return None
    return digest.hexdigest()


def _settings_of_torch() -> Any:
    modes = current_modes()
    return (
        *(modes.grad, modes.inference, repr(modes.autocast), str(torch.get_default_dtype())),
        *(torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        *(str(torch.get_default_device()), torch.get_num_threads(), torch.backends.mkldnn.enabled),
        *(torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )


@final
class _Digest:
    """Takes in objects; each is read once, and told by its number where it is met again."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=24)
        self._numbers: dict[Any, int] = {}
        self._alive: list[Any] = []  # The id of an object that is gone could be that of another one.
        self._values_bytes = 0

    def hexdigest(self) -> str:
        """Returns the digest of all that was taken in."""
        return self._hash.hexdigest()

    def _say(self, *words: object) -> None:
        self._hash.update("\x1f".join(map(str, words)).encode("utf-8", "surrogatepass") + b"\x1e")

    def _is_met(self, kind: str, value: Any) -> bool:
        key = kind, id(value)
        number = self._numbers.get(key)
        if number is not None:
            self._say("again", number)
            return True
        self._numbers[key] = len(self._numbers)
        self._alive.append(value)
        return False

    def add(self, value: Any) -> None:
        """Takes in an object with all that it consists of. Raises Unknown."""
        kind = type(value)
        if kind in _TEXT:
            self._say(kind.__name__, repr(value))
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, _BY_NAME):
            self._say(kind.__name__, value)
        elif isinstance(value, Enum):
            self._say("enum", _name_of(kind), value.name)
        elif isinstance(value, type):
            self._class(value)
        elif not self._is_met("object", value):
            self._object(value)

    def _object(self, value: Any) -> None:
        how = next((how for kinds, how in self._readers if isinstance(value, kinds)), None)
        parts = _parts_of(value) if how is None else None
        if parts is not None:
            self.add(parts)
        else:
            (how or _Digest._attributes)(self, value)

    # -- values ----------------------------------------------------------------------------------------

    def _tensor(self, tensor: Tensor) -> None:
        if type(tensor) not in _PLAIN_TENSORS or tensor.is_sparse or tensor.is_quantized or tensor.is_nested:
            raise Unknown(type(tensor).__name__)
        if self._is_met("tensor", tensor):
            return
        self._say(
            type(tensor).__name__, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device.type
        )
        self._say(
            tensor.requires_grad, tensor.grad_fn is not None, tensor.storage_offset(), tensor.is_inference()
        )
        storage = "storage", tensor.untyped_storage()._cdata
        self._say(self._numbers.setdefault(storage, len(self._numbers)))
        if vars(tensor):
            self._table(vars(tensor))
        if tensor.device.type != "meta":
            self._values_bytes += tensor.numel() * tensor.element_size()
            if self._values_bytes > MOST_VALUES_BYTES:
                raise Unknown("more values than are worth a comparison")
            values = tensor.detach().cpu().contiguous().reshape(-1)
            self._hash.update(values.view(torch.uint8).numpy().data)

    def _sequence(self, value: Any) -> None:
        self._say("sequence", _name_of(type(value)), len(value))
        for item in elements_of(value):
            self.add(item)
        self._more_of(value)

    def _table(self, value: Any) -> None:
        self._say("table", _name_of(type(value)), len(value))
        for key, item in items_of(value):
            self.add(key)
            self.add(item)
        if isinstance(value, defaultdict):
            self.add(value.default_factory)
        self._more_of(value)

    def _set(self, value: Any) -> None:
        digests = list[str]()
        for member in value:
            alone = _Digest()
            alone.add(member)
            digests.append(alone.hexdigest())
        self._say("set", _name_of(type(value)), *sorted(digests))

    def _more_of(self, value: Any) -> None:
        """Takes in what an object of a class of the user's has beside its items."""
        if hasattr(value, "__dict__"):
            self._class(type(value))
            self._named(vars(value))

    def _named(self, attributes: Mapping[str, Any], owner: Any = None) -> None:
        for name in sorted(attributes):
            value = attributes[name]
            self._say(name)
            if type(value) is int and abs(value) > _MOST_COUNT and value == _hash_of(owner):
                self._say("its hash")  # Texts have other hashes in each process.
            else:
                self.add(value)

    def _module(self, value: nn.Module) -> None:
        if isinstance(value, torch.jit.ScriptModule):
            raise Unknown("a module of TorchScript")
        self._class(type(value))
        filled = {
            name: part for name, part in vars(value).items() if not (name.startswith("_") and _is_empty(part))
        }
        self._named(filled)

    def _attributes(self, value: Any) -> None:
        """Takes in an object that consists of its attributes alone."""
        kind = type(value)
        slots = [name for each in kind.__mro__ for name in _slots_of(each)]
        # The table of attributes and that of weak references are all that Python itself adds to an object.
        has_part_in_c = kind.__basicsize__ > object.__basicsize__ + (len(slots) + 2) * _POINTER_BYTES
        if has_part_in_c or not (slots or hasattr(value, "__dict__")):
            raise Unknown(_name_of(kind))
        self._class(kind)
        self._named({name: getattr(value, name) for name in slots if hasattr(value, name)})
        self._named(vars(value) if hasattr(value, "__dict__") else {}, value)

    # -- code ------------------------------------------------------------------------------------------

    def _class(self, kind: type) -> None:
        if self._is_met("class", kind):
            return
        self._say("class", _name_of(kind))
        for base in kind.__mro__[1:-1]:
            self._class(base)
        if _is_ours(kind.__module__) or kind.__flags__ & (1 << 9) == 0:  # Outsize's and those in C are known.
            return
        is_users = _is_users(kind.__module__)
        for name, value in sorted(vars(kind).items()):
            if name in _OF_CLASSES or _CACHES_OF_CLASSES.fullmatch(name):
                continue
            self._say(name)
            self._of_class(value, is_users)

    def _of_class(self, value: Any, is_users: bool) -> None:
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property):
            for each in (value.fget, value.fset, value.fdel):
                self._read(each, is_users)
        else:
            self._read(value, is_users)

    def _read(self, value: Any, is_users: bool) -> None:
        """Takes in what code of the user's reads; of what an installed package's reads, plain values, and the
        places of functions: its files do not change while it is loaded, but somebody may put others there.
        """
        if is_users or type(value) in _TEXT:
            self.add(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._place(value)
        else:
            self._tables_of(value)

    def _tables_of(self, value: Any) -> None:
        """Takes in the functions in a table, or in the tables that an object has: a registry of a package."""
        self._say("of", _name_of(type(value)))
        if isinstance(value, ModuleType) or self._is_met("tables", value):
            return
        tables = [value]
        if type(value) is not dict:
            attributes = {**vars(type(value)), **(vars(value) if hasattr(value, "__dict__") else {})}
            tables = [attributes[name] for name in sorted(attributes)]
        for table in tables:
            if type(table) is dict:
                self._places(table)

    def _function(self, function: FunctionType) -> None:
        """Takes in a function: all of the user's; of a package's, where it is and whom it wraps or calls."""
        if self._is_met("function", function):
            return
        code = function.__code__
        is_users = _is_users_code(function)
        self._say("function", function.__module__, function.__qualname__, is_users)
        if is_users:
            _insist_on_file(function.__module__)
            self.add(_code_parts(code))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._read(value, is_users)
        for cell in function.__closure__ or ():
            self._read(cell.cell_contents if is_filled(cell) else "no value yet", is_users)
        for name in sorted(vars(function)):
            self._say(name)
            self._of_class(vars(function)[name], is_users)
        if _is_ours(function.__module__):
            return
        for name in sorted(_names_in(code) & function.__globals__.keys()):
            self._say("global", name)
            self._global(function.__globals__[name], code, is_users)

    def _global(self, value: Any, code: CodeType, is_users: bool) -> None:
        """Takes in a global that code reads; of a module those attributes that have a name in the code."""
        if not isinstance(value, ModuleType):
            if is_users:
                self.add(value)
            else:
                self._named_place(value)
            return
        self._say("module", value.__name__)
        in_users = is_users and _is_users(value.__name__)
        for name in sorted(_names_in(code) & vars(value).keys()):
            part = vars(value)[name]
            self._say(name)
            if isinstance(part, ModuleType):
                self._say(part.__name__)
            elif in_users:
                self.add(part)
            else:
                self._named_place(part)

    def _named_place(self, value: Any) -> None:
        """Takes in what a package's code reads, without what that reads in its turn."""
        if isinstance(value, FunctionType | type):
            self._place(value)
        else:
            self._read(value, False)

    def add_places(self, namespace: Any) -> None:
        """Takes in which functions a namespace has: somebody may have put others there."""
        self._say(getattr(namespace, "__name__", ""))
        self._places(vars(namespace))

    def _places(self, table: Mapping[Any, Any]) -> None:
        for name in sorted(map(str, table)):
            value = table.get(name)
            if isinstance(value, FunctionType | type | MethodType):
                self._say(name)
                self._place(value)
            elif type(value) in _TEXT and not name.startswith("__"):
                self._say(name, repr(value))

    def _place(self, value: Any) -> None:
        """Takes in where a function or class is; all of a function that the user has put there."""
        if isinstance(value, FunctionType) and _is_users_code(value):
            self._function(value)
            return
        self._say(value.__module__, value.__qualname__)  # Torch wraps some of its own when dynamo is loaded.

    _readers: Final[Any] = (  # classes, and the method that takes in their objects
        (nn.Module, _module),
        (_TABLES, _table),
        (_SEQUENCES, _sequence),
        ((set, frozenset), _set),
        (FunctionType, _function),
    )


def _parts_of(value: Any) -> tuple[Any, ...] | None:
    """Returns what an object of Python's or numpy's consists of; None for any other."""
    kind = type(value)
    base = next((each for each in _TEXT if isinstance(value, each)), None)
    if base is not None:  # of a class of its own
        return _name_of(kind), base.__name__, base.__repr__(value), getattr(value, "__dict__", {})
    if isinstance(value, _IN_C):
        bound = getattr(value, "__self__", None)
        module = getattr(value, "__module__", None)
        return kind.__name__, module, value.__qualname__, None if isinstance(bound, ModuleType) else bound
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise Unknown("an array of objects")
        return kind.__name__, str(value.dtype), value.shape, value.tobytes()
    return next((parts(value) for each, parts in _PARTS if isinstance(value, each)), None)


_PARTS: Final[tuple[tuple[type, Callable[[Any], tuple[Any, ...]]], ...]] = (
    (MethodType, lambda method: ("method", method.__func__, method.__self__)),
    (functools.partial, lambda call: ("partial", call.func, call.args, call.keywords)),
    (ModuleType, lambda module: ("module", module.__name__)),
    (logging.Logger, lambda logger: ("logger", logger.name)),
    (re.Pattern, lambda pattern: ("pattern", pattern.pattern, pattern.flags)),
)


def _code_parts(code: CodeType) -> tuple[Any, ...]:
    """Returns what a function's code does, wherever it stands."""
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    constants = (_code_parts(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.co_code, code.co_exceptiontable, *names, code.co_argcount, code.co_flags, *constants


def _is_empty(value: Any) -> bool:
    return type(value) in _TABLES and not value


def _hash_of(value: Any) -> int | None:
    try:
        return hash(value)
    except (TypeError, ValueError, AttributeError, LookupError):
        return None


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_users_code(function: FunctionType) -> bool:
    """Returns whether a function was written by the user, whatever name a decorator has given it."""
    path = function.__code__.co_filename
    return _is_users(function.__module__) if path.startswith("<") else sources.is_users_file(path)


@functools.cache
def _names_in(code: CodeType) -> frozenset[str]:
    nested = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*nested)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "outsize"


def _is_users(module: str) -> bool:
    if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    return path is None or sources.is_users_file(path)


def _insist_on_file(module: str) -> None:
    """Raises Unknown for code that was typed: whatever it reads may have been typed again."""
    if module == "__main__" and getattr(sys.modules["__main__"], "__file__", None) is None:
        raise Unknown("code without a file")
