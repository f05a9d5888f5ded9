"""Presents the user's model as one rank sees it: the same modules and names, with only this rank's weights.

    torch.optim.AdamW(engine.weights.module.parameters())
    for module in engine.weights.module.modules(): ...

Each module of the view shares the attributes of the user's module and is an instance of its class; its tables
of parameters and buffers hold the same tensors, or None where another rank owns them. `train()` and `eval()`
reach the user's modules. Asked for by name, a weight of another rank is the stand-in of run/weights/freed.py.

The whole view iterates over this rank's weights alone, which is what an optimizer wants. A submodule iterates
over all of its weights, stand-ins among them, so that `zip(view.a.parameters(), view.b.parameters())` pairs
the same weights as in one process, wherever they are, and raises where the values of a stand-in are used.
"""

from __future__ import annotations

from types import new_class
from typing import Any

from torch import nn

from outsize.errors import BadOption
from outsize.run.weights.freed import FreedWeight
from outsize.run.weights.ownership import places


def own_module(model: nn.Module, names: set[str]) -> nn.Module:
    """Returns the view of `model` that has the tensors of these (first) names."""
    owned = {id(table[key]) for table, key, name in places(model) if name in names}
    views = {id(module): _view(module, owned) for module in model.modules()}
    for module in model.modules():
        children = {n: None if child is None else views[id(child)] for n, child in module._modules.items()}
        views[id(module)].__dict__["_modules"] = children
        views[id(module)].__dict__["_is_part"] = module is not model
    return views[id(model)]


def _view(module: nn.Module, owned: set[int]) -> nn.Module:
    module_class = type(module)
    view = object.__new__(
        new_class(module_class.__name__, (module_class,), {}, lambda body: body.update(_METHODS))
    )
    view.__dict__.update({name: value for name, value in vars(module).items() if name != "training"})
    for table in ("_parameters", "_buffers"):
        tensors = getattr(module, table)
        view.__dict__[table] = {k: t if id(t) in owned else None for k, t in tensors.items()}
    view.__dict__["_whole"] = module
    return view


def _training(self: nn.Module) -> bool:
    return self.__dict__["_whole"].training


def _set_training(self: nn.Module, mode: bool) -> None:
    if "_whole" in self.__dict__:  # absent while a compiled module's __init__ makes a copy
        self.__dict__["_whole"].training = mode


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise BadOption(
        f"engine.weights.module({type(self).__name__}) has the weights of one rank and cannot be called",
        next_step="engine.step(...) or engine.evaluate(...)",
    )


def _getattr(self: nn.Module, name: str) -> Any:
    of_class: Any = super(type(self), self)
    value = of_class.__getattr__(name)
    if value is not None or "_whole" not in self.__dict__:
        return value
    weight = getattr(self.__dict__["_whole"], name, None)
    return weight if isinstance(weight, FreedWeight) else None


def _named_members(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Yields what `parameters`, `buffers` and their like iterate over."""
    if self.__dict__.get("_is_part", False):
        yield from self.__dict__["_whole"]._named_members(*args, **kwargs)
    else:
        of_class: Any = super(type(self), self)
        yield from of_class._named_members(*args, **kwargs)


_METHODS = {
    "training": property(_training, _set_training),
    "forward": _forward,
    "__getattr__": _getattr,
    "_named_members": _named_members,
}
