"""Keeps which objects lived before a recording, and what its code has read of them.

    model ── self.cfg ──▸ object ── .rates ──▸ list        "old": reached by noted reads from a root

An object is old when it is a root (a module of the model, the loss, the globals of a file, a class) or was
read from an old one. Each is kept alive, so that its id stays its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, final

from torch import Tensor, nn

from outsize.capture.guards.lookup import Place
from outsize.capture.guards.values import PLAIN
from outsize.program.objects import ABSENT

Key = tuple[str, int, Any]  # kind, id of the holder, key
Step = tuple[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Site:
    """Where in the user's code something is read."""

    label: str
    where: str
    frame: str


@final
@dataclass(slots=True)
class NotedRead:
    """One place that recorded code has read: which modules did, and how often for more than `+=`."""

    place: Place
    site: Site
    content: bool = False
    frames: set[str] = field(default_factory=set[str])
    times: int = 0
    instead: Any = ABSENT  # What the look-up has found behind a place that has nothing: of the class.

    def add(self, frame: str) -> None:
        """Notes that the code of a module has read it while it had the value from before the recording."""
        self.frames.add(frame)

    def look_into(self, frame: str) -> None:
        """Notes that code has looked into the container in this place."""
        self.frames.add(frame)
        self.content = True

    def compare_content(self) -> None:
        """Notes that the container in this place is compared as a whole."""
        self.content = True

    def count(self, by: int = 1) -> None:
        """Counts a read, or takes back one that computes nothing."""
        self.times += by

    def found_instead(self, value: Any) -> None:
        """Notes what the look-up has found behind a place that has nothing."""
        self.instead = value


@final
class OldObjects:
    """The objects that lived before a recording, as far as it has come to them, and from where."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._old: dict[int, Any] = {}
        self._origin: dict[int, Key | None] = {}  # The read that led to an old object.
        self._path: dict[int, tuple[str, tuple[Step, ...]]] = {}  # From a module of the model.
        for name, module in reversed(list(modules.items())):
            self.adopt(module, None)
            self._path[id(module)] = name, ()

    def has(self, value: Any) -> bool:
        """Returns whether the object lived before the recording, as far as is known."""
        return id(value) in self._old or isinstance(value, ModuleType | type)

    def is_noted(self, value: Any) -> bool:
        """Returns whether the recording came to this very object; modules of Python and classes are not
        noted.
        """
        return id(value) in self._old

    def every(self) -> list[Any]:
        """Returns all of them."""
        return list(self._old.values())

    def of_id(self, key: int) -> Any:
        """Returns the object with this id."""
        return self._old[key]

    def origin(self, key: int) -> Key | None:
        """Returns the read that led to the object with this id; None for roots, and where it is unknown."""
        return self._origin.get(key)

    def path(self, value: Any) -> tuple[str, tuple[Step, ...]] | None:
        """Returns the steps from a module of the model to an object, where they are known."""
        return self._path.get(id(value))

    def adopt(self, value: Any, key: Key | None) -> None:
        """Notes an object that lived before, and the read that led to it; the first one counts."""
        if value is ABSENT or isinstance(value, (*PLAIN, Tensor, type, ModuleType)):
            return
        if id(value) not in self._old:
            self._old[id(value)] = value
            self._origin[id(value)] = key

    def extend(self, owner: Any, step: Step, value: Any) -> None:
        """Notes that a step leads from one object to another."""
        base = self._path.get(id(owner))
        if base is not None and id(value) in self._old:
            self._path.setdefault(id(value), (base[0], (*base[1], step)))

    def let_follow(self, container: Any, part: Any) -> None:
        """Notes that a module is found in a container, as far as blocks that are copied are concerned."""
        base = self._path.get(id(container))
        if base is not None and isinstance(part, nn.Module):
            self._path.setdefault(id(part), base)


def key_of(place: Place) -> Key:
    """Returns what a place is noted under."""
    return place.kind, id(place.holder), place.key
