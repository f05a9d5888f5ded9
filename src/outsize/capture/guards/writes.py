"""Notes what a recording writes into objects that lived before it, and takes it back.

    self.cfg.rate = 2       a place has another value: the one from before is kept
    self.seen.append(x)     a container changes: a copy of its content is kept
    buffer.add_(1)          a tensor changes: a copy is kept, where it is real
    variable.set(x)         a context variable; what counts is whether it stays so
    generator.random()      a generator draws: its state is kept

A write matters where its value is used again: read more often, or elsewhere, than by `+= 1` and the like.
Then the next call sees another value than this one, and a recording does not hold for it.
"""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from outsize.capture.guards.consumed import random_state, set_random_state
from outsize.capture.guards.lookup import Place, instance_dict, put_back
from outsize.capture.guards.noted import Key, NotedRead, OldObjects, Site, key_of
from outsize.capture.guards.values import PLAIN
from outsize.program.python_reads import LOOK_UP
from outsize.program.values.containers import content_of, refill

_WEIGHT_TABLES: Final = ("_parameters", "_buffers")


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
class Writes:
    """The writes of one recording into old objects; `noted` are its reads, which say whether one is used."""

    def __init__(
        self, modules: Mapping[str, nn.Module], old: OldObjects, noted: Mapping[Key, NotedRead]
    ) -> None:
        self._modules, self._old, self._noted = modules, old, noted
        self._writes: dict[tuple[Key | int, str], Write] = {}
        self._readers: dict[Key | int, dict[str, int]] = {}  # Who has read what was written, and how often.
        self._before: dict[Key, tuple[Place, Any]] = {}  # What the recording has overwritten.
        self._contents: dict[int, tuple[Any, Any]] = {}  # Containers that it has changed, and copies.
        self._tensors: dict[int, tuple[Tensor, int, Tensor]] = {}  # With their versions and copies.
        self._contexts: dict[Key, tuple[Place, Any, Site, int]] = {}  # Context variables that were set.
        self._random: dict[int, tuple[Any, Any]] = {}  # Generators of random numbers, and their states.

    def is_overwritten(self, key: Key) -> bool:
        """Returns whether the recording has given this place another value."""
        return key in self._before

    def is_restored(self, key: Key, value: Any) -> bool:
        """Returns whether an overwritten place has its value from before again."""
        return _is_same(value, self._before[key][1])

    def is_changed(self, container: Any) -> bool:
        """Returns whether the recording has changed a container."""
        return id(container) in self._contents

    def overwritten(self) -> list[tuple[Key, Place]]:
        """Returns the places that have got other values."""
        return [(key, place) for key, (place, _) in self._before.items()]

    def count_reader(self, key: Key | int, frame: str, by: int = 1) -> None:
        """Counts a read of what was written, by the code of a module."""
        readers = self._readers.setdefault(key, {})
        readers[frame] = readers.get(frame, 0) + by

    def _readers_of(self, key: Key | int) -> list[str]:
        """Returns the modules whose code has read what was written for more than `+=`."""
        return [frame for frame, times in self._readers.get(key, {}).items() if times > 0]

    def write(
        self, place: Place | None, value: Any, site: Site, made_of: Collection[Key | None] = ()
    ) -> None:
        """Notes that a place of an old object is about to get another value, which was `made_of` these reads
        alone and went nowhere else.
        """
        if place is None:
            return
        key = key_of(place)
        before = LOOK_UP[place.kind](place.holder, place.key)
        if before is not value:
            if key in made_of and key in self._before and not _is_same(before, self._before[key][1]):
                self.count_reader(key, site.frame, -1)  # It has read what others wrote for `+=` alone.
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

    def mutate(self, container: Any, site: Site) -> None:
        """Notes that an old container is about to change."""
        if self._old.is_noted(container):
            if id(container) not in self._contents:
                self._contents[id(container)] = container, content_of(container)
            self._note_write(id(container), None, site)

    def remember_tensor(self, tensor: Tensor) -> None:
        """Keeps the values of a tensor that lived before the recording, which may write into it in place."""
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor, tensor._version, tensor.detach().clone()

    def remember_generator(self, generator: Any) -> None:
        """Keeps the state of a generator of random numbers that recorded code draws from."""
        if id(generator) not in self._random:
            self._random[id(generator)] = generator, random_state(generator)

    def readers_of(self, module: nn.Module, name: str) -> set[str]:
        """Returns the modules whose code has read `module.name` after a write."""
        keys: list[Key] = [("item", id(table), name) for table in tables_of(module)]
        return {frame for key in keys for frame in self._readers_of(key)}

    def _note_write(
        self, key: Key | int, place: Place | None, site: Site, *, is_update: bool = False
    ) -> None:
        write = self._writes.setdefault((key, site.frame), Write(site, place))
        write.times += 1
        write.updates += is_update

    def count(self, apart: Collection[str] = ()) -> int:
        """Returns how often something was written by the code of other modules than those `apart`."""
        return sum(write.times for write in self._writes.values() if write.site.frame not in apart)

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
        keys = {("item", id(table), name) for table in tables_of(module)}
        return [w for (key, _), w in self._writes.items() if key in keys or self._origin_of(key) in keys]

    def _origin_of(self, key: Key | int) -> Key | None:
        """Returns the place of the container that was written or changed."""
        return self._old.origin(key if isinstance(key, int) else key[1])

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
        origin = self._old.origin(key)
        return origin is not None and origin[1] in own

    def _judged(self, key: Key | int, write: Write) -> Write:
        """Says whether the value is used: read more often, or elsewhere, than by `+= 1` and the like; and by
        whom.
        """
        write.readers = frozenset(self._readers_of(key))
        if isinstance(key, int):
            origin = self._old.origin(key)
            looked_into = origin is not None and origin in self._noted and self._noted[origin].content
            write.is_used = looked_into or any(
                n.place.holder is self._old.of_id(key) for n in self._noted.values()
            )
        elif key in self._noted:
            noted = self._noted[key]
            write.is_used = noted.times > write.updates or noted.site.where != write.site.where
        return write

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


def tables_of(module: nn.Module) -> list[Any]:
    """Returns the dicts in which a module has its attributes."""
    return [instance_dict(module), *(vars(module)[key] for key in _WEIGHT_TABLES)]


def _is_same(value: Any, before: Any) -> bool:
    """Returns whether code that reads a value cannot tell it from the one before."""
    return value is before or (isinstance(value, PLAIN) and type(value) is type(before) and value == before)
