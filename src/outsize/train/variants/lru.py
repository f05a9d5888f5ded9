"""Defines a cache that drops its least recently used value."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, final

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@final
class LruCache(Generic[Key, Value]):
    """A cache of at most `most` values; the least recently used goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Returns the value, made when it is not in the cache."""
        if key not in self._values:
            self.put(key, make())
        self._values.move_to_end(key)
        return self._values[key]

    def find(self, key: Key) -> Value | None:
        """Returns the value, None where there is none."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Puts a value into the cache, in place of a former one."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)

    def drop(self, is_dropped: Callable[[Key], bool]) -> None:
        """Drops the keys for which `is_dropped` holds."""
        for key in [key for key in self._values if is_dropped(key)]:
            del self._values[key]
