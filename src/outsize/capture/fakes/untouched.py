"""Lets a model's own forward run on real tensors for once, and gives the model everything back afterwards.

    before   weight.scale = s    state.scale = None    bank = [0, 0]
    forward  weight.scale = None    state.scale = s    bank[0] = h
    after    weight.scale = s    state.scale = None    bank = [0, 0]

A training step alone changes a model; a forward that only finds out something about it must not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from outsize.capture.fakes.fake_model import REACHABLE, remember
from outsize.program.objects import walk
from outsize.program.tree import leaves


@contextmanager
def untouched(model: nn.Module, *, weights: bool = False) -> Iterator[None]:
    """Restores the model's attributes, containers, objects and buffers after the context.

    `weights`: all other tensors, too, whose memory is copied when a call is about to write into it, as
    `nn.Embedding(max_norm=1.0)` does. It takes a look at each call.
    """
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    tensors = list({id(t): t for t in _tensors_of(model, modules)}.values()) if weights else []
    # Buffers on meta have no values, such as those of other ranks. Kernels write into buffers unannounced.
    buffers = [(b, b.detach().clone()) for b in model.buffers() if not b.is_meta]
    restore, writes = remember(modules), _CopyBeforeWrite(tensors)
    try:
        with writes if weights else nullcontext():
            yield
    finally:
        restore()
        writes.take_back()
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)


@contextmanager
def memory_untouched() -> Iterator[None]:
    """Takes back what calls within the context write into the memory of tensors, whoever holds them."""
    writes = _CopyBeforeWrite(None)
    try:
        with writes:
            yield
    finally:
        writes.take_back()


@contextmanager
def taken_back(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gives modules everything back that training within the context changes: also values and gradients.

    Within the context they begin without gradients, which a backward would add to in place.
    """
    tensors = list({id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}.values())
    kept = [(t, t.detach(), t.detach().clone(), t.grad, t.requires_grad) for t in tensors if not t.is_meta]
    restore = remember(modules)
    try:
        for tensor, *_ in kept:
            tensor.grad = None
        yield
    finally:
        restore()
        with torch.no_grad():
            for tensor, alias, values, gradient, trained in kept:
                tensor.data = alias
                tensor.copy_(values)
                tensor.grad = gradient
                tensor.requires_grad_(trained)


def _tensors_of(model: nn.Module, modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    yield from (part for _, part in walk(modules, REACHABLE) if isinstance(part, Tensor))


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor's values are in memory of its own, and not in tensors that it holds."""
    return tensor.layout is torch.strided and not tensor.is_meta and not is_traceable_wrapper_subclass(tensor)


@final
class _CopyBeforeWrite(TorchDispatchMode):
    """Copies the memory of a tensor before the first call that writes into it; of any tensor for None."""

    def __init__(self, tensors: Iterable[Tensor] | None) -> None:
        super().__init__()
        self._aliases = [(t, t.detach()) for t in tensors or () if _is_plain(t) and t.grad_fn is None]
        known = {alias.untyped_storage()._cdata for _, alias in self._aliases}
        self._known = None if tensors is None else known
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        if schema.is_mutable:
            given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            for tensor in leaves(tuple(given.get(a.name) for a in schema.arguments if a.is_write)):
                if isinstance(tensor, Tensor) and _is_plain(tensor):
                    self._copy(tensor.untyped_storage())
        return func(*args, **kwargs)

    def _copy(self, memory: torch.UntypedStorage) -> None:
        is_known = self._known is None or memory._cdata in self._known
        if is_known and memory._cdata not in self._copies:
            self._copies[memory._cdata] = memory, memory.clone()

    def take_back(self) -> None:
        """Gives tensors the memory that they had (`weight.data = ...` gives another), and that its values."""
        for tensor, alias in self._aliases:
            if not tensor.is_set_to(alias):
                tensor.data = alias
        for memory, values in self._copies.values():
            memory.copy_(values)
