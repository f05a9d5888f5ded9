"""Notes what is read and written of the values on a shadow stack, with the line of the user's code."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, final

from torch import Tensor

from outsize.capture.guards.consumed import is_consumed
from outsize.capture.guards.lookup import UNKNOWN, Place, table_of
from outsize.capture.guards.noted import Key, Site
from outsize.capture.guards.notes import Notes
from outsize.capture.guards.trace.shadow_stack import (
    MadeOf,
    NewIterator,
    StackEntry,
    is_known,
    keys_in,
    unproxied,
)
from outsize.capture.guards.values import is_container, parts_of


@final
class EntryReads:
    """Fills notes by what instructions do with entries of shadow stacks."""

    def __init__(self, notes: Notes, frame_of: Callable[[], str]) -> None:
        """`frame_of` names the module whose code runs."""
        self.notes, self._frame_of = notes, frame_of

    def site(self, frame: FrameType, text: str) -> Site:
        """Returns the place of a read of this expression in a frame."""
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return Site(text, where, self._frame_of())

    def look_into(self, frame: FrameType, entries: list[StackEntry]) -> None:
        """Notes the content of those that are containers."""
        for value, text in entries:
            if value is not UNKNOWN and is_container(value) and self.notes.old.has(value):
                self.notes.content(value, self.site(frame, text))

    def use(self, frame: FrameType, entries: list[StackEntry]) -> None:
        """Notes that code which is not traced uses these values. Raises Consumed."""
        for value, text in entries:
            if value is UNKNOWN or not self.notes.old.has(value):
                continue
            if is_consumed(value):
                self.notes.use(value, self.site(frame, text))

    def hand_over(self, frame: FrameType, entries: list[StackEntry]) -> None:
        """Notes what code that is not traced may see of its arguments, and of what containers hold."""
        for value, text in entries:
            if value is UNKNOWN or not self.notes.old.has(value):
                continue
            parts = parts_of(value) if is_container(value) else [value]
            self.use(frame, [StackEntry(part, text) for part in parts])
            for part in parts:
                self.notes.attributes(part, self.site(frame, text))

    def iterator_over(self, frame: FrameType, entry: StackEntry) -> Any:
        """Returns what is known of `iter(entry)`, and notes the content that it goes through."""
        value = unproxied(entry.value)
        if value is UNKNOWN or not self.notes.old.has(entry.value):
            return UNKNOWN
        if is_container(value):
            self.look_into(frame, [entry])
            return NewIterator(value)
        return value if is_consumed(value) else UNKNOWN

    def made_of(self, entries: list[StackEntry]) -> Any:
        """Returns what a result was made of, where that are reads."""
        keys: set[Key | None] = set()
        for value, text in entries:
            if isinstance(value, MadeOf):
                keys |= value.keys
            elif value is not UNKNOWN:
                keys.add(self.notes.key_of(text))
        keys.discard(None)
        return MadeOf(frozenset(keys)) if keys else UNKNOWN

    def set_attribute(self, frame: FrameType, owner: StackEntry, name: str, value: Any) -> None:
        """Notes that an attribute gets a value; UNKNOWN where it is deleted."""
        holder = owner.value
        if holder is not UNKNOWN and not isinstance(holder, Tensor) and self.notes.old.has(holder):
            site = self.site(frame, f"{owner.text}.{name}")
            self.notes.writes.write(table_of(holder, name), value, site, keys_in(value))

    def set_item(self, frame: FrameType, owner: StackEntry, key: Any, value: Any) -> None:
        """Notes that an item of a container gets a value; UNKNOWN where it is deleted."""
        holder = owner.value
        if holder is UNKNOWN or not is_container(holder) or not self.notes.old.has(holder):
            return
        site = self.site(frame, f"{owner.text}[...]")
        if isinstance(holder, dict) and is_known(key):
            self.notes.writes.write(Place("item", holder, key), value, site, keys_in(value))
        else:
            self.notes.writes.mutate(holder, site)
