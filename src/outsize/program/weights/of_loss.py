"""The loss is the last part of a program, with weights and buffers like any other part.

    model      backbone.weight, head.weight          the user's module, as it is
    loss_fn    classifier.weight, bank (a buffer)    a module, or code that holds modules
    together   backbone.weight, head.weight, loss_fn.classifier.weight, loss_fn.bank

`with_loss` gives both one set of names; neither is changed, and the model's own names stay. A loss that is a
module, or a method of one, is `loss_fn`; modules that a function holds in a variable are `loss_fn.VARIABLE`.
What the loss shares with the model has the model's names alone.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Generator, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType, new_class
from typing import Any, cast

from torch import Tensor, nn

from outsize.program.objects import is_filled
from outsize.program.python_reads import LOSS


class ModelWithLoss(nn.Module, ABC):
    """A model and the modules of its loss under one set of names; it has all attributes of the model.

    Each is of a class of its own, which has the name of the model's.
    """

    __slots__ = ("loss_parts", "plain")
    loss_parts: dict[str, nn.Module]
    plain: nn.Module

    def __getattr__(self, name: str) -> Any:
        """Returns what the model's class has."""
        return getattr(self.plain, name)

    def __reduce__(self) -> Any:
        """Returns how a copy is made: of the model and the parts of the loss."""
        return _joined, (self.plain, self.loss_parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return self.plain(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yields the modules of the model under their names, then those that the loss has besides."""
        memo = set() if memo is None else memo
        yield from self.plain.named_modules(memo, prefix, remove_duplicate)
        known = {id(module) for module in self.plain.modules()}
        for name, part in self.loss_parts.items():
            below = part.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)
            yield from ((fqn, module) for fqn, module in below if id(module) not in known)

    def get_submodule(self, target: str) -> nn.Module:
        """Returns a module by its name. Raises AttributeError."""
        for name, part in self.loss_parts.items():
            if target == name or target.startswith(f"{name}."):
                return part.get_submodule(target[len(name) + 1 :])
        return self.plain.get_submodule(target)


def with_loss(model: nn.Module, loss_fn: Any) -> nn.Module:
    """Returns the model with the modules of its loss; the model itself where the loss has no tensors."""
    if isinstance(model, ModelWithLoss) or loss_fn is None:
        return model
    prefix = LOSS
    while prefix in model._modules:
        prefix += "_"
    known = {id(module) for module in model.modules()}
    parts = {n: part for n, part in modules_held(loss_fn, prefix).items() if id(part) not in known}
    own = {id(tensor) for tensor in _tensors(model)}
    if all(id(tensor) in own for part in parts.values() for tensor in _tensors(part)):
        return model
    return _joined(model, parts)


def modules_held(loss_fn: Any, name: str = LOSS) -> dict[str, nn.Module]:
    """Returns the modules that a loss function is, or holds, and calls, by their names."""
    parts = dict[str, nn.Module]()
    for found, module in _modules_held(loss_fn, name, frozenset(), set()):
        parts[found if found not in parts else f"{found}{len(parts)}"] = module
    return parts


def _joined(model: nn.Module, parts: dict[str, nn.Module]) -> nn.Module:
    """Returns both as one module, which has the class's name and the attributes of the model."""
    together = object.__new__(cast(Any, new_class(type(model).__name__, (ModelWithLoss,))))
    for name, value in (("__dict__", vars(model)), ("plain", model), ("loss_parts", parts)):
        object.__setattr__(together, name, value)
    return together


def plain_model(model: nn.Module) -> nn.Module:
    """Returns the user's model without the modules of its loss."""
    return model.plain if isinstance(model, ModelWithLoss) else model


def loss_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that the loss has besides those of the model, by their names."""
    if not isinstance(model, ModelWithLoss):
        return {}
    known = {id(module) for module in model.plain.modules()}
    return {name: module for name, module in model.named_modules() if id(module) not in known}


def loss_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of the loss, by what their names begin with in the loss: `""` or `centers.`."""
    parts = model.loss_parts.items() if isinstance(model, ModelWithLoss) else ()
    below = ((name.partition(".")[2], part) for name, part in parts)
    return {f"{name}." if name else "": part for name, part in below}


def of_loss(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Returns those of these weights that are the loss's own."""
    parts = tuple(f"{part}." for part in model.loss_parts) if isinstance(model, ModelWithLoss) else ()
    return frozenset(name for name in names if name.startswith(parts)) if parts else frozenset()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _modules_held(
    value: Any, name: str, words: frozenset[str], seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that code, or an object, holds, each with a name.

    Of an object the attributes count that the code names: `words`.
    """
    if isinstance(value, nn.Module):
        yield name, value
    if isinstance(value, nn.Module | type | ModuleType | Tensor) or id(value) in seen:
        return
    seen.add(id(value))
    code = getattr(value, "__func__", value)
    if not isinstance(code, FunctionType):
        code = vars(type(value)).get("__call__")
    words |= _words(code.__code__) if isinstance(code, FunctionType) else frozenset()
    for key, part in _parts(value, words):
        yield from _modules_held(part, f"{name}.{key}" if key else name, words, seen)


def _parts(value: Any, words: frozenset[str]) -> Iterable[tuple[str, Any]]:
    if isinstance(value, MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, functools.partial):
        numbered = ((str(number), part) for number, part in enumerate(value.args))
        return [("", value.func), *numbered, *value.keywords.items()]
    if isinstance(value, FunctionType):
        return _held_by_function(value, words)
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [(str(number), part) for number, part in enumerate(value)]
    attributes = ((key, part) for key, part in getattr(value, "__dict__", {}).items() if key in words)
    methods = (
        ("", part)
        for key in sorted(words)
        if isinstance(part := getattr(type(value), key, None), FunctionType)
    )
    return [*attributes, *methods]


def _held_by_function(function: FunctionType, words: frozenset[str]) -> list[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held: list[tuple[str, Any]] = [(name, cell.cell_contents) for name, cell in cells if is_filled(cell)]
    held += (function.__kwdefaults__ or {}).items()
    held += ((str(number), part) for number, part in enumerate(function.__defaults__ or ()))
    for name in sorted(words & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, nn.Module) or _is_of_file(value, function):
            held.append((name, value))
    return [*held, ("", getattr(function, "__wrapped__", None))]


def _is_of_file(value: Any, function: FunctionType) -> bool:
    """Returns whether a value is a function, or an object, of code in the same file."""
    kind = value if isinstance(value, FunctionType) else type(value)
    return not isinstance(value, type | ModuleType) and kind.__module__ == function.__module__


def _words(code: CodeType) -> frozenset[str]:
    """Returns the names that code and the functions in it look up."""
    inner = (_words(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*inner)
