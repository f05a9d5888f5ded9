"""Tells which CPU cores this process may use, and how long a thread has waited for one, where the system
says so (Linux).
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, final

_OF_THIS_THREAD: Final = "/proc/thread-self/schedstat"
_NANOSECONDS: Final = 1e-9


def usable_cores() -> frozenset[int]:
    """Returns the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_wait_s() -> float:
    """Returns how long the calling thread has been ready to run while no core ran it, in seconds since it
    began; 0 where the system does not say.

    It takes some ten microseconds. The text has three numbers: nanoseconds on a core, nanoseconds in a queue
    for one, and how often it was given one (Linux, Documentation/scheduler/sched-stats.rst).
    """
    with suppress(OSError), open(_OF_THIS_THREAD, "rb", buffering=0) as file:
        return _queued_s(file.fileno())
    return 0.0


@final
class CoreWaits:
    """Reads again and again how long one thread has waited for a core; for the thread that makes it.

    A reading takes a microsecond. Close it in the end.
    """

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(_OF_THIS_THREAD, os.O_RDONLY | os.O_CLOEXEC)

    def seconds(self) -> float:
        """Returns what `core_wait_s` does."""
        return _queued_s(self._file) if self._file >= 0 else 0.0

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _queued_s(file: int) -> float:
    """Returns the seconds that the file of a thread tells."""
    fields = os.pread(file, 96, 0).split()
    return int(fields[1]) * _NANOSECONDS if len(fields) > 1 else 0.0
