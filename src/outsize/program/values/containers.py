"""Reads and changes the items of lists, dicts and sets whatever their class says about it.

A frozen configuration is a dict whose class refuses `update` and `pop`. What it must hold again after a
recording is written by the methods of the built-in type below the class, which its hooks and checks do not
see. OrderedDict has an order of its own beside dict's, so its own methods are needed. They are read in the
same way: a list whose class yields other items than it holds would be filled with those.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_BUILTIN: Final = (OrderedDict, dict, list, tuple, set, frozenset, deque)


def refill(container: Any, items: Mapping[Any, Any] | Iterable[Any]) -> None:
    """Gives a list, a dict, a set or a deque these items in place of its own."""
    base = builtin_type(container)
    if isinstance(items, Mapping):
        base.clear(container)
        for key, value in items.items():
            base.__setitem__(container, key, value)
    elif base is set:
        set.clear(container)
        set.update(container, items)
    elif base is deque:
        deque.clear(container)
        deque.extend(container, items)
    else:
        list.__setitem__(container, slice(None), list(items))


def items_of(table: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Returns the keys and values that a dict holds, in their order."""
    return builtin_type(table).items(table)


def elements_of(container: Any) -> Iterator[Any]:
    """Returns an iterator over what a list, tuple, set or deque holds, or over the keys of a dict."""
    return builtin_type(container).__iter__(container)


def content_of(container: Any) -> Any:
    """Returns what a container holds, as a plain dict, list or set; other containers are copied."""
    if isinstance(container, dict):
        return dict(items_of(container))
    kind = next((kind for kind in (list, set) if isinstance(container, kind)), None)
    return copy.copy(container) if kind is None else kind(elements_of(container))


def builtin_type(container: Any) -> Any:
    """Returns the built-in type whose methods read and change a container of this class."""
    own = type(container)
    if own in _BUILTIN:  # As nearly all are: a recording asks for each table of each module.
        return own
    return next((kind for kind in _BUILTIN if isinstance(container, kind)), own)
