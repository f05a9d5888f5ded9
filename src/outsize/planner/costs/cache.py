"""Holds prices that were computed, so that each is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, cast, final

Key = tuple[object, ...]
"""Begins with the name of a question; what else the answer depends on follows."""
Price = TypeVar("Price")
_MISSING: Final = object()


@final
class Cache:
    """Maps keys to what was made under them; one search has one cache, and what it holds goes with it.

    A price never holds what holds the cache: a cycle would keep its arrays until Python looks for cycles.
    """

    def __init__(self) -> None:
        self._made: dict[Key, object] = {}

    def once(self, key: Key, make: Callable[[], Price]) -> Price:
        """Returns what was made under this key; the first call makes it."""
        # None is an answer too (no groups of that size), so another mark says that nothing was made.
        made = self._made.get(key, _MISSING)
        if made is _MISSING:
            made = self._made[key] = make()
        return cast(Price, made)
