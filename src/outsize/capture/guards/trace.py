"""Problem: find every Python value that the user's code reads while it is recorded, and where it was read.

Source: opcode tracing with a shadow stack, as tracing interpreters and coverage of data flow do. For each
frame of user code the trace follows, instruction by instruction, what is on the value stack:

    LOAD_FAST self      [self]
    LOAD_ATTR cfg       [cfg]         noted: (the dict of self, "cfg")
    LOAD_ATTR scale     [0.5]         noted: (the dict of cfg, "scale")
    BINARY_OP *         [?]           values that are computed are not followed

Locals are read from the frame, so that a value is known again as soon as it is stored in one. The shadow
stack is a suffix of the real one: what lies below is unknown, and an unknown value gives no note. A container
counts by its content only where code looks into it (iterates, compares, passes it to code that is not
traced); an append that nobody reads gives no guard.

Symbols: `entries` are pairs of a value and the text of its expression.
Deviations: frames of torch, numpy, outsize and the standard library are not traced, except torch's container
and loss modules and a few of the standard library; a call of such code counts as a look into its arguments,
containers with all that is in them and objects with their own attributes. Objects that change with each use
(consumed.py) interrupt the recording before they are used, unless the code that uses them runs as it is.
Complexity: O(instructions that run in user frames), about 2 us each; torch functions are not traced.
Oracle: tests/parity/test_guards_reads.py (a value of each kind changes; the numbers are the plain loop's).
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import pathlib
import re
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from threading import get_ident
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn

from outsize.capture.guards.consumed import (
    Consumed,
    copied,
    is_consumed,
    is_random_generator,
    random_state,
    set_random_state,
)
from outsize.capture.guards.events import Events, events_for
from outsize.capture.guards.lookup import UNKNOWN, Method, Place, instance_dict, table_of
from outsize.capture.guards.noted import Key, Site
from outsize.capture.guards.notes import Notes, roots_of
from outsize.capture.guards.opcodes import (
    CALLS_NAME_FUNCTION_FIRST,
    FIRST_IN_PLACE,
    LOADS_METHODS_AS_ATTRIBUTES,
    LOOPS_LEAVE_THEIR_ITERATOR,
    Operation,
    operations_of,
)
from outsize.capture.guards.symbolic_numbers import PlantedNumbers, is_symbolic
from outsize.capture.guards.values import is_container, parts_of
from outsize.errors.interruptions import raise_interruption
from outsize.program.objects import Path, Scope, apply, fits, walk
from outsize.program.python_reads import LOSS
from outsize.program.source_line import is_outsize_file, warn_user
from outsize.program.weights.of_loss import modules_held


@final
class _Entry(NamedTuple):
    """A value on the shadow stack, and the expression that gave it."""

    value: Any
    text: str


@final
class _BoundMethod(NamedTuple):
    """A method of an old object that is written in C."""

    name: str
    owner: Any


@final
@dataclass(frozen=True, slots=True)
class _NewIterator:
    """An iterator that the recording has made over an old container."""

    container: Any


@final
@dataclass(frozen=True, slots=True)
class _MadeOf:
    """A value that was computed of what these reads gave, and of nothing else that lived before."""

    keys: frozenset[Key | None]


_NULL: Final = object()
_UNKNOWN: Final = _Entry(UNKNOWN, "?")
_NULL_ENTRY: Final = _Entry(_NULL, "")
_CHANGES: Final = frozenset(
    (
        *("append", "extend", "insert", "add", "update", "clear", "remove", "discard", "appendleft", "sort"),
        *("extendleft", "reverse", "rotate", "difference_update", "intersection_update", "fill", "put"),
        *("symmetric_difference_update", "__setitem__", "__delitem__"),
    )
)
_CHANGES_AND_READS: Final = frozenset(("pop", "popitem", "setdefault", "popleft"))
_HELD: Final = Scope(functions=True, modules="attributes and tables")
_DECORATORS: Final = 16  # At most so many are looked through.
_LOOKS_AT_NOTHING: Final = (isinstance, issubclass, type, id, callable)
# Instructions that take values from an iterator on the stack.
_TAKES_VALUES: Final = frozenset(
    (
        "UNPACK_EX",
        "LIST_EXTEND",
        "SET_UPDATE",
        "DICT_UPDATE",
        "DICT_MERGE",
        "CONTAINS_OP",
        "GET_YIELD_FROM_ITER",
    )
)
_PLAIN_TEXTS: Final = (str, int, float, bool, type(None))
_ADD, _REMAINDER = 0, 6  # Operators of BINARY_OP.
_GETTERS: Final = (operator.attrgetter, operator.itemgetter)

_STDLIB: Final = sysconfig.get_path("stdlib")
_FOLDERS: Final = tuple(
    f"{folder}{os.sep}"
    for folder in (pathlib.Path(torch.__file__).parent, pathlib.Path(np.__file__).parent, _STDLIB)
)
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TORCH_MODULES: Final = f"{pathlib.Path(nn.__file__).parent / 'modules'}{os.sep}"
# The files of outsize that call a model, a loss function or a region of torch.utils.checkpoint.
_CALLERS: Final = (
    *("fallbacks.py", "recorder.py", "intercept.py"),
    *("loss_trials.py", "by_modules.py", "reference.py"),
    *(f"integrations{os.sep}{name}.py" for name in ("transformers", "training_step")),
)
# Look-ups in these classes are those of the objects that they wrap: UserDict, os.environ.
_TRANSPARENT: Final = frozenset(("<frozen os>", "<frozen _collections_abc>"))
_TRANSPARENT_FILES: Final = tuple(
    f"{_STDLIB}{os.sep}{name}" for name in (f"collections{os.sep}__init__.py", "weakref.py", "queue.py")
)


@final
class _Frame:
    """The shadow stack of one frame."""

    __slots__ = ("callee", "code", "entries", "functions", "locals", "operations", "pending", "returned")

    def __init__(self, code: CodeType, functions: list[FunctionType]) -> None:
        """`functions` are those that may run in the frame: several where one cannot tell them apart."""
        self.code, self.functions = code, functions
        self.operations = operations_of(code)
        self.entries: list[_Entry] = []
        # What is to be done once the last instruction has run, with the offset of the next one.
        self.pending: Callable[[int], None] | None = None
        self.callee: Any = UNKNOWN  # What the frame has called last.
        self.returned: Any = UNKNOWN
        self.locals: Mapping[str, Any] | None = None  # As of the last store; a copy, which takes time.

    def push(self, entry: _Entry, *, is_called: bool = False) -> None:
        """Puts a value on the stack, with the NULL that comes with a function which is called next."""
        if not is_called:
            self.entries.append(entry)
        else:
            self.entries += (entry, _NULL_ENTRY) if CALLS_NAME_FUNCTION_FIRST else (_NULL_ENTRY, entry)

    def pop(self, count: int) -> list[_Entry]:
        if count == 0:
            return []
        missing = count - len(self.entries)
        popped = [_UNKNOWN] * max(0, missing) + self.entries[-count:]
        del self.entries[-count:]
        return popped


@final
class ReadTrace:
    """Traces the frames of user code while `active`, and fills `notes`."""

    def __init__(
        self, notes: Notes, frame_of: Callable[[], str], numbers: PlantedNumbers | None = None
    ) -> None:
        """`frame_of` names the module whose code runs; `numbers` are followed meanwhile."""
        self.notes = notes
        self.failure: Exception | None = None
        self._frame_of, self._numbers = frame_of, numbers
        self._frames: dict[FrameType, _Frame] = {}
        self._is_users: dict[CodeType, bool] = {}
        self._is_active = self._is_on = False
        self._is_collecting = False  # Python collects garbage, and calls finalizers and callbacks meanwhile.
        self._thread = get_ident()  # From Python 3.12 on there are events of all threads.
        self._born: set[CodeType] = set()  # Code of functions that the recording itself has made.
        self._functions: dict[CodeType, list[FunctionType]] = {}
        self._events: Events | None = None
        self._interruption: Consumed | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Traces within the context."""
        self._events = events_for(self)
        with self._events.active(), self._knowing_collections():
            self._is_active = self._is_on = True
            try:
                yield
            finally:
                self._is_active = self._is_on = False
                self._frames.clear()
                self._events = None  # They refer to the trace: a cycle would keep the model alive.
        if self._interruption is not None:  # The user's code has caught it.
            raise self._interruption

    @contextmanager
    def _knowing_collections(self) -> Iterator[None]:
        """Knows when garbage is collected, before all other callbacks of the collector begin and after they
        end: what runs then is no code of the forward, in whose middle it may come.
        """

        def begin(phase: str, _facts: Any) -> None:
            self._is_collecting = self._is_collecting or phase == "start"

        def end(phase: str, _facts: Any) -> None:
            self._is_collecting = self._is_collecting and phase != "stop"

        gc.callbacks.insert(0, begin)
        gc.callbacks.append(end)
        try:
            yield
        finally:
            gc.callbacks.remove(begin)
            gc.callbacks.remove(end)
            self._is_collecting = False

    def paused(self) -> Switched:
        """Traces nothing within the context."""
        return Switched(self, on=False)

    def resumed(self) -> Switched:
        """Traces within the context, inside of `paused`."""
        return Switched(self, on=True)

    def switch(self, *, on: bool) -> bool:
        """Traces from now on, or no longer; returns whether it has traced until now."""
        before = self._is_on
        if before is not on and self._is_active and self._events is not None:
            self._is_on = on
            self._events.switch(on=on and self.failure is None)
        return before

    # -- frames ------------------------------------------------------------------------------------

    def may_follow(self, code: CodeType) -> bool:
        """Answers whether this is user code."""
        is_users = self._is_users.get(code)
        if is_users is None:
            is_users = self._is_users[code] = _is_user_code(code)
        return is_users

    def follows(self, frame: FrameType) -> bool:
        """Begins to follow a frame of user code that the user's code has called, or that outsize calls."""
        code = frame.f_code
        if self._is_collecting or self.failure is not None:
            return False
        if not self.may_follow(code) or not _is_users_frame(frame):
            return False
        if frame not in self._frames:
            caller = self._frames.get(frame.f_back) if frame.f_back is not None else None
            if caller is None and (
                get_ident() != self._thread
                or not _calls_users(frame.f_back)
                or _serves_others(code.co_filename)
            ):
                return False
            functions = self._functions_of(frame, UNKNOWN if caller is None else caller.callee)
            self._frames[frame] = _Frame(code, functions)
            for function in functions:
                self._note_function(function, frame)
        return True

    def on_instruction(self, frame: FrameType, offset: int) -> None:
        """Follows the instruction that is about to run; where that fails the trace ends with a warning."""
        state = self._frames.get(frame)
        if state is None:
            return
        try:
            self._on_opcode(frame, state, offset)
        except Consumed as error:
            self._interruption = error
            raise
        except Exception as error:
            raise_interruption(error)
            self.failure = error
            if self._events is not None:
                self._events.switch(on=False)
            self._frames.clear()
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            warn_user(
                f"what Python reads behind {place} is not guarded, because its trace ended with "
                f"{type(error).__name__}: {error}; a value that changes there is not noticed",
            )

    def on_exception(self, frame: FrameType) -> None:
        """Forgets the shadow stack, since an exception empties the real one."""
        state = self._frames.get(frame)
        if state is not None:
            state.entries.clear()
            state.pending = None

    def on_return(self, frame: FrameType, value: Any) -> None:
        """Ends to follow a frame."""
        state = self._frames.pop(frame, None)
        if state is not None:
            self._on_return(frame, state, value)

    def _on_return(self, frame: FrameType, state: _Frame, value: Any) -> None:
        state.entries.clear()
        state.pending = None  # It refers to the state: a cycle would keep values alive.
        caller = self._frames.get(frame.f_back) if frame.f_back is not None else None
        is_plain = not state.code.co_flags & (0x20 | 0x80 | 0x200) and state.code.co_name != "__init__"
        if caller is not None and is_plain:
            caller.returned = value

    def _on_opcode(self, frame: FrameType, state: _Frame, offset: int) -> None:
        if state.pending is not None:
            pending, state.pending = state.pending, None
            pending(offset)
        operation = state.operations.get(offset)
        if operation is None:
            return
        handler = _HANDLERS.get(operation.name)
        if handler is not None:
            handler(self, frame, state, operation)
        elif operation.pops is None:
            self._look_into(frame, state.entries)
            state.entries.clear()
        else:
            if operation.pops:
                popped = state.pop(operation.pops)
                self._look_into(frame, popped)
                if operation.name in _TAKES_VALUES:
                    self._use(frame, popped)
            if operation.pushes > 0:
                state.entries.extend([_UNKNOWN] * operation.pushes)

    def _site(self, frame: FrameType, text: str) -> Site:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return Site(text, where, self._frame_of())

    def _look_into(self, frame: FrameType, entries: list[_Entry]) -> None:
        for value, text in entries:
            if value is not UNKNOWN and is_container(value) and self.notes.old.has(value):
                self.notes.content(value, self._site(frame, text))

    def _use(self, frame: FrameType, entries: list[_Entry]) -> None:
        """Notes that code which is not traced uses these values. Raises Consumed."""
        for value, text in entries:
            if value is UNKNOWN or not self.notes.old.has(value):
                continue
            if is_consumed(value):
                self.notes.use(value, self._site(frame, text))

    def _hand_over(self, frame: FrameType, entries: list[_Entry]) -> None:
        """Notes what code that is not traced may see of its arguments, and of what containers hold."""
        for value, text in entries:
            if value is UNKNOWN or not self.notes.old.has(value):
                continue
            parts = parts_of(value) if is_container(value) else [value]
            self._use(frame, [_Entry(part, text) for part in parts])
            for part in parts:
                self.notes.attributes(part, self._site(frame, text))

    # -- functions ---------------------------------------------------------------------------------

    def _functions_of(self, frame: FrameType, callee: Any) -> list[FunctionType]:
        """Returns the function that runs in the frame, if it lived before the recording; all that it may be
        where it was called out of sight.
        """
        code = frame.f_code
        candidates = [callee.function if isinstance(callee, Method) else callee]
        candidates.append(getattr(candidates[0], "__func__", None))
        if code in self._born:
            old = (f for f in candidates if isinstance(f, FunctionType) and self.notes.old.has(f))
            return [f for f in old if f.__code__ is code][:1]
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if owner is not None:
            names = (code.co_name, "forward", "__call__")
            candidates += [kind.__dict__.get(name) for kind in type(owner).__mro__ for name in names]
        candidates.append(frame.f_globals.get(code.co_name))
        unwrapped = [f for candidate in candidates for f in _unwrapped(candidate)]
        found = [f for f in unwrapped if isinstance(f, FunctionType) and _may_run_in(frame, f)]
        if found or not code.co_freevars:
            return found[:1]
        # A decorator may have given a class a method under another name than that of its code.
        methods = (f for kind in type(owner).__mro__ for f in kind.__dict__.values())
        found = [f for f in methods if isinstance(f, FunctionType) and _may_run_in(frame, f)]
        return found or self._by_referrers(frame)

    def _by_referrers(self, frame: FrameType) -> list[FunctionType]:
        """Returns all functions that may run in the frame, in a search of all objects."""
        code = frame.f_code
        if code not in self._functions:
            self._functions[code] = [f for f in gc.get_referrers(code) if isinstance(f, FunctionType)]
        return [function for function in self._functions[code] if _may_run_in(frame, function)]

    def _note_function(self, function: FunctionType, frame: FrameType) -> None:
        """Notes the code and the defaults of a function that runs: `%autoreload` changes both."""
        site = self._site(frame, f"{function.__qualname__}.__code__")
        self.notes.read(Place("attribute", function, "__code__"), site)
        for name in ("__defaults__", "__kwdefaults__"):
            defaults = getattr(function, name)
            if defaults:
                site = self._site(frame, f"{function.__qualname__}.{name}")
                self.notes.read(Place("attribute", function, name), site)
                self.notes.content(defaults, site)

    # -- calls -------------------------------------------------------------------------------------

    def _begin_call(self, frame: FrameType, state: _Frame, callee: _Entry, arguments: list[_Entry]) -> None:
        """Notes what a call looks into; its result is known when it returns."""
        callee = _Entry(_bound(callee.value), callee.text)
        value = callee.value
        state.callee, state.returned = value, UNKNOWN
        result = self._known_call(frame, callee, arguments)
        if result is UNKNOWN and not self._passes_on(frame, callee):
            self._look_into(frame, arguments)
            if value is not len:
                self._hand_over(frame, arguments)
            if value is not UNKNOWN:
                result = self._made_of([callee, *arguments])
        text = f"{callee.text}(...)"
        follows = isinstance(value, FunctionType | Method | MethodType) or value is UNKNOWN

        def push(_offset: int) -> None:
            returned = result if result is not UNKNOWN else state.returned if follows else UNKNOWN
            state.entries.append(_Entry(returned, text))

        state.pending = push

    def _passes_on(self, frame: FrameType, callee: _Entry) -> bool:
        """Returns whether the call hands its arguments to code that is traced itself."""
        value = callee.value
        if value in _LOOKS_AT_NOTHING if isinstance(value, type | BuiltinFunctionType) else False:
            return True
        if isinstance(value, functools.partial):
            self._look_into(frame, [callee])
            value = value.func
        if isinstance(value, type):
            value = value.__init__
        function = value.function if isinstance(value, Method) else getattr(value, "__func__", value)
        return isinstance(function, FunctionType) and _is_user_code(function.__code__)

    def _known_call(self, frame: FrameType, callee: _Entry, arguments: list[_Entry]) -> Any:
        """Returns the result of a call that is a look-up or a change by itself; UNKNOWN for others."""
        value = callee.value
        if isinstance(value, _BoundMethod):
            return self._call_of_method(frame, value, arguments, callee.text)
        if isinstance(value, Method) and is_consumed(value.owner):
            self.notes.use(value.owner, self._site(frame, callee.text))
        if isinstance(value, weakref.ref) and self.notes.old.has(value) and not _is_torchs(frame.f_code):
            return self.notes.referent(value, self._site(frame, f"{callee.text}()"))
        if isinstance(value, _GETTERS) and arguments:
            return self._got(frame, value, arguments[0])
        if value in (iter, next) if isinstance(value, BuiltinFunctionType) and arguments else False:
            return self._iterated(frame, value, arguments[0])
        return self._call_of_builtin(frame, value, arguments)

    def _call_of_builtin(self, frame: FrameType, value: Any, arguments: list[_Entry]) -> Any:
        if value is object.__getattribute__ and len(arguments) == 2:
            value = getattr
        if value is object.__setattr__:
            value = setattr
        if (value is getattr or value is hasattr) and len(arguments) > 1:
            found = self._look_up(frame, arguments[0], arguments[1].value)
            if value is getattr:
                return found
        if value is setattr and len(arguments) == 3 and isinstance(arguments[1].value, str):
            self._set_attribute(frame, arguments[0], arguments[1].value, arguments[2].value)
        if self._numbers is not None:
            self._insist_on_known_types(self._numbers, value, arguments)
        if value is type and len(arguments) == 1 and self.notes.old.has(arguments[0].value):
            return type(arguments[0].value)
        if value is vars and len(arguments) == 1:
            return self.notes.attribute(arguments[0].value, "__dict__", self._site(frame, "vars(...)"))
        return UNKNOWN

    def _look_up(self, frame: FrameType, owner: _Entry, name: Any) -> Any:
        """Returns what `getattr(owner, name)` is; all attributes count where the name is not known."""
        if isinstance(name, str):
            return self.notes.attribute(owner.value, name, self._site(frame, f"{owner.text}.{name}"))
        table = instance_dict(owner.value) if self.notes.old.has(owner.value) else None
        if table is not None and not isinstance(owner.value, type | ModuleType):
            self.notes.items(table, self._site(frame, owner.text))
        return UNKNOWN

    def _insist_on_known_types(self, numbers: PlantedNumbers, callee: Any, arguments: list[_Entry]) -> None:
        """Checks that `type` is not asked of a symbolic number, which has a type of its own."""
        values = [argument.value for argument in arguments]
        if callee is type and len(values) == 1:
            asks = is_symbolic(values[0]) or not is_known(values[0])
        else:  # map(type, numbers)
            asks = callee is not isinstance and callee is not issubclass and any(v is type for v in values)
        if asks:
            numbers.refuse_all()

    def _got(self, frame: FrameType, getter: Any, owner: _Entry) -> Any:
        """Notes what an attrgetter or itemgetter reads, and returns it where it is one value."""
        results: list[Any] = []
        for wanted in getter.__reduce__()[1]:
            value: Any = owner.value
            steps = wanted.split(".") if isinstance(getter, operator.attrgetter) else (wanted,)
            for step in steps:
                value = self._got_one(frame, getter, _Entry(value, owner.text), step)
            results.append(value)
        return results[0] if len(results) == 1 else UNKNOWN

    def _got_one(self, frame: FrameType, getter: Any, owner: _Entry, step: Any) -> Any:
        if owner.value is UNKNOWN or not self.notes.old.has(owner.value):
            return UNKNOWN
        if isinstance(getter, operator.attrgetter):
            return self.notes.attribute(owner.value, step, self._site(frame, f"{owner.text}.{step}"))
        if is_container(owner.value):
            return self.notes.item(owner.value, step, self._site(frame, f"{owner.text}[{step!r}]"))
        return UNKNOWN

    def _iterated(self, frame: FrameType, function: Any, argument: _Entry) -> Any:
        """Returns what `iter(argument)` or `next(argument)` is."""
        value = argument.value
        if function is iter:
            return self._iterator_over(frame, argument)
        if isinstance(value, _NewIterator):
            return next(iter(value.container), UNKNOWN)
        self._use(frame, [argument])
        return UNKNOWN

    def _iterator_over(self, frame: FrameType, entry: _Entry) -> Any:
        value = _unproxied(entry.value)
        if value is UNKNOWN or not self.notes.old.has(entry.value):
            return UNKNOWN
        if is_container(value):
            self._look_into(frame, [entry])
            return _NewIterator(value)
        return value if is_consumed(value) else UNKNOWN

    def _made_of(self, entries: list[_Entry]) -> Any:
        """Returns what a result was made of, where that are reads."""
        keys: set[Key | None] = set()
        for value, text in entries:
            if isinstance(value, _MadeOf):
                keys |= value.keys
            elif value is not UNKNOWN:
                keys.add(self.notes.key_of(text))
        keys.discard(None)
        return _MadeOf(frozenset(keys)) if keys else UNKNOWN

    def _call_of_method(
        self, frame: FrameType, method: _BoundMethod, arguments: list[_Entry], text: str
    ) -> Any:
        name, container = method
        if is_consumed(container):
            self.notes.use(container, self._site(frame, text))
            return UNKNOWN
        if isinstance(container, ContextVar):
            return self._call_of_context(frame, method, text)
        container = _unproxied(container)
        if isinstance(method.owner, MappingProxyType) and name != "get":
            self.notes.items(container, self._site(frame, text))
            return UNKNOWN
        if name == "get" and arguments and is_known(arguments[0].value):
            return self.notes.item(container, arguments[0].value, self._site(frame, text))
        if name in _CHANGES:
            for argument in arguments:
                self.notes.log(argument.text)
            self.notes.writes.mutate(container, self._site(frame, text))
        else:
            self.notes.content(container, self._site(frame, text))
            if name in _CHANGES_AND_READS:
                self.notes.writes.mutate(container, self._site(frame, text))
        return UNKNOWN

    def _call_of_context(self, frame: FrameType, method: _BoundMethod, text: str) -> Any:
        variable, site = method.owner, self._site(frame, text)
        if method.name == "get":
            return self.notes.read(Place("context", variable, None), site)
        if method.name == "set":
            self.notes.writes.set_context(variable, site)
        return UNKNOWN

    # -- writes ------------------------------------------------------------------------------------

    def _set_attribute(self, frame: FrameType, owner: _Entry, name: str, value: Any) -> None:
        holder = owner.value
        if holder is not UNKNOWN and not isinstance(holder, Tensor) and self.notes.old.has(holder):
            site = self._site(frame, f"{owner.text}.{name}")
            self.notes.writes.write(table_of(holder, name), value, site, _keys_in(value))

    def _set_item(self, frame: FrameType, owner: _Entry, key: Any, value: Any) -> None:
        holder = owner.value
        if holder is UNKNOWN or not is_container(holder) or not self.notes.old.has(holder):
            return
        site = self._site(frame, f"{owner.text}[...]")
        if isinstance(holder, dict) and is_known(key):
            self.notes.writes.write(Place("item", holder, key), value, site, _keys_in(value))
        else:
            self.notes.writes.mutate(holder, site)

    # -- instructions ------------------------------------------------------------------------------

    def _load_fast(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        name = operation.value
        if state.locals is None:
            state.locals = frame.f_locals
        state.entries.append(_Entry(state.locals.get(name, UNKNOWN), name))

    def _load_const(self, _frame: FrameType, state: _Frame, operation: Operation) -> None:
        state.entries.append(_Entry(operation.value, repr(operation.value)))

    def _make_function(self, _frame: FrameType, state: _Frame, operation: Operation) -> None:
        *_, code = state.pop(operation.pops or 1)
        if isinstance(code.value, CodeType):
            self._born.add(code.value)
        state.entries.append(_UNKNOWN)

    def _load_two_fast(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        for name in operation.value:
            state.entries.append(_Entry(frame.f_locals.get(name, UNKNOWN), name))

    def _store_load_fast(self, _frame: FrameType, state: _Frame, operation: Operation) -> None:
        (entry,) = state.pop(1)
        state.locals = None
        stored, loaded = operation.value
        state.entries.append(
            entry if stored == loaded else _Entry(_frame.f_locals.get(loaded, UNKNOWN), loaded)
        )

    def _store_two_fast(self, _frame: FrameType, state: _Frame, _operation: Operation) -> None:
        state.pop(2)
        state.locals = None

    def _load_and_clear(self, _frame: FrameType, state: _Frame, _operation: Operation) -> None:
        state.entries.append(_UNKNOWN)
        state.locals = None

    def _push_null(self, _frame: FrameType, state: _Frame, _operation: Operation) -> None:
        state.entries.append(_NULL_ENTRY)

    def _load_global(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        state.push(self._global(frame, operation.value), is_called=bool(operation.arg & 1))

    def _load_name(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        state.push(self._global(frame, operation.value))

    def _global(self, frame: FrameType, name: str) -> _Entry:
        table = frame.f_globals
        if name in table:
            return _Entry(self.notes.read(Place("item", table, name), self._site(frame, name)), name)
        return _Entry(frame.f_builtins.get(name, UNKNOWN), name)

    def _load_deref(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        name, value = operation.value, frame.f_locals.get(operation.value, UNKNOWN)
        for cell in _cells_of(state, name):
            value = self.notes.read(Place("cell", cell, None), self._site(frame, name))
        state.entries.append(_Entry(value, name))

    def _load_attribute(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        if LOADS_METHODS_AS_ATTRIBUTES and operation.arg & 1:
            self._load_method(frame, state, operation)
            return
        (owner,) = state.pop(1)
        self._load(frame, state, owner, operation.value)

    def _load_of_super(self, _frame: FrameType, state: _Frame, operation: Operation) -> None:
        state.pop(3)
        state.push(_UNKNOWN, is_called=bool(operation.arg & 1))

    def _load(
        self, frame: FrameType, state: _Frame, owner: _Entry, name: str, *, is_called: bool = False
    ) -> None:
        text = f"{owner.text}.{name}"
        value: Any = UNKNOWN
        if owner.value is object:
            value = getattr(object, name, UNKNOWN)
        elif owner.value is not UNKNOWN and self.notes.old.has(owner.value):
            value = self.notes.attribute(owner.value, name, self._site(frame, text))
        if value is not UNKNOWN:
            state.push(_Entry(value, text), is_called=is_called)
            return
        state.returned = UNKNOWN

        def push(_offset: int) -> None:
            # A property or `__getattr__` has run as a frame of its own.
            returned = state.returned
            if returned is UNKNOWN and isinstance(owner.value, Tensor | _MadeOf):
                returned = self._made_of([owner])
            state.push(_Entry(returned, text), is_called=is_called)

        state.pending = push

    def _load_method(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        (owner,) = state.pop(1)
        name = operation.value
        is_in_c = is_container(owner.value) or isinstance(owner.value, ContextVar | MappingProxyType)
        if (is_in_c or is_consumed(owner.value)) and self.notes.old.has(owner.value):
            method = _BoundMethod(name, owner.value)
            state.push(_Entry(method, f"{owner.text}.{name}"), is_called=True)
        else:
            self._load(frame, state, owner, name, is_called=True)

    def _binary_subscr(self, frame: FrameType, state: _Frame, _operation: Operation) -> None:
        owner, key = state.pop(2)
        value: Any = UNKNOWN
        text = f"{owner.text}[{key.text}]"
        container = _unproxied(owner.value)
        if container is not UNKNOWN and is_container(container) and self.notes.old.has(owner.value):
            site = self._site(frame, text)
            if not is_known(key.value):
                self._look_into(frame, [owner])
            else:
                value = self.notes.item(container, key.value, site)
        if value is not UNKNOWN:
            state.entries.append(_Entry(value, text))
            return
        state.returned = UNKNOWN
        state.pending = lambda _offset: state.entries.append(_Entry(state.returned, text))

    def _call(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        self._call_of(frame, state, state.pop(operation.arg + 2))

    def _call_with_keywords(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        *entries, _names = state.pop(operation.arg + 3)
        self._call_of(frame, state, entries)

    def _call_of(self, frame: FrameType, state: _Frame, entries: list[_Entry]) -> None:
        first, second, *arguments = entries
        if CALLS_NAME_FUNCTION_FIRST:
            callee = first
            arguments = (
                arguments if second.value is _NULL or second.value is UNKNOWN else [second, *arguments]
            )
        elif first.value is _NULL or first.value is UNKNOWN:
            callee = second
        else:
            callee, arguments = first, [second, *arguments]
        self._begin_call(frame, state, callee, arguments)

    def _call_with_star(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        first, second, *arguments = state.pop(operation.pops or 3)
        self._begin_call(frame, state, first if CALLS_NAME_FUNCTION_FIRST else second, arguments)

    def _binary_op(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        left, right = state.pop(2)
        in_place = operation.arg >= FIRST_IN_PLACE
        if in_place and isinstance(left.value, list | set | dict) and self.notes.old.has(left.value):
            self.notes.writes.mutate(left.value, self._site(frame, left.text))
            self._look_into(frame, [right])
            state.entries.append(left)
            return
        self._look_into(frame, [left, right])
        text = None if in_place else _computed_text(operation.arg, left.value, right.value)
        value = self._made_of([left, right]) if text is None else text
        state.entries.append(_Entry(value, "?" if text is None else repr(text)))

    def _format(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        """Follows the parts of an f-string, which may be the name of an attribute or a key."""
        value, *spec = popped = state.pop(operation.pops or 1)
        self._look_into(frame, popped)
        conversion = operation.arg & 3 if operation.name in ("FORMAT_VALUE", "CONVERT_VALUE") else 0
        text = _formatted(value.value, conversion, spec[0].value if spec else "")
        state.entries.append(_UNKNOWN if text is None else _Entry(text, repr(text)))

    def _build_string(self, _frame: FrameType, state: _Frame, operation: Operation) -> None:
        parts = [entry.value for entry in state.pop(operation.arg)]
        is_text = all(type(part) is str for part in parts)
        state.entries.append(_Entry("".join(parts), repr("".join(parts))) if is_text else _UNKNOWN)

    def _drop(self, _frame: FrameType, state: _Frame, operation: Operation) -> None:
        """Takes values from the stack without a look into them."""
        state.pop(operation.pops or 0)
        state.entries.extend([_UNKNOWN] * max(0, operation.pushes))

    def _store_fast(self, _frame: FrameType, state: _Frame, _operation: Operation) -> None:
        state.pop(1)
        state.locals = None

    def _delete_fast(self, _frame: FrameType, state: _Frame, _operation: Operation) -> None:
        state.locals = None

    def _store_attribute(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        value, owner = state.pop(2)
        self._set_attribute(frame, owner, operation.value, value.value)

    def _delete_attribute(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        (owner,) = state.pop(1)
        self._set_attribute(frame, owner, operation.value, UNKNOWN)

    def _store_subscr(self, frame: FrameType, state: _Frame, _operation: Operation) -> None:
        value, owner, key = state.pop(3)
        self._look_into(frame, [value])
        self._set_item(frame, owner, key.value, value.value)

    def _delete_subscr(self, frame: FrameType, state: _Frame, _operation: Operation) -> None:
        owner, key = state.pop(2)
        self._set_item(frame, owner, key.value, UNKNOWN)

    def _store_global(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        (entry,) = state.pop(1)
        place = Place("item", frame.f_globals, operation.value)
        self.notes.writes.write(place, entry.value, self._site(frame, operation.value), _keys_in(entry.value))

    def _store_deref(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        (entry,) = state.pop(1)
        site = self._site(frame, operation.value)
        for cell in _cells_of(state, operation.value):
            self.notes.writes.write(Place("cell", cell, None), entry.value, site, _keys_in(entry.value))

    def _unpack(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        entry = state.pop(1)[0]
        self._look_into(frame, [entry])
        self._use(frame, [entry])
        items = list(entry.value) if isinstance(entry.value, tuple | list) else []
        if len(items) != operation.arg:
            items = [UNKNOWN] * operation.arg
        state.entries.extend(
            _Entry(item, f"{entry.text}[{n}]") for n, item in reversed(list(enumerate(items)))
        )

    def _get_iterator(self, frame: FrameType, state: _Frame, _operation: Operation) -> None:
        (entry,) = state.pop(1)
        state.entries.append(_Entry(self._iterator_over(frame, entry), entry.text))

    def _match_class(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        subject, kind, names = state.pop(3)
        wanted = names.value if isinstance(names.value, tuple) else ()
        wanted += getattr(kind.value, "__match_args__", ())[: operation.arg]
        for name in wanted if subject.value is not UNKNOWN and self.notes.old.has(subject.value) else ():
            self.notes.attribute(subject.value, name, self._site(frame, f"{subject.text}.{name}"))
        state.entries.append(_UNKNOWN)

    def _for_iter(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        self._use(frame, state.entries[-1:])

        def after(offset: int) -> None:
            if offset == operation.next:
                state.entries.append(_UNKNOWN)
            elif not LOOPS_LEAVE_THEIR_ITERATOR:
                state.pop(1)

        state.pending = after

    def _jump_or_pop(self, frame: FrameType, state: _Frame, operation: Operation) -> None:
        self._look_into(frame, state.entries[-1:])

        def after(offset: int) -> None:
            if offset != operation.value:
                state.pop(1)

        state.pending = after

    def _copy(self, _frame: FrameType, state: _Frame, operation: Operation) -> None:
        depth = operation.arg
        entry = state.entries[-depth] if depth <= len(state.entries) else _UNKNOWN
        if isinstance(entry.value, _MadeOf):
            entry = state.entries[-depth] = _UNKNOWN  # It also goes elsewhere.
        state.entries.append(entry)

    def _swap(self, _frame: FrameType, state: _Frame, operation: Operation) -> None:
        depth = operation.arg
        missing = depth - len(state.entries)
        if missing > 0:
            state.entries[:0] = [_UNKNOWN] * missing
        state.entries[-depth], state.entries[-1] = state.entries[-1], state.entries[-depth]


@final
class Switched:
    """Turns a trace on or off within a context."""

    __slots__ = ("_before", "_on", "_trace")

    def __init__(self, trace: ReadTrace, *, on: bool) -> None:
        self._trace, self._on = trace, on

    def __enter__(self) -> None:
        self._before = self._trace.switch(on=self._on)

    def __exit__(self, *_: object) -> None:
        self._trace.switch(on=self._before)


@contextmanager
def without_python_writes(function: Any) -> Iterator[None]:
    """Takes back what the function writes into Python objects within the context, without a look into all
    that it holds.
    """
    notes = Notes({}, roots_of(function), is_for_guards=False)
    try:
        with ReadTrace(notes, lambda: LOSS).active():
            yield
    finally:
        notes.writes.undo()


@contextmanager
def without_writes(*functions: Any) -> Iterator[None]:
    """Takes back what the functions write within the context: into Python objects, tensors and generators of
    random numbers that they hold.
    """
    roots = [root for function in functions for root in roots_of(function)]
    held = (module for function in functions for module in modules_held(function).values())
    roots += [part for module in held for part in module.modules()]
    notes, generators = Notes({}, roots), list[tuple[torch.Generator, Tensor]]()
    randoms, iterators = list[tuple[Any, Any]](), dict[Path, tuple[Any, Any]]()
    for path, part in walk(roots, _HELD):
        if isinstance(part, Tensor):
            notes.writes.remember_tensor(part)
        elif isinstance(part, torch.Generator):
            generators.append((part, part.get_state()))
        elif is_random_generator(part):
            randoms.append((part, random_state(part)))
        elif is_consumed(part) and fits(roots, path) and (other := copied(part)) is not None:
            iterators[path] = part, other
    try:
        apply(roots, [(path, other) for path, (_, other) in iterators.items()])
        with ReadTrace(notes, lambda: LOSS).active():
            yield
    finally:
        notes.writes.undo()
        apply(roots, [(path, one) for path, (one, _) in iterators.items()])
        for generator, state in generators:
            generator.set_state(state)
        for generator, state in randoms:
            set_random_state(generator, state)


_HANDLERS: Final[dict[str, Callable[[ReadTrace, FrameType, _Frame, Operation], None]]] = {
    "LOAD_FAST": ReadTrace._load_fast,
    "LOAD_FAST_CHECK": ReadTrace._load_fast,
    "LOAD_FAST_LOAD_FAST": ReadTrace._load_two_fast,
    "LOAD_FAST_AND_CLEAR": ReadTrace._load_and_clear,
    "STORE_FAST_LOAD_FAST": ReadTrace._store_load_fast,
    "STORE_FAST_STORE_FAST": ReadTrace._store_two_fast,
    "LOAD_SUPER_ATTR": ReadTrace._load_of_super,
    "LOAD_CONST": ReadTrace._load_const,
    "PUSH_NULL": ReadTrace._push_null,
    "MAKE_FUNCTION": ReadTrace._make_function,
    "LOAD_GLOBAL": ReadTrace._load_global,
    "LOAD_DEREF": ReadTrace._load_deref,
    "LOAD_CLASSDEREF": ReadTrace._load_deref,
    "LOAD_ATTR": ReadTrace._load_attribute,
    "LOAD_METHOD": ReadTrace._load_method,
    "BINARY_SUBSCR": ReadTrace._binary_subscr,
    "CALL": ReadTrace._call,
    "CALL_KW": ReadTrace._call_with_keywords,
    "CALL_FUNCTION_EX": ReadTrace._call_with_star,
    "BINARY_OP": ReadTrace._binary_op,
    "FORMAT_VALUE": ReadTrace._format,
    "FORMAT_SIMPLE": ReadTrace._format,
    "FORMAT_WITH_SPEC": ReadTrace._format,
    "CONVERT_VALUE": ReadTrace._format,
    "BUILD_STRING": ReadTrace._build_string,
    "IS_OP": ReadTrace._drop,
    "POP_TOP": ReadTrace._drop,
    "STORE_FAST": ReadTrace._store_fast,
    "DELETE_FAST": ReadTrace._delete_fast,
    "STORE_NAME": ReadTrace._drop,
    "RETURN_VALUE": ReadTrace._drop,
    **{f"POP_JUMP_{way}_IF_NONE": ReadTrace._drop for way in ("FORWARD", "BACKWARD")},
    **{f"POP_JUMP_{way}_IF_NOT_NONE": ReadTrace._drop for way in ("FORWARD", "BACKWARD")},
    "POP_JUMP_IF_NONE": ReadTrace._drop,
    "POP_JUMP_IF_NOT_NONE": ReadTrace._drop,
    "RETURN_CONST": ReadTrace._drop,
    "SET_FUNCTION_ATTRIBUTE": ReadTrace._drop,
    "STORE_ATTR": ReadTrace._store_attribute,
    "DELETE_ATTR": ReadTrace._delete_attribute,
    "STORE_SUBSCR": ReadTrace._store_subscr,
    "DELETE_SUBSCR": ReadTrace._delete_subscr,
    "STORE_GLOBAL": ReadTrace._store_global,
    "STORE_DEREF": ReadTrace._store_deref,
    "UNPACK_SEQUENCE": ReadTrace._unpack,
    "FOR_ITER": ReadTrace._for_iter,
    "GET_ITER": ReadTrace._get_iterator,
    "MATCH_CLASS": ReadTrace._match_class,
    "JUMP_IF_FALSE_OR_POP": ReadTrace._jump_or_pop,
    "JUMP_IF_TRUE_OR_POP": ReadTrace._jump_or_pop,
    "COPY": ReadTrace._copy,
    "SWAP": ReadTrace._swap,
}


def _is_torchs(code: CodeType) -> bool:
    """Whether a function is one of torch's modules, whose weak references are to their own weights.

    An exchanged weight is seen by the check of modules and parameters; that the former one was freed since,
    at a moment that the garbage collector chooses, changes nothing.
    """
    return code.co_filename.startswith(_TORCH_MODULES)


def _is_user_code(code: CodeType) -> bool:
    name = code.co_filename
    if name.startswith("<"):
        return name in _TRANSPARENT or not name.startswith(("<frozen", "<outsize"))
    if is_outsize_file(name) or code.co_name in ("<module>", "__getattribute__"):
        return False
    if name.startswith(_TORCH_MODULES):
        return not name.endswith("module.py")
    if any(folder in name for folder in _INSTALLED):
        return not name.startswith(_FOLDERS[:2])
    return not name.startswith(_FOLDERS) or name in _TRANSPARENT_FILES


def _calls_users(frame: FrameType | None) -> bool:
    """Returns whether a frame that is not traced hands control to the user: not what outsize calls inside."""
    name = "" if frame is None else frame.f_code.co_filename
    return not is_outsize_file(name) or name.endswith(_CALLERS)


def _serves_others(file: str) -> bool:
    """Returns whether code that a frame which is not traced has called works for that frame and not for the
    user: the packages that torch requires (its compiler computes with sympy), and parts of the standard
    library.
    """
    is_library = file in _TRANSPARENT or file in _TRANSPARENT_FILES
    return is_library or any(folder in file for folder in _required_by_torch())


@functools.cache
def _required_by_torch() -> tuple[str, ...]:
    """Returns the folders of the packages that torch requires, as parts of paths."""
    try:
        lines = requires("torch") or []
    except PackageNotFoundError:
        lines = []
    names = (re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in lines)
    return tuple(f"{os.sep}site-packages{os.sep}{name.replace('-', '_').lower()}{os.sep}" for name in names)


def is_known(value: Any) -> bool:
    """Returns whether the value on the shadow stack is the one on the real stack."""
    return value is not UNKNOWN and not isinstance(value, _MadeOf | _NewIterator | _BoundMethod | Method)


def _formatted(value: Any, conversion: int, spec: Any) -> str | None:
    """Returns the text of a plain value in an f-string, converted first (1: str, 2: repr, 3: ascii); None for
    others.
    """
    if type(value) not in _PLAIN_TEXTS or type(spec) is not str:
        return None
    converted: Any = (value, str(value), repr(value), ascii(value))[conversion]
    try:
        return format(converted, spec)
    except ValueError:
        return None


def _computed_text(operator_number: int, left: Any, right: Any) -> str | None:
    """Returns what `+` or `%` makes of a text and a plain value; None for others."""
    if type(left) is not str or type(right) not in _PLAIN_TEXTS:
        return None
    try:
        if operator_number == _ADD:
            return left + right
        return left % right if operator_number == _REMAINDER else None
    except (TypeError, ValueError):
        return None


def _keys_in(value: Any) -> frozenset[Key | None]:
    return value.keys if isinstance(value, _MadeOf) else frozenset()


def _bound(function: Any) -> Any:
    """Returns what a method written in C is bound to, with its name."""
    if not isinstance(function, BuiltinFunctionType | MethodWrapperType):
        return function
    owner = function.__self__
    is_bound = owner is not None and not isinstance(owner, ModuleType | type)
    return _BoundMethod(function.__name__, owner) if is_bound else function


def _unproxied(value: Any) -> Any:
    """Returns the dict behind a read-only view."""
    if not isinstance(value, MappingProxyType):
        return value
    return next((part for part in gc.get_referents(value) if isinstance(part, dict)), UNKNOWN)


def _is_users_frame(frame: FrameType) -> bool:
    """Returns whether a frame's globals are the user's: what dataclasses generate has those of its class."""
    return not str(frame.f_globals.get("__name__", "")).startswith("outsize.")


def _may_run_in(frame: FrameType, function: FunctionType) -> bool:
    """Returns whether a function has the frame's code, and holds what the frame's free variables are."""
    code, values = frame.f_code, frame.f_locals
    if function.__code__ is not code:
        return False
    held = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return all(_content(cell) is values.get(name, _NULL) for name, cell in held)


def _cells_of(state: _Frame, name: str) -> list[CellType]:
    """Returns the cell of a free variable, in each function that may run."""
    names = state.code.co_freevars
    closures = [function.__closure__ or () for function in state.functions] if name in names else []
    return [closure[names.index(name)] for closure in closures]


def _unwrapped(function: Any) -> Iterator[Any]:
    """Yields a function, and those that its decorators wrap."""
    for _ in range(_DECORATORS):
        if function is None:
            return
        yield function
        function = getattr(function, "__dict__", {}).get("__wrapped__")


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NULL
