"""Modules that a process which only plans never uses, and which take long to import, come when they are used.

    torch._dynamo     1.0 s    torch asks it to leave functions alone when something is compiled: nothing is
    scipy.optimize    0.3 s    a function that transformers calls in losses of object detection

A stand-in has the few names that are looked up on the way. Any other name, or a call, brings the real module.
For the command line alone: what torch was told here stays for the life of the process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, final


def stand_in() -> None:
    """Put the stand-ins in the places of those modules that are not imported yet."""
    marks = ("disable", "allow_in_graph", "assume_constant_result", "forbid_in_graph", "disallow_in_graph")
    _place("torch._dynamo", is_compiling=_never, **dict.fromkeys(marks, _left_alone))
    if isinstance(sys.modules.get("torch._dynamo"), _StandIn):
        _place("torch._dynamo.utils", is_compile_supported=None)
        _place("torch._dynamo.source", ConstantSource=_named, RandomValueSource=_NoSource)
    _place("scipy.optimize", linear_sum_assignment=None)


@final
class _StandIn(ModuleType):
    """Becomes the real module at the first name that it has not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


@final
class _NoSource:
    """A class of which nothing is an instance."""


def _place(name: str, **known: Callable[..., Any] | None) -> None:
    """`known` are its functions; those given as None are called on the real module."""
    parent, _, last = name.rpartition(".")
    if name in sys.modules or find_spec(parent.partition(".")[0]) is None:
        return
    holder, module = importlib.import_module(parent), _StandIn(name)
    module.__path__ = [f"{path}/{last}" for path in holder.__path__]
    for function, given in known.items():
        setattr(module, function, given or _later(name, function))
    sys.modules[name] = module
    setattr(holder, last, module)


def _later(module: str, function: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_real(module), function)(*args, **kwargs)

    return call


def _real(name: str) -> ModuleType:
    """The module itself, in its place from here on."""
    for other in [n for n, m in sys.modules.items() if isinstance(m, _StandIn) and _is_kin(n, name)]:
        del sys.modules[other]
    return importlib.import_module(name)


def _is_kin(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _left_alone(function: Any = None, *_: Any, **__: Any) -> Any:
    """As a decorator, with arguments or without."""
    return _left_alone if function is None else function


def _named(name: str) -> SimpleNamespace:
    """What fakes of real tensors are called by where sizes are symbols: here they are numbers."""
    return SimpleNamespace(name=name)


def _never() -> bool:
    return False
