"""Problem: tell before each step whether a recorded program is still valid, in the time of a few kernels.

    fast    all(map(is_, map(dict.get, holders, keys, absents), values))    each value is the very same object
    slow    each value compared by type and value, containers by content    only where the fast pass fails

A new object that is equal is adopted, so that the next check is fast again.
Source: the two-level checks of torch._dynamo's guards (identity first, then value).
Deviations: containers are compared element by element in the fast pass, in Python; they are few.
Complexity: O(reads) at C speed, about 0.1 us a read. Oracle: tests/unit/capture/guards/test_read_guards.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple, final

import numpy as np

from outsize.capture.guards.values import (
    frozen,
    is_container,
    is_same_tensor_kind,
    parts_of,
)
from outsize.program.objects import ABSENT
from outsize.program.python_reads import LOOK_UP, PythonRead


@final
class ChangedRead(NamedTuple):
    """A read whose value is another one now."""

    read: PythonRead
    value: Any


@final
class ReadGuards:
    """The values that one program depends on."""

    def __init__(self, reads: Sequence[PythonRead]) -> None:
        self._reads = reads
        self._holders = [read.holder for read in reads]
        self._values = [read.value for read in reads]
        self._frozen = [_frozen(read, read.value) for read in reads]
        self._compile()

    def hold(self) -> bool:
        """Returns whether everything that was read is as it was."""
        return self._is_identical() or self._is_equal()

    def changed(self) -> list[ChangedRead]:
        """Returns the reads that have another value now."""
        _, values = self._now()
        pairs = enumerate(zip(self._reads, values, strict=True))
        return [ChangedRead(read, value) for n, (read, value) in pairs if not self._is_same(n, value)]

    # -- fast --------------------------------------------------------------------------------------

    def _compile(self) -> None:
        rows = list(zip(self._reads, self._holders, self._values, strict=True))
        self._items = _columns((h, r.key, v) for r, h, v in rows if r.kind == "item")
        self._classes = _columns((h.__dict__, r.key, v) for r, h, v in rows if r.kind == "class")
        self._others = [(LOOK_UP[r.kind], h, r.key, v) for r, h, v in rows if r.kind not in ("item", "class")]
        containers: dict[int, Any] = {}
        for read, _, value in rows:
            if read.content:
                _collect(value, containers)
        self._containers = [(c, _held(c)) for c in containers.values()]

    def _is_identical(self) -> bool:
        holders, keys, absents, values = self._items
        if not all(map(is_, map(dict.get, holders, keys, absents), values)):
            return False
        holders, keys, absents, values = self._classes
        if not all(map(is_, map(MappingProxyType.get, holders, keys, absents), values)):
            return False
        return all(look_up(holder, key) is value for look_up, holder, key, value in self._others) and all(
            _holds_same(container, parts) for container, parts in self._containers
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
        if read.is_live:
            return is_same_tensor_kind(before, value)
        return bool(_frozen(read, value) == self._frozen[number])


def _frozen(read: PythonRead, value: Any) -> Any:
    """Returns what is compared: of a container that code did not look into, its type."""
    if is_container(value) and not read.content:
        return type(value)
    return frozen(value) if read.content else frozen(value, 0)


def _columns(rows: Iterable[tuple[Any, Any, Any]]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Returns holders, keys, ABSENT for each, and values."""
    listed = list(rows)
    holders, keys, values = ([row[n] for row in listed] for n in range(3))
    return holders, keys, [ABSENT] * len(listed), values


def _collect(value: Any, containers: dict[int, Any]) -> None:
    """Collects the containers below a value that may change in place."""
    if not is_container(value) or id(value) in containers:
        return
    containers[id(value)] = value
    for part in parts_of(value):
        _collect(part, containers)


def _held(container: Any) -> Any:
    return frozen(container) if isinstance(container, np.ndarray) else parts_of(container)


def _holds_same(container: Any, before: Any) -> bool:
    """Returns whether a container holds the very same objects."""
    now = _held(container)
    if isinstance(container, np.ndarray):
        return bool(now == before)
    return len(now) == len(before) and all(map(is_, now, before))
