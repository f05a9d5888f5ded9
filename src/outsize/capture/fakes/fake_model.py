"""Replaces a model's tensors by fakes, and restores everything.

Recording runs the user's forward on fake tensors: they have shape, dtype and autograd but no memory, so
weights may be on meta and a 70 B model costs nothing. Parameters, buffers and tensor attributes (also those
in lists and dicts, such as an LSTM's flat weights) are replaced in the modules' own dicts.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from operator import is_
from typing import Any, Final, final

import torch
import torch._subclasses
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outsize.program.objects import NUMBERS_AND_TEXT, Comparison, Scope, fingerprint, snapshot, walk
from outsize.program.tape import Meta, Weight
from outsize.program.tree import accessor, map_leaves, paths
from outsize.program.values.wrapper_tensors import WrapperStructure, is_wrapper, plain_parts

_TABLES = ("_parameters", "_buffers")
_CHILDREN = "_modules"
# These attributes are not state: tables have their own names, and a set holds the names of buffers.
_NO_STATE = (*_TABLES, _CHILDREN, "_non_persistent_buffers_set")
_CONTAINERS = Scope(attributes=False)
_TABLE_TYPES = frozenset((dict, OrderedDict, list, tuple, set, frozenset, deque))
REACHABLE: Final = Scope(modules="attributes and tables", tensors=True)
# Dtypes and objects are not compared: a forward that stores one keeps no numbers in it.
_BINDINGS = Comparison(by_value=NUMBERS_AND_TEXT, of_tensor=id, of_object=lambda _: None)


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
        self._planted: dict[str, _Bindings] = {}
        self._at_rest: dict[int, _Bindings] = {}
        self._parameters: dict[int, list[int]] = {}
        self.carried: dict[int, dict[str, Any]] = {}  # fake -> what its tensor carries, as `weight.scale`
        self.strays: list[Tensor] = []  # real tensors of probes; their values are arbitrary
        self.left: dict[str, Any] = {}  # leaf that rebinds its attributes -> their values after its last call

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
        """Returns the device of the tensor's fake: the tensor's own, unless that is meta or all share one
        device.
        """
        return self.device if self._everywhere or tensor.is_meta else tensor.device

    def rebound(self) -> list[tuple[str, str]]:
        """Returns (module, attribute) that the forward has bound to another tensor or plain Python value."""
        return [
            (fqn, name)
            for fqn, module in self._own.items()
            if not self._planted[fqn].are_those_of(module)
            for name in differing(self._planted[fqn].identities, _identities(module))
        ]

    def state_of(self, fqn: str) -> dict[str, dict[str, Any]]:
        """Returns what is bound in the attributes of a module and of its submodules."""
        return {name: _identities(module) for name, module in self.modules[fqn].named_modules()}

    def state_at_rest(self, fqn: str) -> dict[str, dict[str, Any]]:
        """Returns what `state_of` was before the forward."""
        named = self.modules[fqn].named_modules()
        # A scripted module, whose attributes Python cannot set, is as it is.
        return {
            name: self._at_rest[id(m)].identities if id(m) in self._at_rest else _identities(m)
            for name, m in named
        }

    def begin(self, *, numbers: bool) -> None:
        """Notes what is bound before the forward; `numbers` were put into attributes since the fakes were."""
        if not self._at_rest:
            self._at_rest = {
                id(module): _Bindings(module) if numbers else self._planted[fqn]
                for fqn, module in self._own.items()
            }

    def strided_weights(self) -> list[Tensor]:
        """Returns the fakes that stand for weights and have storages."""
        return [t for t in self._fake_of.values() if t.layout is torch.strided]

    def fakes_of_weights(self) -> list[tuple[Weight, Tensor]]:
        """Returns every weight with the fake that stands for it."""
        return [(self.weights[id(t)], t) for t in self._fake_of.values()]

    def is_settled(self, fqn: str) -> bool:
        """Tells whether everything bound in the module's attributes is as before the forward."""
        return fqn in self._own and self._planted[fqn].are_those_of(self._own[fqn])

    def is_intact(self, fqn: str) -> bool:
        """Tells whether the module has its own parameters, and not others from torch.func.functional_call."""
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
        self._planted[fqn] = _Bindings(module)
        self._parameters[id(module)] = _parameter_ids(module)

    def _know_scripted(self) -> None:
        """Registers the weights of scripted modules, which cannot be swapped: their calls take both kinds."""
        for fqn, module in self.modules.items():
            if fqn not in self._own:
                for name, tensor in module.named_parameters(fqn):
                    self.weights.setdefault(id(tensor), Weight(name, "parameter"))
                    self.real[name] = tensor

    def _fake_tree(self, value: Any, name: str) -> Any:
        names = {
            id(t): f"{name}{accessor(steps)}"
            for steps, t in paths(value, lambda leaf: isinstance(leaf, Tensor))
        }

        def swap(leaf: Any) -> Any:
            return self._fake(leaf, Weight(names[id(leaf)], "attribute")) if id(leaf) in names else leaf

        return map_leaves(swap, value)

    def _like(self, tensor: Tensor) -> Tensor:
        """Returns a fake of a tensor; of one that is made of others, such a one of their fakes."""
        if not is_wrapper(tensor):
            return fake_like(tensor, self.mode, self.device_for(tensor))
        parts = {
            path: fake_like(part.detach(), self.mode, self.device_for(part))
            for path, part in plain_parts(tensor).items()
        }
        return WrapperStructure.of(tensor).built(parts)

    def _fake(self, tensor: Tensor, weight: Weight) -> Tensor:
        if id(tensor) in self._fake_of:
            return self._fake_of[id(tensor)]
        fake = self._like(tensor)
        if weight.kind == "parameter":
            fake._is_param = True  # nn.Parameter(fake) sets it too, but on a second fake
        self._fake_of[id(tensor)] = fake
        self.weights[id(tensor)] = self.weights[id(fake)] = weight
        self.real[weight.name] = tensor
        if vars(tensor) and not is_traceable_wrapper_subclass(tensor):  # Such a class keeps its parts there.
            carried = {
                name: self._fake_tree(value, f"{weight.name}.{name}") if _holds_tensor(value) else value
                for name, value in vars(tensor).items()
            }
            vars(fake).update(carried)
            self.carried[id(fake)] = carried
        return fake


def fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device | None = None) -> Tensor:
    """Returns a fake with the tensor's shape, strides, dtype and requires_grad, of its own storage.

    It is made as the mode makes it for torch.empty_strided, without torch's dispatch.
    """
    with torch._C._DisableTorchDispatch():
        memory = torch.empty_strided(
            *(tensor.shape, tensor.stride()),
            dtype=tensor.dtype,
            device="meta",
            requires_grad=tensor.requires_grad,  # The fake has it from here; torch 2.11's takes no argument.
        )
        return FakeTensor(mode, memory, device or tensor.device)


def fake_of(meta: Meta, mode: FakeTensorMode) -> Tensor:
    """Returns a fake of a slot, of its own storage and without a history; made as `fake_like`."""
    with torch._C._DisableTorchDispatch():
        memory = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        return FakeTensor(mode, memory, meta.device)


def _holds_tensor(value: Any) -> bool:
    """Says whether this is a tensor, or a list, tuple or dict with one somewhere."""
    if isinstance(value, Tensor) or not _CONTAINERS.opens(value, is_root=True):
        return isinstance(value, Tensor)
    if _is_empty(value):
        return False
    return any(isinstance(part, Tensor) for _, part in walk([value], _CONTAINERS))


def _parameter_ids(module: nn.Module) -> list[int]:
    return [id(p) for p in module._parameters.values()]


def remember(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Returns a function that restores what the modules hold at present: attributes, tables, the contents of
    containers, the attributes of objects and of tensors.
    """
    return snapshot(modules, REACHABLE).restore


@final
class _Bindings:
    """Holds what a module's names are bound to, and tells whether they still are.

    A module that was left alone has the same objects in the same order, so nothing is compared but its
    containers that have items. Else, `identities` decides.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names, self._values = _bound(module)
        self._attributes = len(module.__dict__)
        tables = [v for k, v in module.__dict__.items() if k not in _NO_STATE and _CONTAINERS.opens(v)]
        self._empty = [table for table in tables if _is_empty(table)]
        self._filled = [(t, fingerprint(t, _BINDINGS)) for t in tables if not _is_empty(t)]

    @cached_property
    def identities(self) -> dict[str, Any]:
        """Returns the identities that the module had; its containers may have other contents by now."""
        known = {id(table): before for table, before in self._filled}
        known |= {id(table): fingerprint(type(table)(), _BINDINGS) for table in self._empty}
        pairs = [*zip(self._names, self._values, strict=True)]
        rest = ((name, value) for name, value in pairs[: self._attributes] if name not in _NO_STATE)
        return {
            name: known[id(value)] if id(value) in known else fingerprint(value, _BINDINGS)
            for name, value in (*pairs[self._attributes :], *rest)
        }

    def are_those_of(self, module: nn.Module) -> bool:
        """Tells whether the module has equal bindings."""
        names, values = _bound(module)
        same = names == self._names and all(map(is_, values, self._values)) and not any(self._empty)
        if same and all(fingerprint(table, _BINDINGS) == before for table, before in self._filled):
            return True
        return self.identities == _identities(module)


def _is_empty(value: Any) -> bool:
    """Tells whether this is an empty container of Python's own."""
    return type(value) in _TABLE_TYPES and not value


def _bound(module: nn.Module) -> tuple[list[str], list[Any]]:
    """Returns the names in a module and what is bound to each, in their order."""
    attributes = module.__dict__
    tables = [attributes[key] for key in _TABLES]
    names = [*attributes, *(name for table in tables for name in table)]
    return names, [*attributes.values(), *(value for table in tables for value in table.values())]


def _identities(module: nn.Module) -> dict[str, Any]:
    """Returns what is bound under which name; a change means that the forward keeps state in it."""
    tables = [module.__dict__[key] for key in _TABLES]
    rest = {k: v for k, v in module.__dict__.items() if k not in _NO_STATE}
    return {name: fingerprint(value, _BINDINGS) for table in (*tables, rest) for name, value in table.items()}


def differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns the names that are bound to something else, in an order that is the same in every process."""
    return [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]


@contextmanager
def hidden_fakes() -> Iterator[None]:
    """Hides torch._subclasses.FakeTensor, since libraries that test for it take other branches than eager."""
    real = torch._subclasses.FakeTensor
    torch._subclasses.FakeTensor = _Nothing  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch._subclasses.FakeTensor = real


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Silences torch's log of ops without a fake implementation; capture/recording/fallbacks.py handles
    those.
    """
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
    """Tells whether a tensor was made under the fake mode."""
    return isinstance(tensor, FakeTensor)
