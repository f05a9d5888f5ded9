"""Keeps what a recorded forward leaves in functools' caches from outliving the recording.

A position table behind `functools.lru_cache` would be computed on fakes, and every later eager call would get
those. Such a cache is emptied and filled with real tensors, as the first eager call does; the forward is then
recorded again and finds constants, whether the model has run before or not.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any, final

from torch import Tensor, nn

from outsize.capture.fakes.fake_model import is_fake
from outsize.errors.interruptions import raise_interruption

_CACHED: Any = type(functools.lru_cache(int))
# Most of what globals and caches hold: no tensors, no cached functions, and nothing that holds one.
_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None)})
Call = tuple[Callable[..., Any], Any]  # a cached function, the key of one call


@final
class Caches:
    """The cached functions that a model's code and its loss can reach, and their calls on fakes.

    Reachable are globals of the modules that define their classes and functions, and of those that define the
    functions there; methods; closures.
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._cached = list(_in_sight(model, loss_fn).values())
        self._seen: list[Call] = []
        self._filled: set[tuple[int, Any]] = set()

    @contextmanager
    def without_fakes(self) -> Iterator[None]:
        """Clears, at the end, every cache that holds a fake or a tensor on meta; the others keep their
        contents.
        """
        try:
            yield
        finally:
            for cached in filter(_holds_no_values, self._cached):
                self._seen += [(cached, key) for key in _keys(cached) if not _holds(key, _is_tensor)]
                cached.cache_clear()

    def has(self, tensor: Tensor) -> bool:
        """Returns whether one of the caches holds this tensor."""
        results = (result for cached in self._cached for result in gc.get_referents(cached))
        return any(_holds(result, lambda held: held is tensor) for result in results)

    def fill(self) -> bool:
        """Makes these calls on real tensors, each once in this object's life; returns whether there was
        one.
        """
        calls, self._seen = self._seen, []
        filled = [self._fill(cached, key) for cached, key in calls]
        return any(filled)

    def _fill(self, cached: Callable[..., Any], key: Any) -> bool:
        if (id(cached), key) in self._filled:
            return False  # it was evicted again, so the calls themselves are recorded
        self._filled.add((id(cached), key))
        args, kwargs = _arguments(key)
        try:
            cached(*args, **kwargs)
        except Exception as error:
            raise_interruption(error)
            return False  # for example, it names a device that does not exist here
        return True


def _in_sight(model: nn.Module, loss_fn: Any) -> dict[int, Any]:
    cached_functions: dict[int, Any] = {}
    modules = list(model.modules())
    own = [loss_fn, *(v for m in modules for v in vars(m).values() if isinstance(v, FunctionType | _CACHED))]
    module_names = {c.__module__ for kind in {type(m) for m in modules} for c in kind.__mro__}
    module_names |= {v.__module__ for v in own if isinstance(v, FunctionType)}
    imported_names = {
        v.__module__
        for module_name in module_names
        for v in _globals(module_name)
        if isinstance(v, FunctionType)
    }
    for value in (*own, *(v for module_name in module_names | imported_names for v in _globals(module_name))):
        _look(value, cached_functions)
    return cached_functions


def _globals(module_name: str | None) -> list[Any]:
    """Returns the values of a module's globals; code that is generated at run time may belong to none."""
    if module_name is None:
        return []
    package = module_name.partition(".")[0]
    foreign = package in ("torch", "outsize") or package in sys.stdlib_module_names
    return [] if foreign or module_name not in sys.modules else list(vars(sys.modules[module_name]).values())


@lru_cache(maxsize=4096)
def _may_lead(kind: type) -> bool:
    """Says whether an object of this type is a cached function, or may lead to one."""
    return issubclass(kind, (_CACHED, FunctionType, type, staticmethod, classmethod))


def _look(value: Any, cached_functions: dict[int, Any], depth: int = 3) -> None:
    """Adds cached functions inside closures and classes."""
    kind = type(value)
    if not _may_lead(kind):
        return
    if isinstance(value, _CACHED):
        cached_functions[id(value)] = value
    elif not depth:
        return
    elif kind is FunctionType:
        for cell in value.__closure__ or ():
            _look(next(iter(gc.get_referents(cell)), None), cached_functions, depth - 1)
    elif isinstance(value, type):
        for member in list(vars(value).values()):
            # Most members of classes are functions without a closure, and a recording asks ten thousands.
            if type(member) is not FunctionType or member.__closure__:
                _look(member, cached_functions, depth - 1)
    elif isinstance(value, (staticmethod, classmethod)):
        _look(value.__func__, cached_functions, depth)


def _holds_no_values(cached: Any) -> bool:
    """Tells whether a result in the cache is, or holds, a fake or a tensor on meta."""
    return cached.cache_info().currsize > 0 and any(_holds(x, _is_empty) for x in gc.get_referents(cached))


def _is_empty(tensor: Tensor) -> bool:
    return is_fake(tensor) or tensor.is_meta


def _is_tensor(_: Tensor) -> bool:
    return True


def _holds(value: Any, wanted: Callable[[Tensor], bool], depth: int = 4) -> bool:
    if isinstance(value, Tensor):
        return wanted(value)
    if depth == 0 or not isinstance(value, tuple | list | dict):
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_holds(item, wanted, depth - 1) for item in items if type(item) not in _PLAIN)


def _keys(cached: Any) -> list[Any]:
    """Returns the keys of all its calls; none where keys also hold types, from which no call can be read."""
    if cached.cache_parameters()["typed"]:
        return []
    tables = [x for x in gc.get_referents(cached) if type(x) is dict and x is not cached.__dict__]
    return [key for table in tables for key in table]


def _arguments(key: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns args and kwargs of a key: a single int or str is its own key, else args, an object, names
    and values.
    """
    parts = key if type(key) is tuple else (key,)
    separator = next((i for i, part in enumerate(parts) if type(part) is object), len(parts))
    named = parts[separator + 1 :]
    return parts[:separator], dict(zip(named[::2], named[1::2], strict=True))
