"""Problem: tell before each step whether a recorded program is still valid, in the time of a few kernels.

    fast    all(map(is_, map(dict.get, holders, keys, absents), values))    each value is the very same object
    slow    each value compared by type and value, containers by content    only where the fast pass fails

A new object that is equal is adopted, so that the next check is fast again.
Source: the two-level checks of torch._dynamo's guards (identity first, then value).
Deviations: arrays are compared by their bytes in the fast pass, in Python; they are few.
Complexity: O(reads) at C speed, about 0.1 us a read. Oracle: tests/unit/capture/guards/test_read_guards.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple, final

from torch import nn

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
        decided = {place.identity() for decision in fallen for place in decision.number.places()}
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
        children = [(r, h) for r, h, _ in rows if r.kind == "item" and _is_table_of_modules(h)]
        # Most reads find a submodule: whole tables of them are compared, by identity.
        self._tables = list({id(h): h for _, h in children}.values())
        self._tables_before = [dict(table) for table in self._tables]
        in_tables = {id(r) for r, _ in children}
        items = (row for row in rows if row[0].kind == "item" and id(row[0]) not in in_tables)
        self._items = _columns((h, r.key, v) for r, h, v in items)
        self._classes = _columns((h.__dict__, r.key, v) for r, h, v in rows if r.kind == "class")
        self._attributes = _columns((h, r.key, v) for r, h, v in rows if r.kind == "attribute")
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
            self._tables == self._tables_before
            and _is_same(dict.get, self._items)
            and _is_same(MappingProxyType.get, self._classes)
            and _is_same(getattr, self._attributes)
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


def _is_table_of_modules(holder: dict[Any, Any]) -> bool:
    """Returns whether equality of the dict's values is identity."""
    return all(isinstance(v, nn.Module) and type(v).__eq__ is object.__eq__ for v in holder.values())


_Columns = tuple[list[Any], list[Any], list[Any], list[Any]]


def _columns(rows: Iterable[tuple[Any, Any, Any]]) -> _Columns:
    """Returns holders, keys, ABSENT for each, and values."""
    listed = list(rows)
    holders, keys, values = ([row[n] for row in listed] for n in range(3))
    return holders, keys, [ABSENT] * len(listed), values


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
class Contents:
    """The parts of containers, compared by identity in one pass over all of a kind."""

    def __init__(self, containers: Iterable[Any]) -> None:
        listed = list(containers)
        self._arrays = [(c, frozen(c)) for c in listed if isinstance(c, BUFFERS)]
        self._dicts = [c for c in listed if isinstance(c, dict)]
        others = (c for c in listed if not isinstance(c, (*BUFFERS, dict)))
        self._lists = [parts_of(c) if isinstance(c, functools.partial) else c for c in others]
        self._sizes = list(map(len, self._sized()))
        self._parts = list(self._parts_now())

    def are_same(self) -> bool:
        """Returns whether every container holds the very same objects."""
        if list(map(len, self._sized())) != self._sizes:
            return False
        if not all(map(is_, self._parts_now(), self._parts)):
            return False
        return all(bool(frozen(array) == before) for array, before in self._arrays)

    def _sized(self) -> Iterator[Any]:
        return chain(self._dicts, self._lists)

    def _parts_now(self) -> Iterator[Any]:
        """Yields keys and values of dicts, then the items of the others."""
        keys, values = (chain.from_iterable(map(part, self._dicts)) for part in (dict.keys, dict.values))
        return chain(keys, values, chain.from_iterable(self._lists))
