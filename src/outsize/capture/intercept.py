"""Where a forward is watched: module calls, public torch functions, ATen ops, custom autograd functions.

    nn.Module.__call__ (patched)     leaf modules become one instruction, others are frames
      TorchFunctionMode              glue between leaves, at the level of F.cross_entropy or Tensor.view
        Function.apply (patched)     a custom autograd function is one instruction
          TorchDispatchMode          ATen ops that nobody above saw; costs of all ops

Only what to do is decided elsewhere (`Watcher`); this file owns the fragile hooks into torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Watcher(ABC):
    """Gets every call that the model makes; `call` must run `fn(*args, **kwargs)` and return its result."""

    @abstractmethod
    def on_module(self, module: nn.Module, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module of any kind is called."""

    @abstractmethod
    def on_function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A public torch function is called outside leaves."""

    @abstractmethod
    def on_aten(self, op: Any, args: Any, kwargs: Any) -> Any:
        """An ATen op is dispatched, anywhere."""

    @abstractmethod
    def on_saved(self, tensor: Tensor) -> None:
        """Autograd keeps a tensor for the backward."""


@final
class _FunctionMode(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watcher.on_function(func, args, kwargs or {})


@final
class _DispatchMode(TorchDispatchMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watcher.on_aten(func, args, kwargs or {})


@contextmanager
def watching(watcher: Watcher, *, dispatch: bool = True) -> Iterator[None]:
    """All four levels on; everything is restored on the way out."""

    def save(tensor: Tensor) -> Tensor:
        watcher.on_saved(tensor)
        return tensor

    with ExitStack() as stack:
        stack.enter_context(_patched_module_call(watcher))
        stack.enter_context(_patched_apply(watcher))
        if dispatch:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(save, lambda t: t))
            stack.enter_context(_DispatchMode(watcher))
        stack.enter_context(_FunctionMode(watcher))
        yield


@contextmanager
def _patched_module_call(watcher: Watcher) -> Iterator[None]:
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return watcher.on_module(module, original, args, kwargs)

    nn.Module.__call__ = call
    try:
        yield
    finally:
        nn.Module.__call__ = original


@contextmanager
def _patched_apply(watcher: Watcher) -> Iterator[None]:
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return watcher.on_function(original.__get__(None, cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


@contextmanager
def really() -> Iterator[None]:
    """Run real tensor operations in the middle of a recording."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
