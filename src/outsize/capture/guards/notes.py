"""Notes what recorded code has read and written of objects that lived before the recording.

    model ── self.cfg ──▸ object ── .rates ──▸ list        "old": reached by noted reads from a root
    y = self.act(x); z = [y]                               born in the recording: never noted

An object is old when it is a root (a module of the model, the loss, the globals of a file, a class) or was
read from an old one. A read after the recording's own write of the same place gives no guard, and a place
that was read first and written later is a counter: it has another value at each call, and gives none either.
"""

from __future__ import annotations

import argparse
import array
import functools
import sys
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn

from outsize.capture.guards.consumed import Consumed, is_random_generator, random_state, set_random_state
from outsize.capture.guards.lookup import (
    UNKNOWN,
    AttributeLookup,
    Place,
    find_attribute,
    instance_dict,
    put_back,
)
from outsize.capture.guards.values import DEPTH, PLAIN, is_container, parts_of
from outsize.program.objects import ABSENT
from outsize.program.python_reads import LOOK_UP, LOSS, PythonRead
from outsize.program.source_line import line_of
from outsize.program.values.containers import content_of, refill

Key = tuple[str, int, Any]  # kind, id of the holder, key
Step = tuple[str, Any]
_ATTRIBUTE: Final = "."
_ITEM: Final = "[]"
_CONTENT: Final = "*"
_NOT_OPENED: Final = (nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, Enum)
_WEIGHT_TABLES: Final = ("_parameters", "_buffers")


@final
@dataclass(frozen=True, slots=True)
class Site:
    """Where in the user's code something is read."""

    label: str
    where: str
    frame: str


@final
@dataclass(slots=True)
class _Noted:
    place: Place
    site: Site
    content: bool = False
    frames: set[str] = field(default_factory=set[str])
    times: int = 0
    instead: Any = ABSENT  # What the look-up has found behind a place that has nothing: of the class.


@final
@dataclass(slots=True)
class Write:
    """Describes a write of recorded code into a place or a container that lived before the recording."""

    site: Site
    place: Place | None  # None: it changes a container.
    is_used: bool = False  # The code also uses what it has written, in this call or a later one.
    times: int = 0
    updates: int = 0  # So many times the new value was made of the old one, which went nowhere else.
    # The modules (or the loss) whose code reads what was written, in the same recording.
    readers: frozenset[str] = frozenset()


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
        self._random: dict[int, tuple[Any, Any]] = {}  # Generators of random numbers, and their states.
        self._contexts: dict[Key, tuple[Place, Any, Site, int]] = {}  # Context variables that were set.
        self._modules, self._is_for_guards = modules, is_for_guards
        self._old: dict[int, Any] = {}
        self._origin: dict[int, Key | None] = {}  # The read that led to an old object.
        self._base: dict[int, tuple[str, tuple[Step, ...]]] = {}  # Its path from a module of the model.
        self._noted: dict[Key, _Noted] = {}
        self._before: dict[Key, tuple[Place, Any]] = {}  # What the recording has overwritten.
        self._contents: dict[int, tuple[Any, Any]] = {}  # Containers that it has changed, and copies.
        self._accesses: list[_Access] = []
        self._last_read: dict[str, Key] = {}  # By its expression.
        self._tables: set[int] = set()  # Dicts of the attributes of old objects.
        self._tensors: dict[int, tuple[Tensor, int, Tensor]] = {}  # With their versions and copies.
        self._writes: dict[tuple[Key | int, str], Write] = {}
        self._readers: dict[Key | int, dict[str, int]] = {}  # Who has read what was written, and how often.
        for name, module in reversed(list(modules.items())):
            self._adopt(module, None)
            self._base[id(module)] = name, ()
        for root in roots:
            self._adopt(root, None)
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
        for key, (place, _) in self._before.items():
            if place.kind != "context":
                self._adopt(LOOK_UP[place.kind](place.holder, place.key), key if key in self._noted else None)

    def is_old(self, value: Any) -> bool:
        """Returns whether the object lived before the recording, as far as is known."""
        return id(value) in self._old or isinstance(value, ModuleType | type)

    # -- reads -------------------------------------------------------------------------------------

    def attribute(self, owner: Any, name: str, site: Site) -> Any:
        """Notes `owner.name` and returns it, or UNKNOWN."""
        if not self.is_old(owner) or isinstance(owner, Tensor):
            return UNKNOWN
        found: AttributeLookup = find_attribute(owner, name)
        if not found.places or _is_library(owner):
            if found.value is not UNKNOWN:
                self._adopt(found.value, None)
            if name == "__dict__":
                self._tables.add(id(found.value))
            return found.value
        self._accesses.append(_Access(owner, (_ATTRIBUTE, name), site))
        values = [self.read(place, site) for place in found.places]
        self._note_class(owner, found, site)
        first = self._noted.get(_key(found.places[0]))
        if first is not None and values[0] is UNKNOWN and values[-1] is not UNKNOWN:
            first.instead = values[-1]
        self._extend(owner, (_ATTRIBUTE, name), found.value)
        return found.value

    def _note_class(self, owner: Any, found: AttributeLookup, site: Site) -> None:
        """Notes the class of an object in which something was found, since `o.__class__ = Other` is allowed.

        The classes of modules are looked at with the structure of the model. What a weak reference has given
        is left out: the note would keep it alive.
        """
        is_of_class = any(place.kind == "class" for place in found.places)
        if not is_of_class or isinstance(owner, _NOT_OPENED) or self._origin.get(id(owner)) is None:
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
        self._extend(owner, (_ITEM, key), value)
        return value

    def read(self, place: Place, site: Site) -> Any:
        """Notes that a place was read, and returns its value, or UNKNOWN where there is none."""
        key = _key(place)
        value = LOOK_UP[place.kind](place.holder, place.key)
        noted = self._noted.get(key)
        if key not in self._before:
            if noted is None:
                noted = self._noted[key] = _Noted(place, site)
            noted.frames.add(site.frame)
            self._adopt(value, key)
        elif not _is_same(value, self._before[key][1]):
            self._count_reader(key, site.frame)
        if id(place.holder) in self._contents:
            self._count_reader(id(place.holder), site.frame)
        if noted is not None:
            noted.times += 1
            self._last_read[site.label] = key
        return UNKNOWN if value is ABSENT else value

    def content(self, container: Any, site: Site) -> None:
        """Notes that code looked into an old container."""
        if not is_container(container) or id(container) not in self._old:
            return
        if id(container) in self._contents:
            self._count_reader(id(container), site.frame)
        key = self._origin.get(id(container))
        if key is None:
            if id(container) in self._tables:
                self.items(container, site)
            return
        self._accesses.append(_Access(container, (_CONTENT, None), site))
        noted = self._noted[key]
        noted.frames.add(site.frame)
        noted.content = True
        base = self._base.get(id(container))
        for part in parts_of(container):
            self._adopt(part, key)
            if is_container(part):
                self.content(part, site)
            if base is not None and isinstance(part, nn.Module):
                self._base.setdefault(id(part), base)

    def items(self, table: dict[Any, Any], site: Site) -> None:
        """Notes all items of a dict, each by itself."""
        for key in list(table):
            label = f"{site.label}.{key}" if isinstance(key, str) else f"{site.label}[{key!r}]"
            self.read(Place("item", table, key), Site(label, site.where, site.frame))

    def attributes(self, owner: Any, site: Site) -> None:
        """Notes all attributes of an old object of the user's, which code out of sight may read."""
        table = instance_dict(owner)
        if table and id(owner) in self._old and not isinstance(owner, _NOT_OPENED) and _is_users(type(owner)):
            self.items(table, site)

    def referent(self, reference: Any, site: Site) -> Any:
        """Notes that code has asked for the object of an old weak reference, and returns it."""
        self.read(Place("referent", reference, None), site)
        value = reference()
        self._adopt(value, None)
        return value

    def _count_reader(self, key: Key | int, frame: str, by: int = 1) -> None:
        readers = self._readers.setdefault(key, {})
        readers[frame] = readers.get(frame, 0) + by

    def _readers_of(self, key: Key | int) -> list[str]:
        """Returns the modules whose code has read what was written for more than `+=`."""
        return [frame for frame, times in self._readers.get(key, {}).items() if times > 0]

    def _extend(self, owner: Any, step: Step, value: Any) -> None:
        base = self._base.get(id(owner))
        if base is not None and id(value) in self._old:
            self._base.setdefault(id(value), (base[0], (*base[1], step)))

    def _adopt(self, value: Any, key: Key | None) -> None:
        if value is ABSENT or isinstance(value, (*PLAIN, Tensor, type, ModuleType)):
            return
        if id(value) not in self._old:
            self._old[id(value)] = value
            self._origin[id(value)] = key

    def has_read_tensor(self, tensor: Tensor) -> bool:
        """Returns whether a place that was read has this very tensor, or a container with it."""
        places = (noted.place for noted in self._noted.values())
        return any(_contains(LOOK_UP[place.kind](place.holder, place.key), tensor) for place in places)

    def old_objects(self) -> list[Any]:
        """Returns the objects that lived before the recording, as far as it has read them."""
        return list(self._old.values())

    # -- writes ------------------------------------------------------------------------------------

    def key_of(self, expression: str) -> Key | None:
        """Returns which read an expression was last."""
        return self._last_read.get(expression)

    def write(
        self, place: Place | None, value: Any, site: Site, made_of: Collection[Key | None] = ()
    ) -> None:
        """Notes that a place of an old object is about to get another value, which was `made_of` these reads
        alone and went nowhere else.
        """
        if place is None:
            return
        key = _key(place)
        before = LOOK_UP[place.kind](place.holder, place.key)
        if before is not value:
            if key in made_of and key in self._before and not _is_same(before, self._before[key][1]):
                self._count_reader(key, site.frame, -1)  # It has read what others wrote for `+=` alone.
            self._before.setdefault(key, (place, before))
            self._note_write(key, place, site, is_update=key in made_of)
        elif key not in self._noted:
            self._before.setdefault(key, (place, before))  # What is read now is the forward's own value.

    def set_context(self, variable: Any, site: Site) -> None:
        """Notes that a context variable is about to be set; what counts is whether it stays so."""
        place = Place("context", variable, None)
        key = place.kind, id(variable), None
        before = LOOK_UP["context"](variable, None)
        self._before.setdefault(key, (place, before))
        first = self._contexts.get(key, (place, before, site, 0))
        self._contexts[key] = (*first[:3], first[3] + 1)

    def use(self, value: Any, site: Site) -> None:
        """Notes that code uses an old object that changes with each use.

        Raises Consumed unless that code runs as it is.
        """
        if id(value) not in self._old:
            return
        if is_random_generator(value) and id(value) not in self._random:
            self._random[id(value)] = value, random_state(value)
        if self._consumers is None or self._consumers.may_use(value, site.frame):
            return
        key = self._origin.get(id(value))
        place = None if key is None else self._noted[key].place
        raise Consumed(value, place, site.label, site.where, site.frame)

    def mutate(self, container: Any, site: Site) -> None:
        """Notes that an old container is about to change."""
        if id(container) in self._old:
            if id(container) not in self._contents:
                self._contents[id(container)] = container, content_of(container)
            self._note_write(id(container), None, site)

    def remember_tensor(self, tensor: Tensor) -> None:
        """Keeps the values of a tensor that lived before the recording, which may write into it in place."""
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor, tensor._version, tensor.detach().clone()

    def log(self, expression: str) -> None:
        """Notes that what an expression has read was only put into a container, and not computed with."""
        key = self._last_read.get(expression)
        if key in self._noted:
            self._noted[key].times -= 1

    def _note_write(
        self, key: Key | int, place: Place | None, site: Site, *, is_update: bool = False
    ) -> None:
        write = self._writes.setdefault((key, site.frame), Write(site, place))
        write.times += 1
        write.updates += is_update

    def write_count(self) -> int:
        """Returns how often something was written."""
        return sum(write.times for write in self._writes.values())

    def writers(self) -> set[str]:
        """Returns the modules (or the loss) whose code has written."""
        return {write.site.frame for write in self._writes.values()}

    def writes_elsewhere(self) -> list[Write]:
        """Returns what was written into objects that are no modules of the model, nor their containers."""
        own = self._own_tables()
        for key, (place, before, site, times) in self._contexts.items():
            if LOOK_UP["context"](place.holder, None) is not before:
                self._writes[key, site.frame] = Write(site, place, times=times)
        writes = ((key, write) for (key, _), write in self._writes.items())
        return [self._judged(key, write) for key, write in writes if not self._is_in(own, key)]

    def writes_of(self, module: nn.Module, name: str) -> list[Write]:
        """Returns the writes of `module.name`, and of what it holds."""
        keys = {("item", id(table), name) for table in self._tables_of(module)}
        return [w for (key, _), w in self._writes.items() if key in keys or self._origin_of(key) in keys]

    def has_read(self, module: nn.Module, name: str, frame: str) -> bool:
        """Returns whether the code of one module has read `module.name`."""
        keys: list[Key] = [("item", id(table), name) for table in self._tables_of(module)]
        noted = (self._noted[key].frames for key in keys if key in self._noted)
        read = (self._readers_of(key) for key in keys)
        return any(frame in frames for frames in (*noted, *read))

    def _tables_of(self, module: nn.Module) -> list[Any]:
        return [instance_dict(module), *(vars(module)[key] for key in _WEIGHT_TABLES)]

    def _origin_of(self, key: Key | int) -> Key | None:
        """Returns the place of the container that was written or changed."""
        return self._origin.get(key if isinstance(key, int) else key[1])

    def uses_what_it_writes(self, module: nn.Module, name: str) -> bool:
        """Returns whether code reads `module.name` for more than `+= 1`, or looks into it, and writes it."""
        key: Key = ("item", id(instance_dict(module)), name)
        writes = [(k, w) for (k, _), w in self._writes.items() if k == key or self._origin_of(k) == key]
        return any(self._judged(k, write).is_used for k, write in writes)

    def _own_tables(self) -> set[int]:
        own = {id(instance_dict(module)) for module in self._modules.values()}
        tables = (*_WEIGHT_TABLES, "_modules")
        return own | {id(vars(m)[key]) for m in self._modules.values() for key in tables}

    def _is_in(self, own: set[int], key: Key | int) -> bool:
        """Returns whether a place is in one of these tables, or a container is an attribute there."""
        if not isinstance(key, int):
            return key[1] in own
        if key in own:
            return True
        origin = self._origin.get(key)
        return origin is not None and origin[1] in own

    def _judged(self, key: Key | int, write: Write) -> Write:
        """Says whether the value is used: read more often, or elsewhere, than by `+= 1` and the like; and by
        whom.
        """
        write.readers = frozenset(self._readers_of(key))
        if isinstance(key, int):
            origin = self._origin.get(key)
            looked_into = origin is not None and origin in self._noted and self._noted[origin].content
            write.is_used = looked_into or any(n.place.holder is self._old[key] for n in self._noted.values())
        elif key in self._noted:
            noted = self._noted[key]
            write.is_used = noted.times > write.updates or noted.site.where != write.site.where
        return write

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
            name, steps = self._base.get(id(access.owner), (None, ()))
            if name is None or not (name == block or name.startswith(f"{block}.")):
                continue
            owner: Any = self._modules[copy + name[len(block) :]]
            site = Site(access.site.label, access.site.where, copy + access.site.frame[len(block) :])
            for step in (*steps, access.step):
                owner = self._take(owner, step, site)

    def _take(self, owner: Any, step: Step, site: Site) -> Any:
        kind, key = step
        if owner is UNKNOWN or not self.is_old(owner):
            return UNKNOWN
        if kind == _ATTRIBUTE:
            return self.attribute(owner, key, site)
        if kind == _ITEM:
            return self.item(owner, key, site)
        self.content(owner, site)
        return UNKNOWN

    # -- results -----------------------------------------------------------------------------------

    def undo(self) -> None:
        """Gives objects that are no modules of the model the values back that the recording overwrote."""
        own = self._own_tables()
        for generator, state in self._random.values():
            set_random_state(generator, state)
        for place, before in self._before.values():
            if id(place.holder) not in own:
                put_back(place, before)
        for tensor, version, values in self._tensors.values():
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(values)
        for container, content in self._contents.values():
            if isinstance(container, np.ndarray):
                container[...] = content
            elif isinstance(container, deque):
                container.clear()
                container.extend(content)
            elif isinstance(container, bytearray | array.array):
                container[:] = content
            else:
                refill(container, content)

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
            if key in self._before or is_weight or not self._is_stable(place):
                continue
            if all(_is_below(frame, live) for frame in noted.frames):
                continue
            parent = self._origin.get(id(place.holder)) if is_container(place.holder) else None
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
                    content=noted.content and id(value) not in self._contents,
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
                key = self._origin[id(noted.place.holder)]
                if key is not None:
                    self._noted[key].content = True

    def _is_stable(self, place: Place) -> bool:
        """Returns whether the holder is still where it was read from."""
        key = self._origin.get(id(place.holder))
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


def _key(place: Place) -> Key:
    return place.kind, id(place.holder), place.key


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


def _is_same(value: Any, before: Any) -> bool:
    """Returns whether code that reads a value cannot tell it from the one before."""
    return value is before or (isinstance(value, PLAIN) and type(value) is type(before) and value == before)


def _contains(value: Any, wanted: Any, depth: int = DEPTH) -> bool:
    if value is wanted:
        return True
    return depth > 0 and is_container(value) and any(_contains(p, wanted, depth - 1) for p in parts_of(value))
