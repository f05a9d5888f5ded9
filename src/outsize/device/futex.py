"""Sleeps on a number in shared memory until another process has changed it (Linux, futex(2)).

    wait(word, seen, timeout_s)    returns once the word is not `seen`, somebody calls `wake`, or time is up
    wake(word)                     after the word was changed

The kernel compares and falls asleep atomically, so a change between the look and the sleep is not missed.
Spurious returns are allowed: the caller checks again. It is available on x86-64 alone, because of the system
call's number and because stores become visible in order there: who sees the word sees what was written
before.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Final, final

AVAILABLE: Final = sys.platform == "linux" and platform.machine() == "x86_64"
_FUTEX: Final = 202
_WAIT: Final = 0
_WAKE: Final = 1


@final
class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@final
class Futex:
    """Wraps a 32-bit word at the beginning of a buffer that processes share."""

    def __init__(self, memory: memoryview) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory)
        library = ctypes.CDLL(None)
        self._call, self._yield = library.syscall, library.sched_yield
        self._address = ctypes.byref(self._word)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleeps while the word is `seen`, at most for `timeout_s`; other threads run meanwhile."""
        whole = int(timeout_s)
        limit = _Time(whole, int((timeout_s - whole) * 1e9))
        self._call(_FUTEX, self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)

    def wake(self) -> None:
        """Wakes everybody who sleeps on the word."""
        self._call(_FUTEX, self._address, _WAKE, 1 << 20, None, None, 0)

    def yield_thread(self) -> None:
        """Lets others run before the next look; unlike os.sched_yield, other Python threads as well."""
        self._yield()
