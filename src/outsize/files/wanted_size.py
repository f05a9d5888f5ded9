"""Passes on how many processes a user wants a run to have, from `outsize scale` to the run's launcher.

    outsize scale 4711 3      writes 3 to the run's folder         SIGUSR2  ->  launcher 4711 reads it again

The file says what is wanted, and the signal only that it is to be read, so none is lost or counted twice.
Whoever may write to the folder and signal the process, a script or a scheduler's hook, can do the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, final

from outsize.files.run_folders import RunFolder, live_runs

WANTED: Final = "wanted"
_SIGNAL: Final[int | None] = getattr(signal, "SIGUSR2", None)
_CAUGHT: Final = "SigCgt:"


@final
class WantedSize:
    """The size that is wanted of the run in `folder`, once it has been asked for."""

    def __init__(self, folder: RunFolder | None) -> None:
        self._folder, self._is_asked = folder, False

    def note(self, *_: object) -> None:
        """Takes the signal: from now on `asked` reads the file."""
        self._is_asked = True

    def asked(self) -> str | None:
        """Returns what the file says, once after each signal; else None."""
        if not self._is_asked or self._folder is None:
            return None
        self._is_asked = False
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self._folder.path / WANTED).read_text(encoding="utf-8").strip()[:20]
        return None


@contextlib.contextmanager
def size_wanted(folder: RunFolder | None) -> Iterator[WantedSize]:
    """Listens for the signal in the block; only a process's main thread can."""
    wanted = WantedSize(folder)
    if folder is None or _SIGNAL is None or threading.current_thread() is not threading.main_thread():
        yield wanted
        return
    before = signal.signal(_SIGNAL, wanted.note)
    try:
        yield wanted
    finally:
        signal.signal(_SIGNAL, before or signal.SIG_DFL)


def ask_for_size(pid: int, processes: int) -> bool:
    """Asks the run of this process for so many processes; returns False where there is no such run.

    Raises OSError.
    """
    folder = next((one for one in live_runs() if one.pid == pid), None)
    if folder is None or _SIGNAL is None:
        return False
    folder.put(WANTED, str(processes))
    os.kill(pid, _SIGNAL)
    return True


def signal_where_caught(pid: int, send: Callable[[int, int], None] = os.kill) -> bool:
    """Sends the signal to a process that handles it, and tells whether it does.

    It would end another one. Only Linux says which signals a process handles; elsewhere none is sent.
    """
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
        mask = int(next(line for line in lines if line.startswith(_CAUGHT)).removeprefix(_CAUGHT), 16)
        if _SIGNAL is not None and mask >> (_SIGNAL - 1) & 1:
            send(pid, _SIGNAL)
            return True
    return False
