"""The values on the stack of a frame, as far as they are known: a suffix of the real stack."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MappingProxyType
from typing import Any, Final, NamedTuple, final

from outsize.capture.guards.lookup import UNKNOWN, Method
from outsize.capture.guards.noted import Key
from outsize.capture.guards.trace.opcodes import CALLS_NAME_FUNCTION_FIRST, operations_of


@final
class Entry(NamedTuple):
    """A value on the shadow stack, and the expression that gave it."""

    value: Any
    text: str


@final
class BoundMethod(NamedTuple):
    """A method of an old object that is written in C."""

    name: str
    owner: Any


@final
@dataclass(frozen=True, slots=True)
class NewIterator:
    """An iterator that the recording has made over an old container."""

    container: Any


@final
@dataclass(frozen=True, slots=True)
class MadeOf:
    """A value that was computed of what these reads gave, and of nothing else that lived before."""

    keys: frozenset[Key | None]


NULL: Final = object()
UNKNOWN_ENTRY: Final = Entry(UNKNOWN, "?")
NULL_ENTRY: Final = Entry(NULL, "")


@final
class ShadowStack:
    """The shadow stack of one frame."""

    __slots__ = ("callee", "code", "entries", "functions", "locals", "operations", "pending", "returned")

    def __init__(self, code: CodeType, functions: list[FunctionType]) -> None:
        """`functions` are those that may run in the frame: several where one cannot tell them apart."""
        self.code, self.functions = code, functions
        self.operations = operations_of(code)
        self.entries: list[Entry] = []
        # What is to be done once the last instruction has run, with the offset of the next one.
        self.pending: Callable[[int], None] | None = None
        self.callee: Any = UNKNOWN  # What the frame has called last.
        self.returned: Any = UNKNOWN
        self.locals: Mapping[str, Any] | None = None  # As of the last store; a copy, which takes time.

    def push(self, entry: Entry, *, is_called: bool = False) -> None:
        """Puts a value on the stack, with the NULL that comes with a function which is called next."""
        if not is_called:
            self.entries.append(entry)
        else:
            self.entries += (entry, NULL_ENTRY) if CALLS_NAME_FUNCTION_FIRST else (NULL_ENTRY, entry)

    def pop(self, count: int) -> list[Entry]:
        """Takes so many values from the stack; those below what is followed are unknown."""
        if count == 0:
            return []
        missing = count - len(self.entries)
        popped = [UNKNOWN_ENTRY] * max(0, missing) + self.entries[-count:]
        del self.entries[-count:]
        return popped


def is_known(value: Any) -> bool:
    """Returns whether the value on the shadow stack is the one on the real stack."""
    return value is not UNKNOWN and not isinstance(value, MadeOf | NewIterator | BoundMethod | Method)


def keys_in(value: Any) -> frozenset[Key | None]:
    """Returns the reads that a value was computed of."""
    return value.keys if isinstance(value, MadeOf) else frozenset()


def unproxied(value: Any) -> Any:
    """Returns the dict behind a read-only view."""
    if not isinstance(value, MappingProxyType):
        return value
    return next((part for part in gc.get_referents(value) if isinstance(part, dict)), UNKNOWN)


def cells_of(state: ShadowStack, name: str) -> list[CellType]:
    """Returns the cell of a free variable, in each function that may run."""
    names = state.code.co_freevars
    closures = [function.__closure__ or () for function in state.functions] if name in names else []
    return [closure[names.index(name)] for closure in closures]
