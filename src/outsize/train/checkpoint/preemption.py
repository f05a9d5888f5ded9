"""Notices that the machine is being taken away, so that the run can save itself after the step.

    SLURM        sbatch --signal=USR1@120, or SIGTERM and SIGKILL after KillWait (30 s)
    Kubernetes   SIGTERM, and SIGKILL after terminationGracePeriodSeconds (30 s)
    outsize run  SIGUSR2: the run goes on with another number of processes

The signal does not reach all ranks, and not in the same step. So ranks agree after each step (timer.py):
where one has been asked to end, all of them end there.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, final

_NAMES: Final = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # of equal rank; Windows has the first alone


@final
class PreemptionWatch:
    """Remembers that a signal has asked this process to end, from its making until `close`.

    Signals that follow change nothing: launchers send one to a process group, and again to each process.
    Only a process's main thread may handle signals; in another nothing is noticed here.
    """

    def __init__(self) -> None:
        self._process, self.received = os.getpid(), 0  # `received` is the signal's number.
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        if threading.current_thread() is threading.main_thread():
            numbers = (getattr(signal, name) for name in _NAMES if hasattr(signal, name))
            self._before = {number: signal.signal(number, self._note) for number in numbers}

    def close(self) -> None:
        """Gives the signals back to those who handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self.received = number
        else:  # A fork (a loader's worker) has no step to finish.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
