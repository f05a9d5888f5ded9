"""Tells an error of the code that runs from one that interrupts it: an alarm, a timeout of a test, a signal.

    signal.alarm(20)  ->  a handler raises TimeoutError, wherever the program is  ->  whoever set the alarm
                          waits for it

Whoever runs code of a user's has to expect any error, and does something else after one. An error that a
signal's handler has raised says nothing about that code. It is known by its traceback, which ends in the
handler. Oracle: tests/unit/errors/test_interruptions.py.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any


def raise_interruption(error: BaseException) -> None:
    """Raises the error again where a signal's handler has raised it, or one that is its cause."""
    handlers = {code for one in signal.valid_signals() if (code := _code_of(signal.getsignal(one)))}
    cause: BaseException | None = error
    while cause is not None:
        if _passes_through(cause, handlers):
            raise cause
        cause = cause.__cause__


@contextmanager
def suppressed() -> Iterator[None]:
    """Goes on after the block whatever code of a user's has raised in it, but for what interrupts it."""
    try:
        yield
    except Exception as error:
        raise_interruption(error)


def _passes_through(error: BaseException, handlers: set[CodeType]) -> bool:
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code in handlers:
            return True
        frames = frames.tb_next
    return False


def _code_of(handler: Callable[..., Any] | int | None) -> CodeType | None:
    """Returns the code of a handler that is written in Python; None for another one, or for none."""
    while isinstance(handler, partial):
        handler = handler.func
    function: Any = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
