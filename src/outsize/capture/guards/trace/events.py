"""Tells a trace which instruction is about to run, in frames of the user's code alone.

    Python 3.11            sys.settrace with f_trace_opcodes; switched off around code that is not the user's
    Python 3.12 and later  sys.monitoring: instructions of chosen code objects, beside debuggers and coverage

From 3.12 on `sys.settrace` would make every instruction of the process slow, and each switch costs another
pass over all code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final, Protocol, final

_MONITORING: Final[Any] = getattr(sys, "monitoring", None)
_NAME: Final = "outsize"
_TOOLS: Final = (4, 3, 5, 2)  # Numbers that are neither a debugger's nor coverage's come first.


class Follower(Protocol):
    """Receives the events of the frames that it follows."""

    def follows(self, frame: FrameType) -> bool:
        """Answers whether a frame that begins (or goes on after a yield) is followed."""
        ...

    def may_follow(self, code: CodeType) -> bool:
        """Answers whether a frame of this code can be followed at any time."""
        ...

    def on_instruction(self, frame: FrameType, offset: int) -> None:
        """Takes note of the instruction that is about to run."""
        ...

    def on_exception(self, frame: FrameType) -> None:
        """Takes note of an exception in a frame."""
        ...

    def on_return(self, frame: FrameType, value: Any) -> None:
        """Takes note of the end of a frame, or of its pause at a yield."""
        ...


class Events(Protocol):
    """A source of events, which can be switched off and on while it is active."""

    def active(self) -> Any:
        """Returns the context within which there are events."""
        ...

    def switch(self, *, on: bool) -> None:
        """Sends events from now on, or none."""
        ...


def events_for(follower: Follower) -> Events:
    """Returns the source of events that this version of Python has."""
    return SetTrace(follower) if _MONITORING is None else Monitoring(follower)


@final
class SetTrace:
    """Events of `sys.settrace`; a debugger's or coverage's own trace function is put back at the end."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    @contextmanager
    def active(self) -> Iterator[None]:
        """Sends events within the context."""
        before = sys.gettrace()
        sys.settrace(self.on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def switch(self, *, on: bool) -> None:
        """Sends events from now on, or none."""
        sys.settrace(self.on_call if on else None)

    def on_call(self, frame: FrameType, event: str, _arg: Any) -> Any:
        """Is called when a frame begins."""
        if event != "call" or not self._follower.follows(frame):
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self.on_event

    def on_event(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Is called for the other events of a frame that is followed."""
        if event == "opcode":
            self._follower.on_instruction(frame, frame.f_lasti)
        elif event == "exception":
            self._follower.on_exception(frame)
        elif event == "return":
            self._follower.on_return(frame, arg)
        return self.on_event


@final
class Monitoring:
    """Events of `sys.monitoring`; instructions only in the code objects that are followed."""

    def __init__(self, follower: Follower) -> None:
        self._follower, self._is_on = follower, False
        self._codes: dict[CodeType, int] = {}  # With the events that they had before.

    @contextmanager
    def active(self) -> Iterator[None]:
        """Sends events within the context."""
        self._tool = _own_tool()
        before = [_MONITORING.register_callback(self._tool, e, f) for e, f in self._callbacks()]
        events = _MONITORING.events
        global_before = _MONITORING.get_events(self._tool)
        _MONITORING.set_events(self._tool, events.PY_START | events.PY_UNWIND | events.RAISE)
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False
            for code, events_before in self._codes.items():
                _MONITORING.set_local_events(self._tool, code, events_before)
            self._codes.clear()
            _MONITORING.set_events(self._tool, global_before)
            for (event, _), callback in zip(self._callbacks(), before, strict=True):
                _MONITORING.register_callback(self._tool, event, callback)

    def switch(self, *, on: bool) -> None:
        """Sends events from now on, or none."""
        self._is_on = on

    def _callbacks(self) -> list[tuple[int, Any]]:
        events = _MONITORING.events
        return [
            (events.PY_START, self._on_start),
            (events.PY_RESUME, self._on_start),
            (events.INSTRUCTION, self._on_instruction),
            (events.PY_RETURN, self._on_return),
            (events.PY_YIELD, self._on_return),
            (events.PY_UNWIND, self._on_unwind),
            (events.RAISE, self._on_raise),
        ]

    def _on_start(self, code: CodeType, _offset: int) -> Any:
        if not self._follower.may_follow(code):
            return _MONITORING.DISABLE
        if self._is_on and self._follower.follows(sys._getframe(1)) and code not in self._codes:
            self._codes[code] = _MONITORING.get_local_events(self._tool, code)
            events = _MONITORING.events
            local = events.INSTRUCTION | events.PY_RETURN | events.PY_YIELD | events.PY_RESUME
            _MONITORING.set_local_events(self._tool, code, local)
        return None

    def _on_instruction(self, _code: CodeType, offset: int) -> None:
        if self._is_on:
            self._follower.on_instruction(sys._getframe(1), offset)

    def _on_return(self, _code: CodeType, _offset: int, value: Any) -> None:
        if self._is_on:
            self._follower.on_return(sys._getframe(1), value)

    def _on_unwind(self, _code: CodeType, _offset: int, _error: Any) -> None:
        if self._is_on:
            self._follower.on_return(sys._getframe(1), None)

    def _on_raise(self, _code: CodeType, _offset: int, _error: Any) -> None:
        if self._is_on:
            self._follower.on_exception(sys._getframe(1))


def _own_tool() -> int:
    """Returns the tool number of this package, which it takes at the first call."""
    for tool in _TOOLS:
        if _MONITORING.get_tool(tool) == _NAME:
            return tool
    for tool in _TOOLS:
        if _MONITORING.get_tool(tool) is None:
            _MONITORING.use_tool_id(tool, _NAME)
            return tool
    raise RuntimeError("all tool numbers of sys.monitoring are taken")
