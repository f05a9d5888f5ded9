"""Swap a model's tensors for fakes, and put everything back.

Recording runs the user's forward on fake tensors: they have shape, dtype and autograd but no memory, so
weights may be on meta and a 70 B model costs nothing. Parameters, buffers and tensor attributes (also
those in lists and dicts, such as an LSTM's flat weights) are replaced in the modules' own dicts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch._subclasses
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from outsize.program.tape import Weight
from outsize.program.tree import map_leaves, paths

_STATE = ("_parameters", "_buffers")


@final
class FakeModel:
    """A model whose tensors are fakes while the context lasts.

    `weights` maps id(tensor) to its Weight for the fakes and for the real tensors (a closure may hold
    one); `real` maps a weight's name to the real tensor.
    """

    def __init__(self, model: nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode, self.device = mode, device
        self.modules = dict(model.named_modules())
        self.weights: dict[int, Weight] = {}
        self.real: dict[str, Tensor] = {}
        self.rebound: list[str] = []
        self._fake_of: dict[int, Tensor] = {}
        self._saved: list[tuple[nn.Module, dict[str, Any], dict[str, dict[str, Any]]]] = []
        self._planted: dict[str, dict[str, int]] = {}

    def __enter__(self) -> FakeModel:
        for module in self.modules.values():
            state = {key: dict(module.__dict__[key]) for key in _STATE}
            self._saved.append((module, dict(module.__dict__), state))
        for fqn, module in self.modules.items():
            self._plant(fqn, module)
        return self

    def __exit__(self, *_: object) -> None:
        self.rebound = [fqn for fqn, module in self.modules.items() if self._changed(fqn, module)]
        for module, attributes, state in self._saved:
            for key, values in state.items():
                attributes[key].clear()
                attributes[key].update(values)
            module.__dict__.clear()
            module.__dict__.update(attributes)

    def _plant(self, fqn: str, module: nn.Module) -> None:
        prefix = f"{fqn}." if fqn else ""
        for key, kind in zip(_STATE, ("parameter", "buffer"), strict=True):
            table = module.__dict__[key]
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = self._fake(tensor, Weight(prefix + name, kind))
        for name, value in list(module.__dict__.items()):
            if name not in (*_STATE, "_modules") and _holds_tensor(value):
                module.__dict__[name] = self._fake_tree(value, prefix + name)
        self._planted[fqn] = _identities(module)

    def _fake_tree(self, value: Any, name: str) -> Any:
        names = {id(t): f"{name}{path}" for path, t in paths(value, lambda leaf: isinstance(leaf, Tensor))}

        def swap(leaf: Any) -> Any:
            return self._fake(leaf, Weight(names[id(leaf)], "attribute")) if id(leaf) in names else leaf

        return map_leaves(swap, value)

    def _fake(self, tensor: Tensor, weight: Weight) -> Tensor:
        if id(tensor) in self._fake_of:
            return self._fake_of[id(tensor)]
        fake = fake_like(tensor, self.mode, self.device if tensor.is_meta else tensor.device)
        if weight.kind == "parameter":
            fake = nn.Parameter(fake.detach(), requires_grad=tensor.requires_grad)
        self._fake_of[id(tensor)] = fake
        self.weights[id(tensor)] = self.weights[id(fake)] = weight
        self.real[weight.name] = tensor
        return fake

    def _changed(self, fqn: str, module: nn.Module) -> bool:
        return _identities(module) != self._planted[fqn]


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device | None = None) -> Tensor:
    """A fake with the tensor's shape, strides, dtype and requires_grad, of its own storage."""
    with mode, torch.no_grad():
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
        )
    return fake.requires_grad_(tensor.requires_grad)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(item, Tensor) for item in items)


def _identities(module: nn.Module) -> dict[str, int]:
    """Which tensor is bound under which name; a change means that the forward rebinds state."""
    tables = [module.__dict__[key] for key in _STATE] + [module.__dict__]
    return {name: id(t) for table in tables for name, t in table.items() if isinstance(t, Tensor)}


@contextmanager
def hidden_fakes() -> Iterator[None]:
    """Libraries that ask `isinstance(x, torch._subclasses.FakeTensor)` take other branches than eager."""
    real = torch._subclasses.FakeTensor
    torch._subclasses.FakeTensor = _Nothing  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch._subclasses.FakeTensor = real


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Torch logs a traceback whenever an op has no fake; the ladder deals with those."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@final
class _Nothing:
    """A class of which nothing is an instance."""


def is_fake(tensor: Tensor) -> bool:
    """True for tensors born under the fake mode."""
    return isinstance(tensor, FakeTensor)
