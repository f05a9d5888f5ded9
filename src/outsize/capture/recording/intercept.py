"""Intercepts a forward: module calls, public torch functions, ATen ops, custom autograd functions.

    nn.Module.__call__ (patched)     leaf modules become one instruction, others are frames
      TorchFunctionMode              glue between leaves, at the level of F.cross_entropy or Tensor.view
        Function.apply (patched)     a custom autograd function, or a scripted one, is one instruction
            TorchDispatchMode        ATen ops that no level above saw; costs of all ops

A `Watcher` decides what to do; this file owns the fragile hooks into torch.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.function import BackwardCFunction
from torch.jit import ScriptFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)

from outsize.program.garbage import uncollected


class Watcher(ABC):
    """Receives every call of the model; `call` must run `fn(*args, **kwargs)` and return its result."""

    @abstractmethod
    def on_module(self, module: nn.Module, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handles the call of a module of any kind."""

    @abstractmethod
    def on_function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handles the call of a public torch function outside leaves."""

    @abstractmethod
    def on_aten(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Handles an ATen op that is dispatched anywhere."""

    @abstractmethod
    def on_saved(self, tensor: Tensor) -> None:
        """Handles a tensor that autograd saves for the backward."""

    def begin_checkpoint(self) -> None:  # noqa: B027
        """Handles the begin of a region of torch.utils.checkpoint, which runs flat."""

    def end_checkpoint(self, *, runs_again: bool) -> None:  # noqa: B027
        """Handles the end of such a region; `runs_again` says whether the backward would run it again."""


def inside_transform() -> bool:
    """Returns whether vmap or torch.func is active, within which ATen ops are what can be replayed."""
    return peek_interpreter_stack() is not None


def untold() -> Any:
    """Returns a context within which no watcher is told of functions: a question about a tensor, such as its
    shape, takes a tenth of the time then.
    """
    return torch._C.DisableTorchFunction()


def has_custom_backward(tensor: Tensor) -> bool:
    """Returns whether an autograd function, of Python or of C++, computes the gradient of this tensor."""
    with torch._C.DisableTorchFunction():
        node = tensor.grad_fn
        return isinstance(node, BackwardCFunction) or type(node).__name__ == "CppFunction"


def backward_of(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Runs the backward of the function that has just made `results` of `inputs`; the graph stays."""
    with torch._C.DisableTorchFunction():
        gradients = [torch.empty_like(result) for result in results]
        torch.autograd.grad(results, inputs, gradients, retain_graph=True, allow_unused=True)


@final
class _FunctionMode(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if inside_transform():
            return func(*args, **(kwargs or {}))
        return self.watcher.on_function(func, args, kwargs or {})


@final
class _AroundMode(TorchFunctionMode):
    def __init__(self, call: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})


@contextmanager
def around_functions(call: Callable[[Callable[..., Any], Any, Any], Any]) -> Iterator[None]:
    """Calls `call(function, args, kwargs)` in place of each public torch function within the context."""
    with _AroundMode(call):
        yield


@contextmanager
def copying_tensors(copied: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Lets copy.deepcopy copy each tensor as `copied` does, also in the middle of `on_real_tensors`; where
    that returns None, as torch does.
    """

    def call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            made = copied(args[0]) if function is Tensor.__deepcopy__ else None
            # The second argument is the memo of copy.deepcopy, which makes one copy of one object.
            return function(*args, **kwargs) if made is None else args[1].setdefault(id(args[0]), made)

    with torch._C._EnableTorchFunction(), _AroundMode(call):  # pyright: ignore[reportAttributeAccessIssue]
        yield


@final
class _DispatchMode(TorchDispatchMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # The tensor's own class computes it by ops on the tensors that it holds.
        return self.watcher.on_aten(func, args, kwargs or {})


@contextmanager
def watching(watcher: Watcher, *, dispatch: bool = True, saved: bool = True) -> Iterator[None]:
    """Watches all four levels within the context and restores everything after it.

    `saved=False` does not ask what autograd saves, since torch.func's transforms refuse to run meanwhile.
    """

    # The autograd graph of the fakes references this function, and the watcher references the fakes: with a
    # strong reference here the model would never be freed, since Python's collector does not see through the
    # graph.
    seen_by = weakref.ref(watcher)

    def save(tensor: Tensor) -> Tensor:
        alive = seen_by()
        if alive is not None:
            alive.on_saved(tensor)
        return tensor

    with ExitStack() as stack:
        if dispatch:
            # The collector calls finalizers at moments of its own choice, so that two recordings of one model
            # would not see the same calls.
            stack.enter_context(uncollected())
        stack.enter_context(_patched_module_call(watcher))
        stack.enter_context(_patched_apply(watcher))
        stack.enter_context(_idle_conversions())
        stack.enter_context(_flat_checkpoints(watcher))
        if dispatch and saved:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(save, lambda t: t))
        if dispatch:
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
    """Watches `apply` where Function's own looks it up at each call, so that one which was bound before
    (`product = Product.apply`) and one that a class defines for itself are seen like `Product.apply(x)`.
    """
    base, original = torch.autograd.function._SingleLevelFunction, vars(torch.autograd.Function)["apply"]
    before, scripted = vars(base).get("apply"), ScriptFunction.__call__
    told = threading.local()  # The watcher has been told of this function and runs it.

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Functions that torch.func makes for its transforms have the base class alone.
        is_told = getattr(told, "function", None) is cls
        if is_told or not issubclass(cls, torch.autograd.Function):
            told.function = None
            return super(base, cls).apply(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if cls is checkpoints.CheckpointFunction:
            return _reentrant(watcher, *args)
        told.function = cls
        try:
            return watcher.on_function(original.__get__(None, cls), args, kwargs)
        finally:
            told.function = None

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return watcher.on_function(scripted.__get__(function), args, kwargs)

    base.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
    ScriptFunction.__call__ = call  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        if before is None:
            del base.apply  # pyright: ignore[reportAttributeAccessIssue]
        else:
            base.apply = before  # pyright: ignore[reportAttributeAccessIssue]
        ScriptFunction.__call__ = scripted


@contextmanager
def _idle_conversions() -> Iterator[None]:
    """Skips a `layer.to(dtype)` in a forward that changes nothing, for which torch gives fakes new
    parameters.
    """
    original = nn.Module._apply

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            idle = all(fn(t) is t for t in [*module.parameters(recurse), *module.buffers(recurse)])
        return module if idle else original(module, fn, recurse)

    nn.Module._apply = apply  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module._apply = original


@contextmanager
def _flat_checkpoints(watcher: Watcher) -> Iterator[None]:
    """Runs regions of torch.utils.checkpoint as the code in them: same numbers, but activations are saved."""
    original = checkpoints._checkpoint_without_reentrant_generator

    def nothing_around(*_: Any, **__: Any) -> Iterator[None]:
        watcher.begin_checkpoint()
        yield
        watcher.end_checkpoint(runs_again=torch.is_grad_enabled())

    checkpoints._checkpoint_without_reentrant_generator = nothing_around
    try:
        yield
    finally:
        checkpoints._checkpoint_without_reentrant_generator = original


def _reentrant(watcher: Watcher, function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    """Computes what CheckpointFunction does.

    There is no gradient unless an argument needs one, and each argument's gradient is added up inside the
    region first (hence the aliases).
    """
    watcher.begin_checkpoint()
    wanted = [isinstance(a, Tensor) and a.requires_grad for a in args]
    aliases = [a.view_as(a) if w else a for a, w in zip(args, wanted, strict=True)]
    with torch.set_grad_enabled(torch.is_grad_enabled() and any(wanted)):
        out = function(*aliases)
        watcher.end_checkpoint(runs_again=torch.is_grad_enabled())
    return out


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Runs real tensor operations within the context, in the middle of a recording."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@final
class _ObservingMode(TorchDispatchMode):
    def __init__(self, seen: Callable[..., None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen(func, args, kwargs or {}, out)
        return out


@contextmanager
def observing_real_ops(seen: Callable[..., None]) -> Iterator[None]:
    """Runs real tensor operations and calls `seen(op, args, kwargs, out)` for every ATen op."""
    with on_real_tensors(), _ObservingMode(seen):
        yield
