"""Notes what recorded code has read and written of objects that lived before the recording.

    model ── self.cfg ──▸ object ── .rates ──▸ list        "old": reached by noted reads from a root
    y = self.act(x); z = [y]                               born in the recording: never noted

An object is old when it is a root (a module of the model, the loss, the globals of a file, a class) or was
read from an old one. A read after the recording's own write of the same place gives no guard, and a place
that was read first and written later is a counter: it has another value at each call, and gives none either.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final, Protocol, final

from torch import Tensor, nn

from outsize.capture.guards.consumed import Consumed, is_random_generator
from outsize.capture.guards.lookup import (
    UNKNOWN,
    AttributeLookup,
    Place,
    find_attribute,
    instance_dict,
)
from outsize.capture.guards.noted import Key, NotedRead, OldObjects, Site, Step, key_of
from outsize.capture.guards.values import DEPTH, is_container, parts_of
from outsize.capture.guards.writes import Writes, tables_of
from outsize.program.objects import ABSENT
from outsize.program.python_reads import LOOK_UP, LOSS, PythonRead
from outsize.program.source_line import line_of

_ATTRIBUTE: Final = "."
_ITEM: Final = "[]"
_CONTENT: Final = "*"
_NOT_OPENED: Final = (nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, Enum)


@final
@dataclass(frozen=True, slots=True)
class _Access:
    """One step from an object, for blocks that are copied: the same step is taken from the copy's object."""

    owner: Any
    step: Step
    site: Site


class Consumers(Protocol):
    """Knows which code runs as it is, and may use objects that change with each use."""

    def may_use(self, value: Any, frame: str) -> bool:
        """Answers for one object and the code of one module, or the loss."""
        ...


@final
class Notes:
    """Collects the reads and writes of one recording."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        roots: Iterable[Any],
        *,
        is_for_guards: bool = True,
        consumers: Consumers | None = None,
    ) -> None:
        """Unless it `is_for_guards`, nobody asks for the reads, and only the writes count. `consumers` may
        use objects that change with each use; None: all code may.
        """
        self._consumers = consumers
        self._modules, self._is_for_guards = modules, is_for_guards
        self._noted: dict[Key, NotedRead] = {}
        self.old = OldObjects(modules)
        self.writes = Writes(modules, self.old, self._noted)
        self._accesses: list[_Access] = []
        self._last_read: dict[str, Key] = {}  # By its expression.
        self._tables: set[int] = set()  # Dicts of the attributes of old objects.
        for root in roots:
            self.old.adopt(root, None)
            if isinstance(root, functools.partial):
                self._open_partial(root)

    def _open_partial(self, root: functools.partial[Any]) -> None:
        """Notes what the loss function is called with, which no code of the user's has to look up."""
        for name in ("args", "keywords"):
            site = Site(f"loss_fn.{name}", line_of(root.func), LOSS)
            self.read(Place("attribute", root, name), site)
            self.content(getattr(root, name), site)

    def begin(self) -> None:
        """A forward begins: what an earlier one of the recording has left in old places is found there."""
        for key, place in self.writes.overwritten():
            if place.kind != "context":
                value = LOOK_UP[place.kind](place.holder, place.key)
                self.old.adopt(value, key if key in self._noted else None)

    # -- reads -------------------------------------------------------------------------------------

    def attribute(self, owner: Any, name: str, site: Site) -> Any:
        """Notes `owner.name` and returns it, or UNKNOWN."""
        if not self.old.has(owner) or isinstance(owner, Tensor):
            return UNKNOWN
        found: AttributeLookup = find_attribute(owner, name)
        if not found.places or _is_library(owner):
            if found.value is not UNKNOWN:
                self.old.adopt(found.value, None)
            if name == "__dict__":
                self._tables.add(id(found.value))
            return found.value
        self._accesses.append(_Access(owner, (_ATTRIBUTE, name), site))
        values = [self.read(place, site) for place in found.places]
        self._note_class(owner, found, site)
        first = self._noted.get(key_of(found.places[0]))
        if first is not None and values[0] is UNKNOWN and values[-1] is not UNKNOWN:
            first.found_instead(values[-1])
        self.old.extend(owner, (_ATTRIBUTE, name), found.value)
        return found.value

    def _note_class(self, owner: Any, found: AttributeLookup, site: Site) -> None:
        """Notes the class of an object in which something was found, since `o.__class__ = Other` is allowed.

        The classes of modules are looked at with the structure of the model. What a weak reference has given
        is left out: the note would keep it alive.
        """
        is_of_class = any(place.kind == "class" for place in found.places)
        if not is_of_class or isinstance(owner, _NOT_OPENED) or self.old.origin(id(owner)) is None:
            return
        if _is_users(type(owner)):
            label = site.label.rpartition(".")[0]
            self.read(Place("attribute", owner, "__class__"), Site(f"type({label})", site.where, site.frame))

    def item(self, owner: Any, key: Any, site: Site) -> Any:
        """Notes `owner[key]` of an old dict, list or tuple, and returns it, or UNKNOWN."""
        try:
            hash(key)
        except TypeError:
            return UNKNOWN
        if isinstance(owner, dict):
            place = Place("item", owner, key)
        elif isinstance(owner, list | tuple) and isinstance(key, int):
            place = Place("element", owner, key)
        else:
            self.content(owner, site)
            return UNKNOWN
        self._accesses.append(_Access(owner, (_ITEM, key), site))
        value = self.read(place, site)
        self.old.extend(owner, (_ITEM, key), value)
        return value

    def read(self, place: Place, site: Site) -> Any:
        """Notes that a place was read, and returns its value, or UNKNOWN where there is none."""
        key = key_of(place)
        value = LOOK_UP[place.kind](place.holder, place.key)
        noted = self._noted.get(key)
        if not self.writes.is_overwritten(key):
            if noted is None:
                noted = self._noted[key] = NotedRead(place, site)
            noted.add(site.frame)
            self.old.adopt(value, key)
        elif not self.writes.is_restored(key, value):
            self.writes.count_reader(key, site.frame)
        if self.writes.is_changed(place.holder):
            self.writes.count_reader(id(place.holder), site.frame)
        if noted is not None:
            noted.count()
            self._last_read[site.label] = key
        return UNKNOWN if value is ABSENT else value

    def content(self, container: Any, site: Site) -> None:
        """Notes that code looked into an old container."""
        if not is_container(container) or not self.old.is_noted(container):
            return
        if self.writes.is_changed(container):
            self.writes.count_reader(id(container), site.frame)
        key = self.old.origin(id(container))
        if key is None:
            if id(container) in self._tables:
                self.items(container, site)
            return
        self._accesses.append(_Access(container, (_CONTENT, None), site))
        self._noted[key].look_into(site.frame)
        for part in parts_of(container):
            self.old.adopt(part, key)
            if is_container(part):
                self.content(part, site)
            self.old.let_follow(container, part)

    def items(self, table: dict[Any, Any], site: Site) -> None:
        """Notes all items of a dict, each by itself."""
        for key in list(table):
            label = f"{site.label}.{key}" if isinstance(key, str) else f"{site.label}[{key!r}]"
            self.read(Place("item", table, key), Site(label, site.where, site.frame))

    def attributes(self, owner: Any, site: Site) -> None:
        """Notes all attributes of an old object of the user's, which code out of sight may read."""
        table = instance_dict(owner)
        if (
            table
            and self.old.is_noted(owner)
            and not isinstance(owner, _NOT_OPENED)
            and _is_users(type(owner))
        ):
            self.items(table, site)

    def referent(self, reference: Any, site: Site) -> Any:
        """Notes that code has asked for the object of an old weak reference, and returns it."""
        self.read(Place("referent", reference, None), site)
        value = reference()
        self.old.adopt(value, None)
        return value

    def has_read_tensor(self, tensor: Tensor) -> bool:
        """Returns whether a place that was read has this very tensor, or a container with it."""
        places = (noted.place for noted in self._noted.values())
        return any(_contains(LOOK_UP[place.kind](place.holder, place.key), tensor) for place in places)

    # -- writes ------------------------------------------------------------------------------------

    def key_of(self, expression: str) -> Key | None:
        """Returns which read an expression was last."""
        return self._last_read.get(expression)

    def use(self, value: Any, site: Site) -> None:
        """Notes that code uses an old object that changes with each use.

        Raises Consumed unless that code runs as it is.
        """
        if not self.old.is_noted(value):
            return
        if is_random_generator(value):
            self.writes.remember_generator(value)
        if self._consumers is None or self._consumers.may_use(value, site.frame):
            return
        key = self.old.origin(id(value))
        place = None if key is None else self._noted[key].place
        raise Consumed(value, place, site.label, site.where, site.frame)

    def log(self, expression: str) -> None:
        """Notes that what an expression has read was only put into a container, and not computed with."""
        key = self._last_read.get(expression)
        if key in self._noted:
            self._noted[key].count(-1)

    def has_read(self, module: nn.Module, name: str, frame: str) -> bool:
        """Returns whether the code of one module has read `module.name`."""
        keys: list[Key] = [("item", id(table), name) for table in tables_of(module)]
        noted = (self._noted[key].frames for key in keys if key in self._noted)
        return any(frame in frames for frames in (*noted, self.writes.readers_of(module, name)))

    # -- copied blocks -----------------------------------------------------------------------------

    def mark(self) -> int:
        """Returns a position among the reads, for `repeat`."""
        return len(self._accesses)

    def since(self, mark: int) -> list[Any]:
        """Returns the reads after a position."""
        return self._accesses[mark:]

    def repeat(self, accesses: Iterable[Any], block: str, copy: str) -> None:
        """Notes the reads of a block for a copy of it, from the corresponding modules."""
        for access in accesses if self._is_for_guards else ():
            name, steps = self.old.path(access.owner) or (None, ())
            if name is None or not (name == block or name.startswith(f"{block}.")):
                continue
            owner: Any = self._modules[copy + name[len(block) :]]
            site = Site(access.site.label, access.site.where, copy + access.site.frame[len(block) :])
            for step in (*steps, access.step):
                owner = self._take(owner, step, site)

    def _take(self, owner: Any, step: Step, site: Site) -> Any:
        kind, key = step
        if owner is UNKNOWN or not self.old.has(owner):
            return UNKNOWN
        if kind == _ATTRIBUTE:
            return self.attribute(owner, key, site)
        if kind == _ITEM:
            return self.item(owner, key, site)
        self.content(owner, site)
        return UNKNOWN

    # -- results -----------------------------------------------------------------------------------

    def reads(self, live: Collection[str] = ()) -> tuple[PythonRead, ...]:
        """Returns what the recording depends on, with the values of now, when nothing is a fake any more.

        What only the modules (or the loss) named in `live` have read is left out: they run as they are.
        """
        if not self._is_for_guards:
            return ()
        self._promote()
        own = {id(instance_dict(module)) for module in self._modules.values()}
        parameters = {id(vars(m)["_parameters"]) for m in self._modules.values()}
        weights = {*parameters, *(id(vars(m)["_buffers"]) for m in self._modules.values())}
        reads: list[PythonRead] = []
        numbers: dict[Key, int] = {}
        for key, noted in self._noted.items():
            place, site = noted.place, noted.site
            value = LOOK_UP[place.kind](place.holder, place.key)
            # A parameter that is None is looked at with the structure of the model (train.variants).
            is_weight = id(place.holder) in (weights if isinstance(value, Tensor) else parameters)
            if self.writes.is_overwritten(key) or is_weight or not self._is_stable(place):
                continue
            if all(_is_below(frame, live) for frame in noted.frames):
                continue
            parent = self.old.origin(id(place.holder)) if is_container(place.holder) else None
            if parent is not None and self._noted[parent].content:
                continue  # The whole container is compared.
            numbers[key] = len(reads)
            reads.append(
                PythonRead(
                    kind=place.kind,
                    holder=place.holder,
                    key=place.key,
                    value=value,
                    instead=noted.instead,
                    parent=None if parent is None else numbers.get(parent),
                    content=noted.content and not self.writes.is_changed(value),
                    is_live=id(place.holder) in own and isinstance(value, Tensor),
                    label=site.label,
                    where=site.where,
                    frames=frozenset(noted.frames),
                )
            )
        return tuple(reads)

    def _promote(self) -> None:
        """A container that was swapped while fakes were in the model is compared as a whole, by its place."""
        for noted in list(self._noted.values()):
            if not self._is_stable(noted.place):
                key = self.old.origin(id(noted.place.holder))
                if key is not None:
                    self._noted[key].compare_content()

    def _is_stable(self, place: Place) -> bool:
        """Returns whether the holder is still where it was read from."""
        key = self.old.origin(id(place.holder))
        if key is None or not is_container(place.holder):
            return True
        parent = self._noted[key].place
        value = LOOK_UP[parent.kind](parent.holder, parent.key)
        return _contains(value, place.holder)


def roots_of(function: Any) -> list[Any]:
    """Returns the objects at which the reads of a loss function begin."""
    roots = [function]
    while isinstance(function, functools.partial):
        function = function.func
        roots.append(function)
    roots.append(getattr(function, "__self__", None))
    return roots


def _is_users(kind: type) -> bool:
    """Returns whether a class is the user's, or a mere holder of attributes."""
    package = kind.__module__.partition(".")[0]
    is_library = package in ("torch", "numpy", "outsize") or package in sys.stdlib_module_names
    return not is_library or kind in (SimpleNamespace, argparse.Namespace)


def _is_below(frame: str, names: Collection[str]) -> bool:
    return any(frame == name or frame.startswith(f"{name}.") for name in names)


def _is_library(owner: Any) -> bool:
    """Returns whether these are the globals of torch, numpy or the standard library."""
    package = owner.__name__.partition(".")[0] if isinstance(owner, ModuleType) else ""
    return package in ("torch", "numpy") or package in sys.stdlib_module_names


def _contains(value: Any, wanted: Any, depth: int = DEPTH) -> bool:
    if value is wanted:
        return True
    return depth > 0 and is_container(value) and any(_contains(p, wanted, depth - 1) for p in parts_of(value))
