"""Reads and sets the attributes of objects where they are stored: in the instance's dict and in its slots.

Properties, `__getattr__` and a frozen class's `__setattr__` are code of the user's, which is passed by.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any, Final

_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class is made at run time, by Python code for example.


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns what an object stores under which names; nothing for objects of built-in classes."""
    if not type(value).__flags__ & _HEAP_TYPE:
        return {}
    found = dict(_table_of(value) or {})
    for name, slot in _slots_of(type(value)).items():
        with suppress(AttributeError):  # It is empty.
            found[name] = slot.__get__(value)
    return found


def with_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Gives an object these attributes, in place."""
    slots, table = _slots_of(type(value)), _table_of(value)
    for name, part in attributes.items():
        if name in slots:
            slots[name].__set__(value, part)
        elif table is not None:
            table[name] = part


def blank_like(value: Any) -> Any:
    """Returns an object of the same plain class without attributes."""
    return object.__new__(type(value))


@lru_cache(maxsize=1024)
def is_plain_class(kind: type) -> bool:
    """Returns whether objects of a class consist of their attributes: it has no built-in class below it, and
    nothing happens when one of its objects is dropped.
    """
    if not kind.__flags__ & _HEAP_TYPE or hasattr(kind, "__del__"):
        return False
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True


def _table_of(value: Any) -> dict[str, Any] | None:
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if isinstance(table, dict) else None


@lru_cache(maxsize=1024)
def _slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """Returns the slots that the classes of an object declare, those of its own class first."""
    slots: dict[str, MemberDescriptorType] = {}
    for each in kind.__mro__:
        for name, member in vars(each).items() if each.__flags__ & _HEAP_TYPE else ():
            if isinstance(member, MemberDescriptorType):
                slots.setdefault(name, member)
    return slots
