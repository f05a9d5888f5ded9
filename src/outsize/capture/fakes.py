"""Swap a model's tensors for fakes, and put everything back.

Recording runs the user's forward on fake tensors: they have shape, dtype and autograd but no memory, so
weights may be on meta and a 70 B model costs nothing. Parameters, buffers and tensor attributes (also
those in lists and dicts, such as an LSTM's flat weights) are replaced in the modules' own dicts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch._subclasses
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from outsize.program.tape import Weight
from outsize.program.tree import map_leaves, paths

_TABLES = ("_parameters", "_buffers")
_CHILDREN = "_modules"
_PLAIN = (bool, int, float, complex, str, bytes)


@final
class FakeModel:
    """A model whose tensors are fakes while the context lasts.

    `weights` maps id(tensor) to its Weight for the fakes and for the real tensors (a closure may hold
    one); `real` maps a weight's name to the real tensor. Afterwards every module has its own attributes,
    tables, lists and dicts with their own contents again, also when the forward raised.
    """

    def __init__(
        self, model: nn.Module, mode: FakeTensorMode, device: torch.device, *, everywhere: bool = False
    ) -> None:
        self.mode, self.device, self._everywhere = mode, device, everywhere
        self.modules = dict(model.named_modules())
        self.weights: dict[int, Weight] = {}
        self.real: dict[str, Tensor] = {}
        self._fake_of: dict[int, Tensor] = {}
        own = {fqn: m for fqn, m in self.modules.items() if not isinstance(m, torch.jit.ScriptModule)}
        self._own = own
        self._restore = remember(own.values())
        self._planted: dict[str, dict[str, Any]] = {}
        self._parameters: dict[int, list[int]] = {}
        self.strays: list[Tensor] = []  # real tensors of probes, whose numbers mean nothing
        self.left: dict[str, Any] = {}  # leaf that rebinds its attributes -> what its last call left there

    def __enter__(self) -> FakeModel:
        try:
            for fqn, module in self._own.items():
                self._plant(fqn, module)
            self._know_scripted()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def device_for(self, tensor: Tensor) -> torch.device:
        """Where its fake is: with the tensor, unless that is on meta or all are to be together."""
        return self.device if self._everywhere or tensor.is_meta else tensor.device

    def rebound(self) -> list[tuple[str, str]]:
        """(module, attribute) that the forward has bound anew: a tensor, or a plain Python value."""
        return [
            (fqn, name)
            for fqn, module in self._own.items()
            for name in _differing(self._planted[fqn], _identities(module))
        ]

    def state_of(self, fqn: str) -> dict[str, dict[str, Any]]:
        """What is bound in the attributes of a module and of those in it."""
        return {name: _identities(module) for name, module in self.modules[fqn].named_modules()}

    def weight_storages(self) -> set[int]:
        """The memory of all fakes that stand for weights."""
        strided = (t for t in self._fake_of.values() if t.layout is torch.strided)
        return {t.untyped_storage()._cdata for t in strided}

    def fakes_of_weights(self) -> list[tuple[Weight, Tensor]]:
        """Every weight with the fake that stands for it."""
        return [(self.weights[id(t)], t) for t in self._fake_of.values()]

    def is_settled(self, fqn: str) -> bool:
        """Is everything bound in the module's attributes as it was before the forward?"""
        return fqn in self._own and self._planted[fqn] == _identities(self._own[fqn])

    def is_intact(self, fqn: str) -> bool:
        """Has the module its own parameters, or has torch.func.functional_call lent it others?"""
        own = [m for m in self.modules[fqn].modules() if id(m) in self._parameters]
        return all(_parameter_ids(m) == self._parameters[id(m)] for m in own)

    def _plant(self, fqn: str, module: nn.Module) -> None:
        prefix = f"{fqn}." if fqn else ""
        for key, kind in zip(_TABLES, ("parameter", "buffer"), strict=True):
            table = module.__dict__[key]
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = self._fake(tensor, Weight(prefix + name, kind))
        for name, value in list(module.__dict__.items()):
            if name not in (*_TABLES, _CHILDREN) and _holds_tensor(value):
                module.__dict__[name] = self._fake_tree(value, prefix + name)
        self._planted[fqn] = _identities(module)
        self._parameters[id(module)] = _parameter_ids(module)

    def _know_scripted(self) -> None:
        """The weights of scripted modules cannot be swapped: their calls take fakes and real weights."""
        for fqn, module in self.modules.items():
            if fqn not in self._own:
                for name, tensor in module.named_parameters(fqn):
                    self.weights.setdefault(id(tensor), Weight(name, "parameter"))
                    self.real[name] = tensor

    def _fake_tree(self, value: Any, name: str) -> Any:
        names = {id(t): f"{name}{path}" for path, t in paths(value, lambda leaf: isinstance(leaf, Tensor))}

        def swap(leaf: Any) -> Any:
            return self._fake(leaf, Weight(names[id(leaf)], "attribute")) if id(leaf) in names else leaf

        return map_leaves(swap, value)

    def _fake(self, tensor: Tensor, weight: Weight) -> Tensor:
        if id(tensor) in self._fake_of:
            return self._fake_of[id(tensor)]
        fake = fake_like(tensor, self.mode, self.device_for(tensor))
        if weight.kind == "parameter":
            fake._is_param = True  # what nn.Parameter(fake) does, on a second fake
        self._fake_of[id(tensor)] = fake
        self.weights[id(tensor)] = self.weights[id(fake)] = weight
        self.real[weight.name] = tensor
        return fake


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device | None = None) -> Tensor:
    """A fake with the tensor's shape, strides, dtype and requires_grad, of its own storage.

    Made as the mode makes it for torch.empty_strided, without the way through all of torch's dispatch.
    """
    with torch._C._DisableTorchDispatch():
        memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, memory, device or tensor.device, requires_grad=tensor.requires_grad)


def _holds_tensor(value: Any) -> bool:
    """A tensor, or one somewhere in a list, tuple or dict."""
    if isinstance(value, list | tuple | dict):
        return any(_holds_tensor(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor)


def _parameter_ids(module: nn.Module) -> list[int]:
    return [id(p) for p in module._parameters.values()]


def remember(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """A function that gives the modules their attributes, tables, lists and dicts of now back."""
    before = [(module, dict(module.__dict__)) for module in modules]
    contents = [pair for module, _ in before for pair in _contents(module)]

    def restore() -> None:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for container, items in contents:
            container.clear()
            container.extend(items) if isinstance(container, list) else container.update(items)

    return restore


def _contents(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """(list or dict, copy) of everything in the module's attributes that a forward may fill or empty."""
    for value in module.__dict__.values():
        yield from _containers(value)


def _containers(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, list | dict):
        yield value, list(value) if isinstance(value, list) else dict(value)
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def _identities(module: nn.Module) -> dict[str, Any]:
    """What is bound under which name; a change means that the forward keeps state in it."""
    tables = [module.__dict__[key] for key in _TABLES]
    rest = {k: v for k, v in module.__dict__.items() if k not in (*_TABLES, _CHILDREN)}
    return {name: _identity(value) for table in (*tables, rest) for name, value in table.items()}


def _identity(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, list | tuple):
        return [_identity(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _identity(item) for key, item in value.items()}
    return None


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]


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
