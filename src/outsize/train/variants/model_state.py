"""The structure of a model between two steps: what a user may change that no Python code has to read.

    model.head = nn.Linear(...)      layer.requires_grad_(False)
    block.register_forward_hook(f)   layer.half()      layer.__class__ = Other

Values that code reads (`model.temperature = 0.5`, `norm.eval()`) are guarded where they are read
(capture/guards); only where copies of the model hold the values of when they were made (`plain`), numbers and
texts in the attributes of modules and of their `config` are looked at here.
A forward changes such things as well (a counter; hooks that transformers installs in its first call). Those
are told apart by when they change: what was ever found changed by a step itself is no wish of the user. Steps
are watched for that after a state that is new, and only then, and a model that looks as it did before is not
looked at more closely: walks over all modules are what steps of small stages notice most.
"""

from __future__ import annotations

from operator import is_
from typing import Any, Final, final

from torch import nn
from torch.utils.hooks import RemovableHandle

from outsize.capture.guards.check import WholeDicts
from outsize.capture.guards.parameters import ParameterFlags
from outsize.program.objects import NUMBERS_AND_TEXT
from outsize.program.sharding.opaque_modules import HOOKS

StateValues = dict[tuple[int, str], Any]
_WATCHED: Final = 2  # steps, after a new state
_HOOKS_EVERY: Final = 64


@final
class StructureVersions:
    """Numbers the states of a model in the order in which they were met."""

    def __init__(self, model: nn.Module, *, plain: bool = False) -> None:
        """`plain`: numbers and texts in attributes count, whether code reads them or not."""
        self._model, self._plain = model, plain
        self._known: list[StateValues] = []
        self._now: StateValues = {}
        self._moving: set[tuple[int, str]] = set()
        self._look: Look | None = None
        self._number = self._watched = 0
        self.looks = 0  # how often the model looked other than the time before

    def number(self) -> int:
        """The state that the model is in now; one walk over its modules, so once per step."""
        if self._look is None or not self._look.is_same():
            self.looks += 1
            self._number = self._close_look()
            self._look = Look(self._model, plain=self._plain)
        elif self._watched:
            self._now = snapshot(self._model, plain=self._plain)
        return self._number

    def ran(self) -> None:
        """A step has run since `number`: what is other now than then, the forward itself changes."""
        if self._watched:
            self._watched -= 1
            self._moving |= self._changed(self._now, snapshot(self._model, plain=self._plain))

    def _close_look(self) -> int:
        self._now = snapshot(self._model, plain=self._plain)
        for number, known in enumerate(self._known):
            if self._changed(known, self._now) <= self._moving:
                return number
        self._known.append(self._now)
        self._watched = _WATCHED
        return len(self._known) - 1

    def _changed(self, before: StateValues, after: StateValues) -> set[tuple[int, str]]:
        if before == after:
            return set()
        return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


@final
class Look:
    """Compares what `snapshot` reads in a few passes at C speed; tensors are compared by identity.

    Whether hooks have come is told by the number of handles that torch has given out; all tables of hooks
    are looked at where it has changed, and at each _HOOKS_EVERY-th look, for hooks that were put there by
    hand.
    """

    def __init__(self, model: nn.Module, *, plain: bool) -> None:
        self._every = modules = list(model.modules())
        self._classes = list(map(type, modules))
        parameters = [module._parameters for module in modules if module._parameters]
        tables = [*parameters, *(module._modules for module in modules if module._modules)]
        self._tables = WholeDicts(table for table in tables if isinstance(table, dict))
        # Those of a scripted module are in C++.
        self._scripted = [(table, table.values()) for table in tables if not isinstance(table, dict)]
        self._empty = [module._parameters for module in modules if not module._parameters]
        self._empty += [module._modules for module in modules if not module._modules]
        hooks = [vars(module)[kind] for module in modules for kind in HOOKS if kind in vars(module)]
        self._hooked = [(table, len(table)) for table in hooks if table]
        self._unhooked = [table for table in hooks if not table]
        self._handles, self._looks = RemovableHandle.next_id, 0
        self._flags = ParameterFlags([p for table in parameters for p in table.values() if p is not None])
        self._model, self._plain = model, plain
        self._values = _plain_values(model) if plain else []

    def is_same(self) -> bool:
        """Returns whether the model has the same modules, parameters and hooks as when this was made."""
        if any(self._empty) or not self._has_same_hooks():
            return False
        if list(map(type, self._every)) != self._classes or not self._tables.are_same():
            return False
        if any(not all(map(is_, table.values(), held)) for table, held in self._scripted):
            return False
        if not self._flags.are_same():
            return False
        return not self._plain or self._values == _plain_values(self._model)

    def _has_same_hooks(self) -> bool:
        if any(len(table) != size for table, size in self._hooked):
            return False
        self._looks += 1
        handles = RemovableHandle.next_id
        if handles != self._handles or self._looks % _HOOKS_EVERY == 0:
            self._handles = handles
            return not any(self._unhooked)
        return True


def _plain_values(model: nn.Module) -> list[Any]:
    """Returns names and values of numbers and texts in the attributes of the modules and of their config."""
    values: list[Any] = []
    for module in model.modules():
        held = vars(module)
        values += [item for item in held.items() if isinstance(item[1], NUMBERS_AND_TEXT)]
        config = getattr(module, "config", None)
        if hasattr(config, "__dict__"):
            values += [item for item in vars(config).items() if isinstance(item[1], NUMBERS_AND_TEXT)]
    return values


def snapshot(model: nn.Module, *, plain: bool) -> StateValues:
    """(object, name) -> value of everything of the kind."""
    values: StateValues = {}
    first: dict[int, int] = {}  # parameter -> its number, so that tied ones have one
    for module in model.modules():
        key = id(module)
        values[key, "class"] = type(module)
        values[key, "hooks"] = tuple(len(getattr(module, kind)) for kind in HOOKS)
        values[key, "frozen"] = tuple(p is not None and not p.requires_grad for p in _parameters(module))
        held = [p for p in _parameters(module) if p is not None]
        values[key, "held"] = tuple((first.setdefault(id(p), len(first)), p.shape, p.dtype) for p in held)
        if not plain:
            continue
        _add_plain(values, module)
        config = getattr(module, "config", None)
        if hasattr(config, "__dict__") and (id(config), "") not in values:
            values[id(config), ""] = None
            _add_plain(values, config)
    return values


def _parameters(module: nn.Module) -> list[nn.Parameter | None]:
    return list(module._parameters.values())


def _add_plain(values: StateValues, holder: Any) -> None:
    """Python numbers and texts in the attributes, `training` among them."""
    key = id(holder)
    for name, value in vars(holder).items():
        if isinstance(value, NUMBERS_AND_TEXT):
            values[key, name] = value
