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

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, Final, final

from outsize.capture.guards.consumed import Consumed
from outsize.capture.guards.lookup import UNKNOWN, Method, Place
from outsize.capture.guards.notes import Notes
from outsize.capture.guards.symbolic_numbers import PlantedNumbers
from outsize.capture.guards.trace.events import Events, events_for
from outsize.capture.guards.trace.instructions import Instructions
from outsize.capture.guards.trace.reads import EntryReads
from outsize.capture.guards.trace.shadow_stack import NULL, ShadowStack
from outsize.capture.guards.trace.user_code import calls_users, is_user_code, is_users_frame, serves_others
from outsize.errors.interruptions import raise_interruption
from outsize.program.source_line import warn_user

_DECORATORS: Final = 16  # At most so many are looked through.


@final
class ReadTrace:
    """Traces the frames of user code while `active`, and fills `notes`."""

    def __init__(
        self, notes: Notes, frame_of: Callable[[], str], numbers: PlantedNumbers | None = None
    ) -> None:
        """`frame_of` names the module whose code runs; `numbers` are followed meanwhile."""
        self.notes = notes
        self.failure: Exception | None = None
        self._reads = EntryReads(notes, frame_of)
        self._instructions = Instructions(self._reads, numbers)
        self._frames: dict[FrameType, ShadowStack] = {}
        self._is_users: dict[CodeType, bool] = {}
        self._is_active = self._is_on = False
        self._is_collecting = False  # Python collects garbage, and calls finalizers and callbacks meanwhile.
        self._thread = get_ident()  # From Python 3.12 on there are events of all threads.
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

    def may_follow(self, code: CodeType) -> bool:
        """Answers whether this is user code."""
        is_users = self._is_users.get(code)
        if is_users is None:
            is_users = self._is_users[code] = is_user_code(code)
        return is_users

    def follows(self, frame: FrameType) -> bool:
        """Begins to follow a frame of user code that the user's code has called, or that outsize calls."""
        code = frame.f_code
        if self._is_collecting or self.failure is not None:
            return False
        if not self.may_follow(code) or not is_users_frame(frame):
            return False
        if frame not in self._frames:
            caller = self._frames.get(frame.f_back) if frame.f_back is not None else None
            if caller is None and (
                get_ident() != self._thread
                or not calls_users(frame.f_back)
                or serves_others(code.co_filename)
            ):
                return False
            functions = self._functions_of(frame, UNKNOWN if caller is None else caller.callee)
            self._frames[frame] = ShadowStack(code, functions)
            for function in functions:
                self._note_function(function, frame)
        return True

    def on_instruction(self, frame: FrameType, offset: int) -> None:
        """Follows the instruction that is about to run; where that fails the trace ends with a warning."""
        state = self._frames.get(frame)
        if state is None:
            return
        try:
            self._instructions.run(frame, state, offset)
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
            state.clear()

    def on_return(self, frame: FrameType, value: Any) -> None:
        """Ends to follow a frame."""
        state = self._frames.pop(frame, None)
        if state is not None:
            self._on_return(frame, state, value)

    def _on_return(self, frame: FrameType, state: ShadowStack, value: Any) -> None:
        state.clear()
        caller = self._frames.get(frame.f_back) if frame.f_back is not None else None
        is_plain = not state.code.co_flags & (0x20 | 0x80 | 0x200) and state.code.co_name != "__init__"
        if caller is not None and is_plain:
            caller.got(value)

    def _functions_of(self, frame: FrameType, callee: Any) -> list[FunctionType]:
        """Returns the function that runs in the frame, if it lived before the recording; all that it may be
        where it was called out of sight.
        """
        code = frame.f_code
        candidates = [callee.function if isinstance(callee, Method) else callee]
        candidates.append(getattr(candidates[0], "__func__", None))
        if code in self._instructions.born:
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
        site = self._reads.site(frame, f"{function.__qualname__}.__code__")
        self.notes.read(Place("attribute", function, "__code__"), site)
        for name in ("__defaults__", "__kwdefaults__"):
            defaults = getattr(function, name)
            if defaults:
                site = self._reads.site(frame, f"{function.__qualname__}.{name}")
                self.notes.read(Place("attribute", function, name), site)
                self.notes.content(defaults, site)


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


def _may_run_in(frame: FrameType, function: FunctionType) -> bool:
    """Returns whether a function has the frame's code, and holds what the frame's free variables are."""
    code, values = frame.f_code, frame.f_locals
    if function.__code__ is not code:
        return False
    held = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return all(_content(cell) is values.get(name, NULL) for name, cell in held)


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
        return NULL
