"""Keeps the values on the stack of a frame as far as they are known: a suffix of the real stack."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FrameType, FunctionType, MappingProxyType
from typing import Any, Final, NamedTuple, final

from outsize.capture.guards.lookup import UNKNOWN, Method
from outsize.capture.guards.noted import Key
from outsize.capture.guards.trace.opcodes import CALLS_NAME_FUNCTION_FIRST, operations_of


@final
class StackEntry(NamedTuple):
    """Holds a value on the shadow stack, and the expression that gave it."""

    value: Any
    text: str


@final
class BoundMethod(NamedTuple):
    """Stands for a method of an old object that is written in C."""

    name: str
    owner: Any


@final
@dataclass(frozen=True, slots=True)
class NewIterator:
    """Stands for an iterator that the recording has made over an old container."""

    container: Any


@final
@dataclass(frozen=True, slots=True)
class MadeOf:
    """Stands for a value that was computed of these reads, and of nothing else that lived before."""

    keys: frozenset[Key | None]


NULL: Final = object()
UNKNOWN_ENTRY: Final = StackEntry(UNKNOWN, "?")
NULL_ENTRY: Final = StackEntry(NULL, "")


@final
class ShadowStack:
    """Keeps the shadow stack of one frame."""

    __slots__ = ("_locals", "_pending", "callee", "code", "entries", "functions", "operations", "returned")

    def __init__(self, code: CodeType, functions: list[FunctionType]) -> None:
        """`functions` are those that may run in the frame: several where one cannot tell them apart."""
        self.code, self.functions = code, functions
        self.operations = operations_of(code)
        self.entries: list[StackEntry] = []
        self.callee: Any = UNKNOWN  # What the frame has called last.
        self.returned: Any = UNKNOWN  # What that has returned, where it was followed.
        self._pending: Callable[[int], None] | None = None
        self._locals: Mapping[str, Any] | None = None  # As of the last store; a copy, which takes time.

    def push(self, entry: StackEntry, *, is_called: bool = False) -> None:
        """Puts a value on the stack, with the NULL that comes with a function which is called next."""
        if not is_called:
            self.entries.append(entry)
        else:
            self.entries += (entry, NULL_ENTRY) if CALLS_NAME_FUNCTION_FIRST else (NULL_ENTRY, entry)

    def pop(self, count: int) -> list[StackEntry]:
        """Takes so many values from the stack; those below what is followed are unknown."""
        if count == 0:
            return []
        missing = count - len(self.entries)
        popped = [UNKNOWN_ENTRY] * max(0, missing) + self.entries[-count:]
        del self.entries[-count:]
        return popped

    def clear(self) -> None:
        """Forgets what is on the stack, and what was to be done behind the last instruction."""
        self.entries.clear()
        self._pending = None  # It refers to the stack: a cycle would keep values alive.

    def begins_call(self, callee: Any) -> None:
        """Knows what the frame calls, which has returned nothing yet."""
        self.callee, self.returned = callee, UNKNOWN

    def got(self, returned: Any) -> None:
        """Knows what a frame has returned that this one has called."""
        self.returned = returned

    def behind_instruction(self, action: Callable[[int], None]) -> None:
        """Does something once the instruction has run, with the offset of the next one."""
        self._pending = action

    def next_instruction(self, offset: int) -> None:
        """Does what was to be done behind the last instruction."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending(offset)

    def local(self, frame: FrameType, name: str) -> Any:
        """Returns the value of a local variable."""
        if self._locals is None:
            self._locals = frame.f_locals
        return self._locals.get(name, UNKNOWN)

    def changed_locals(self) -> None:
        """Reads local variables again when they are asked for."""
        self._locals = None


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
