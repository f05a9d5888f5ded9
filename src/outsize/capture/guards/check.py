"""Problem: tell before each step whether a recorded program is still valid, in the time of a few kernels.

    fast    nothing was set in the dicts, or what was set is the very same object
    slow    each value compared by type and value, containers by content    only where the fast pass fails

A new object that is equal is adopted, so that the next check is fast again.
Source: the two-level checks of torch._dynamo's guards (identity first, then value).
Deviations: arrays are compared by their bytes in the fast pass, in Python; they are few.
Complexity: O(dicts that were read from) at C speed, about 45 ns a dict.
Oracle: tests/unit/capture/guards/test_read_guards.py.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter, is_
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple, final

from outsize.capture.guards.dict_versions import DictVersions
from outsize.capture.guards.values import (
    BUFFERS,
    frozen,
    is_container,
    is_same_tensor_kind,
    parts_of,
    snapshot_of,
)
from outsize.program.objects import ABSENT
from outsize.program.python_reads import LOOK_UP, NumberDecision, PythonRead, ValuePlace
from outsize.program.values.containers import elements_of


@final
class ChangedRead(NamedTuple):
    """A read whose value is another one now, or on whose value another decision falls; `read.value` has the
    content that a container had, or the value of a class attribute that an object had none of its own for.
    """

    read: PythonRead
    value: Any
    place: ValuePlace


@final
class ReadGuards:
    """The values that one program depends on."""

    def __init__(self, reads: Sequence[PythonRead], decisions: Sequence[NumberDecision] = ()) -> None:
        self._reads, self._decisions = reads, decisions
        self._holders = [read.holder for read in reads]
        self._values = [read.value for read in reads]
        self._frozen = [_frozen(read, read.value) for read in reads]
        self._shown = [_shown(read) for read in reads]
        self._compile()

    def hold(self) -> bool:
        """Returns whether everything that was read is as it was."""
        return (self._is_identical() or self._is_equal()) and all(d.holds() for d in self._decisions)

    def changed(self) -> list[ChangedRead]:
        """Returns the reads that have another value now, or on which another decision falls."""
        _, values = self._now()
        fallen = (decision for decision in self._decisions if not decision.holds())
        numbers = (place for decision in fallen for place in decision.number.places())
        decided = {place.identity() for place in numbers if isinstance(place, ValuePlace)}
        places = places_of(self._reads)
        return [
            ChangedRead(replace(read, value=self._shown[n]), value, place)
            for n, (read, value, place) in enumerate(zip(self._reads, values, places, strict=True))
            if not self._is_same(n, value) or (read.is_input and place.identity() in decided)
        ]

    def values(self) -> list[tuple[PythonRead, Any]]:
        """Returns each read with the value for which the program runs: an input's value of now."""
        rows = zip(self._reads, self._holders, self._values, strict=True)
        return [(r, LOOK_UP[r.kind](h, r.key) if r.is_input else value) for r, h, value in rows]

    # -- fast --------------------------------------------------------------------------------------

    def _compile(self) -> None:
        every = list(zip(self._reads, self._holders, self._values, strict=True))
        self._inputs = [(LOOK_UP[r.kind], h, r.key, type(v)) for r, h, v in every if r.is_input]
        rows = [row for row in every if not row[0].is_input]
        self._items = DictItems((h, r.key, v) for r, h, v in rows if r.kind == "item")
        self._classes = _columns((h.__dict__, r.key, v) for r, h, v in rows if r.kind == "class")
        attributes = [(h, r.key, v) for r, h, v in rows if r.kind == "attribute"]
        self._attributes = _columns(row for row in attributes if not isinstance(row[0], FunctionType))
        self._functions = _by_key(row for row in attributes if isinstance(row[0], FunctionType))
        self._others = [
            (LOOK_UP[r.kind], h, r.key, v) for r, h, v in rows if r.kind not in ("item", "class", "attribute")
        ]
        containers: dict[int, Any] = {}
        for read, _, value in rows:
            if read.content:
                _collect(value, containers)
        self._contents = Contents(containers.values())

    def _is_identical(self) -> bool:
        return (
            self._items.are_same()
            and _is_same(MappingProxyType.get, self._classes)
            and _is_same(getattr, self._attributes)
            and all(all(map(is_, map(getter, of), values)) for getter, of, values in self._functions)
            and all(look_up(holder, key) is value for look_up, holder, key, value in self._others)
            and all(type(look_up(holder, key)) is kind for look_up, holder, key, kind in self._inputs)
            and self._contents.are_same()
        )

    # -- slow --------------------------------------------------------------------------------------

    def _is_equal(self) -> bool:
        holders, values = self._now()
        if not all(self._is_same(number, value) for number, value in enumerate(values)):
            return False
        self._holders, self._values = holders, values
        self._compile()
        return True

    def _now(self) -> tuple[list[Any], list[Any]]:
        """Returns where each read looks now, and what it finds there."""
        holders, values = list[Any](), list[Any]()
        for read in self._reads:
            holder = read.holder if read.parent is None else values[read.parent]
            fits = read.parent is None or type(holder) is type(read.holder)
            holders.append(holder)
            values.append(LOOK_UP[read.kind](holder, read.key) if fits else ABSENT)
        return holders, values

    def _is_same(self, number: int, value: Any) -> bool:
        read, before = self._reads[number], self._values[number]
        if value is before and not read.content:
            return True
        if read.is_input:
            return type(value) is type(before)
        if read.is_live:
            return is_same_tensor_kind(before, value)
        return bool(_frozen(read, value) == self._frozen[number])


def places_of(reads: Sequence[PythonRead]) -> list[ValuePlace]:
    """Returns where the value of each read is."""
    places: list[ValuePlace] = []
    for read in reads:
        parent = None if read.parent is None else places[read.parent]
        places.append(ValuePlace(read.kind, read.holder, read.key, parent, read.label))
    return places


def _shown(read: PythonRead) -> Any:
    """Returns what the user takes for the value that was read."""
    if read.value is ABSENT:
        return read.instead
    return snapshot_of(read.value) if read.content else read.value


def _frozen(read: PythonRead, value: Any) -> Any:
    """Returns what is compared: of a container that code did not look into, its type."""
    if is_container(value) and not read.content:
        return type(value)
    return frozen(value) if read.content else frozen(value, 0)


_Columns = tuple[list[Any], list[Any], list[Any], list[Any]]


def _columns(rows: Iterable[tuple[Any, Any, Any]]) -> _Columns:
    """Returns holders, keys, ABSENT for each, and values."""
    listed = list(rows)
    holders, keys, values = ([row[n] for row in listed] for n in range(3))
    return holders, keys, [ABSENT] * len(listed), values


def _by_key(rows: Iterable[tuple[Any, str, Any]]) -> list[tuple[Callable[[Any], Any], list[Any], list[Any]]]:
    """Returns a getter, holders and values for each attribute that every holder has."""
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for holder, key, value in rows:
        holders, values = found.setdefault(key, ([], []))
        holders.append(holder)
        values.append(value)
    return [(attrgetter(key), *columns) for key, columns in found.items()]


def _is_same(look_up: Callable[..., Any], columns: _Columns) -> bool:
    """Returns whether each look-up gives the very same object."""
    holders, keys, absents, values = columns
    return all(map(is_, map(look_up, holders, keys, absents), values))


def _collect(value: Any, containers: dict[int, Any]) -> None:
    """Collects the containers below a value that may change in place."""
    if not is_container(value) or id(value) in containers:
        return
    containers[id(value)] = value
    for part in parts_of(value):
        _collect(part, containers)


@final
class DictItems:
    """Items of dicts, compared by identity where something was set in their dict."""

    def __init__(self, rows: Iterable[tuple[dict[Any, Any], Any, Any]]) -> None:
        self._rows: dict[int, list[tuple[dict[Any, Any], Any, Any]]] = {}
        for row in rows:
            self._rows.setdefault(id(row[0]), []).append(row)
        self._versions = DictVersions(of_one[0][0] for of_one in self._rows.values())

    def are_same(self) -> bool:
        """Returns whether each key still has the very same object."""
        written = self._versions.written()
        if not written:
            return True
        rows = chain.from_iterable(self._rows[id(each)] for each in written)
        if not all(dict.get(each, key, ABSENT) is value for each, key, value in rows):
            return False
        self._versions.renew()
        return True


@final
class WholeDicts:
    """All items of dicts, compared by identity where something was set in their dict."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self._before = {id(each): (each, parts_of(each)) for each in dicts}
        every = [each for each, _ in self._before.values()]
        self._versions = DictVersions(each for each in every if not isinstance(each, OrderedDict))
        # To move an item to the end sets nothing.
        self._ordered = [each for each in every if isinstance(each, OrderedDict)]

    def are_same(self) -> bool:
        """Returns whether each dict has the same keys in the same order, each with the very same object."""
        written = self._versions.written()
        if not all(self._is_same(each) for each in chain(self._ordered, written)):
            return False
        if written:
            self._versions.renew()
        return True

    def _is_same(self, now: dict[Any, Any]) -> bool:
        before = self._before[id(now)][1]
        return 2 * len(now) == len(before) and all(map(is_, parts_of(now), before))


@final
class Contents:
    """The parts of containers, compared by identity in one pass over all of a kind."""

    def __init__(self, containers: Iterable[Any]) -> None:
        listed = list(containers)
        self._arrays = [(c, frozen(c)) for c in listed if isinstance(c, BUFFERS)]
        self._dicts = WholeDicts(c for c in listed if isinstance(c, dict))
        # What a tuple holds cannot be set; containers in it are here themselves.
        others = (c for c in listed if not isinstance(c, (*BUFFERS, dict, tuple, frozenset)))
        self._lists = [parts_of(c) if isinstance(c, functools.partial) else c for c in others]
        self._parts = list(self._parts_now())

    def are_same(self) -> bool:
        """Returns whether every container holds the very same objects."""
        if not self._dicts.are_same():
            return False
        now = list(self._parts_now())
        if len(now) != len(self._parts) or not all(map(is_, now, self._parts)):
            return False
        return all(bool(frozen(array) == before) for array, before in self._arrays)

    def _parts_now(self) -> Iterator[Any]:
        """Yields the items of each container, and a mark behind them."""
        for each in self._lists:
            yield from elements_of(each)
            yield ABSENT
