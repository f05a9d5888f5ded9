"""What a user may change on a model between two steps, and a tape depends on.

    model.head = nn.Linear(...)      layer.requires_grad_(False)      norm.eval()
    block.register_forward_hook(f)   model.temperature = 0.5          model.config.output_attentions = True

A forward changes such things as well (a counter; hooks that transformers installs in its first call). Those
are told apart by when they change: what was ever found changed by a step itself is no wish of the user. Steps
are watched for that after a state that is new, and only then, and a model that looks as it did before is not
looked at more closely: walks over all modules are what steps of small stages notice most.
"""

from __future__ import annotations

from collections import OrderedDict
from types import NoneType
from typing import Any, Final, final

from torch import nn

from outsize.capture.leaves import HOOKS

Snapshot = dict[tuple[int, str], Any]
_PLAIN: Final = (bool, int, float, str)
_HOLDERS: Final = frozenset((dict, OrderedDict, set, NoneType))
_WATCHED: Final = 2  # steps, after a new state


@final
class Settings:
    """Numbers the states of a model in the order in which they were met."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: list[Snapshot] = []
        self._now: Snapshot = {}
        self._moving: set[tuple[int, str]] = set()
        self._look: list[Any] = []
        self._number = self._watched = 0
        self.looks = 0  # how often the model looked other than the time before

    def number(self) -> int:
        """The state that the model is in now; one walk over its modules, so once per step."""
        look = look_of(self._model)
        if look != self._look:
            self.looks += 1
            self._look, self._number = look, self._close_look()
        elif self._watched:
            self._now = snapshot(self._model)
        return self._number

    def ran(self) -> None:
        """A step has run since `number`: what is other now than then, the forward itself changes."""
        if self._watched:
            self._watched -= 1
            self._moving |= self._changed(self._now, snapshot(self._model))

    def _close_look(self) -> int:
        self._now = snapshot(self._model)
        for number, known in enumerate(self._known):
            if self._changed(known, self._now) <= self._moving:
                return number
        self._known.append(self._now)
        self._watched = _WATCHED
        return len(self._known) - 1

    def _changed(self, before: Snapshot, after: Snapshot) -> set[tuple[int, str]]:
        if before == after:
            return set()
        return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def look_of(model: nn.Module) -> list[Any]:
    """What `snapshot` looks at, in a row, by one quick walk; tensors themselves instead of numbers."""
    found: list[Any] = []
    seen: set[int] = set()
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        held = vars(module)
        plain = [v for v in held.values() if type(v) not in _HOLDERS and isinstance(v, _PLAIN)]
        hooks = [(kind, len(held[kind])) for kind in HOOKS if held.get(kind)]
        found += (id(module), *held, *plain, *hooks)
        for p in module._parameters.values():
            found += (None,) if p is None else (id(p), p.requires_grad, p.shape, p.dtype)
        if "config" in held or hasattr(type(module), "config"):
            config: Any = module.config
            if hasattr(config, "__dict__") and id(config) not in seen:
                seen.add(id(config))
                found += [item for item in vars(config).items() if isinstance(item[1], _PLAIN)]
        left += module._modules.values()
    return found


def snapshot(model: nn.Module) -> Snapshot:
    """(object, name) -> value of everything of the kind."""
    found: Snapshot = {}
    first: dict[int, int] = {}  # parameter -> its number, so that tied ones have one
    for module in model.modules():
        key = id(module)
        found[key, "hooks"] = tuple(len(getattr(module, kind)) for kind in HOOKS)
        found[key, "frozen"] = tuple(p is not None and not p.requires_grad for p in _parameters(module))
        held = [p for p in _parameters(module) if p is not None]
        found[key, "held"] = tuple((first.setdefault(id(p), len(first)), p.shape, p.dtype) for p in held)
        _add_plain(found, module)
        config = getattr(module, "config", None)
        if hasattr(config, "__dict__") and (id(config), "") not in found:
            found[id(config), ""] = None
            _add_plain(found, config)
    return found


def _parameters(module: nn.Module) -> list[nn.Parameter | None]:
    return list(module._parameters.values())


def _add_plain(found: Snapshot, holder: Any) -> None:
    """Python numbers and texts in the attributes, `training` among them."""
    key = id(holder)
    for name, value in vars(holder).items():
        if isinstance(value, _PLAIN):
            found[key, name] = value
