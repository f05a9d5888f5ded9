"""Changes the items of lists, dicts and sets whatever their class says about it.

A frozen configuration is a dict whose class refuses `update` and `pop`. What it must hold again after a
recording is written by the methods of the built-in type below the class, which its hooks and checks do not
see. OrderedDict has an order of its own beside dict's, so its own methods are needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any


def refill(container: Any, items: Mapping[Any, Any] | Iterable[Any]) -> None:
    """Gives a list, a dict or a set these items in place of its own."""
    base = builtin_type(container)
    if isinstance(items, Mapping):
        base.clear(container)
        for key, value in items.items():
            base.__setitem__(container, key, value)
    elif base is set:
        set.clear(container)
        set.update(container, items)
    else:
        list.__setitem__(container, slice(None), list(items))


def builtin_type(container: Any) -> Any:
    """Returns the built-in type whose methods change a container of this class."""
    kinds = (OrderedDict, dict, list, set)
    return next((kind for kind in kinds if isinstance(container, kind)), type(container))
