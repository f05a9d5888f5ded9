"""Finds where an attribute is without running the user's code: instance dict, tables of modules, MRO, slots.

Descriptors written in Python (properties, `__getattr__`) run as frames of their own and are traced there.
"""

from __future__ import annotations

import functools
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, Final, NamedTuple, final

from torch import nn

from outsize.program.objects import ABSENT
from outsize.program.python_reads import ReadKind
from outsize.program.source_line import is_outsize_file

UNKNOWN: Final = object()  # A value that the trace does not know.
_TABLES: Final = ("_parameters", "_buffers", "_modules")
_PLAIN_LOOKUPS: Final = (object.__getattribute__, type.__getattribute__, super.__getattribute__)


@final
class Method(NamedTuple):
    """A function that was found on a class, bound to the object on which it was looked up."""

    function: Any
    owner: Any


@final
class Place(NamedTuple):
    """A place that a look-up has visited."""

    kind: ReadKind
    holder: Any
    key: Any


@final
class AttributeLookup(NamedTuple):
    """The value of an attribute, and the places on which it depends."""

    value: Any
    places: tuple[Place, ...] = ()


_FieldOfTuple: Final = type(vars(AttributeLookup)["value"])  # The descriptor of a named tuple's field.


def find_attribute(owner: Any, name: str) -> AttributeLookup:
    """Returns what `owner.name` is; UNKNOWN where Python code of the user computes it."""
    if isinstance(owner, ModuleType):
        table = vars(owner)
        return (
            AttributeLookup(table[name], (Place("item", table, name),))
            if name in table
            else AttributeLookup(UNKNOWN)
        )
    if isinstance(owner, type):
        return _of_class(owner, name)
    return _of_instance(owner, name)


def table_of(owner: Any, name: str) -> Place | None:
    """Returns where `owner.name = value` is stored, if that is a dict or a slot."""
    table = instance_dict(owner)
    if isinstance(owner, nn.Module) and table is not None:
        for key in _TABLES:
            if name in table.get(key, ()):
                return Place("item", table[key], name)
    raw = _on_class(type(owner), name)[1]
    if isinstance(raw, MemberDescriptorType):
        return Place("attribute", owner, name)
    if isinstance(owner, type):
        return Place("class", owner, name)
    return None if table is None else Place("item", table, name)


def put_back(place: Place, before: Any) -> None:
    """Gives a place a value that it had; ABSENT removes the key."""
    kind, holder, key = place
    if kind in ("attribute", "class"):
        if before is ABSENT:
            delattr(holder, key)
        else:
            setattr(holder, key, before)
    elif kind == "cell":
        if before is not ABSENT:
            holder.cell_contents = before
    elif kind == "context":
        if before is not ABSENT and holder.get(ABSENT) is not before:
            holder.set(before)
    elif before is ABSENT:
        dict.pop(holder, key, None)
    else:
        holder[key] = before


def instance_dict(owner: Any) -> dict[str, Any] | None:
    """Returns the dict of an object's attributes, past a `__getattribute__` of its class."""
    try:
        table = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return table if isinstance(table, dict) else None


def _of_class(owner: type, name: str) -> AttributeLookup:
    holder, raw = _on_class(owner, name)
    if raw is ABSENT or holder is object:
        return AttributeLookup(UNKNOWN)
    places = (Place("class", holder, name),)
    if isinstance(raw, staticmethod):
        return AttributeLookup(raw.__func__, places)
    if isinstance(raw, classmethod):
        return AttributeLookup(Method(raw.__func__, owner), places)
    return AttributeLookup(UNKNOWN if hasattr(type(raw), "__get__") and not callable(raw) else raw, places)


def _of_instance(owner: Any, name: str) -> AttributeLookup:
    table, kind = instance_dict(owner), type(owner)
    holder, raw = _on_class(kind, name)
    if raw is not ABSENT and hasattr(type(raw), "__set__"):
        return _of_data_descriptor(owner, name, raw, table)
    if table is not None and name in table:
        return AttributeLookup(table[name], (Place("item", table, name),))
    if isinstance(owner, nn.Module) and table is not None and raw is ABSENT:
        for key in _TABLES:
            if name in table.get(key, ()):
                return AttributeLookup(table[key][name], (Place("item", table[key], name),))
    return _of_class_attribute(owner, name, table, (holder, raw))


def _by_getattr(owner: Any, name: str) -> AttributeLookup:
    value = getattr(owner, name, ABSENT)
    return AttributeLookup(UNKNOWN if value is ABSENT else value, (Place("attribute", owner, name),))


def _of_data_descriptor(owner: Any, name: str, raw: Any, table: dict[str, Any] | None) -> AttributeLookup:
    if isinstance(raw, (MemberDescriptorType, _FieldOfTuple)):
        return _by_getattr(owner, name)
    if isinstance(raw, GetSetDescriptorType) and name == "__dict__" and table is not None:
        return AttributeLookup(table)
    return AttributeLookup(UNKNOWN)


def _of_class_attribute(owner: Any, name: str, table: dict[str, Any] | None, found: Any) -> AttributeLookup:
    holder, raw = found
    absent = () if table is None else (Place("item", table, name),)
    if raw is ABSENT and _has_own_getattribute(type(owner)):
        return _by_getattr(owner, name)  # It may look under another name, or in another table.
    if raw is ABSENT:
        classes = (Place("class", each, name) for each in type(owner).__mro__ if each is not object)
        return AttributeLookup(UNKNOWN, (*absent, *classes))
    if isinstance(raw, functools.cached_property) or holder is object or holder is nn.Module:
        return AttributeLookup(UNKNOWN)
    places = (*absent, Place("class", holder, name))
    if isinstance(raw, FunctionType):
        return AttributeLookup(Method(raw, owner), places)
    if isinstance(raw, classmethod):
        return AttributeLookup(Method(raw.__func__, type(owner)), places)
    if isinstance(raw, staticmethod):
        return AttributeLookup(raw.__func__, places)
    return AttributeLookup(UNKNOWN if hasattr(type(raw), "__get__") else raw, places)


def _on_class(kind: type, name: str) -> tuple[Any, Any]:
    """Returns the class of the MRO that has the name, and the raw entry."""
    for each in kind.__mro__:
        if name in each.__dict__:
            return each, each.__dict__[name]
    return None, ABSENT


def _has_own_getattribute(kind: type) -> bool:
    """Returns whether a class looks attributes up in its own way: one of the user's, or threading.local."""
    raw = _on_class(kind, "__getattribute__")[1]
    if isinstance(raw, FunctionType):
        return not is_outsize_file(raw.__code__.co_filename)
    return raw not in _PLAIN_LOOKUPS
