"""Removes the temporary folder of a process that is killed, whatever it was doing.

    launcher   makes its folder, forks the guard, imports torch (seconds), starts workers, ...
    guard      reads a pipe whose other end the launcher alone has: at its end, however that came, it removes
               the folder and ends

Workers remove the folder, too, but a launcher may die before it has any.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

_PATIENCE_S, _PAUSE_S = 10.0, 0.1
_DESCRIPTORS: Final = 1 << 16
_IGNORED: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


@contextlib.contextmanager
def removed_at_death(folder: Path, root: Path | None = None) -> Iterator[None]:
    """Has another process remove the folder at the end of the block, or of this process.

    `root`, which may have such folders of several processes, goes with the last of them.
    """
    if not hasattr(os, "fork"):
        yield
        return
    ours, theirs = os.pipe()
    guard = os.fork()
    if guard == 0:
        _wait_and_remove(folder, root, ours)
    os.close(ours)
    process = os.getpid()
    try:
        yield
    finally:
        os.close(theirs)
        if os.getpid() == process:  # else this is a fork, which has no guard
            with contextlib.suppress(ChildProcessError):
                os.waitpid(guard, 0)


def _wait_and_remove(folder: Path, root: Path | None, pipe: int) -> NoReturn:
    try:
        os.setsid()
        for name in _IGNORED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(pipe, 0)
        for output in (1, 2):  # Who reads the launcher's output does not wait for the guard.
            os.dup2(nowhere, output)
        os.closerange(3, _DESCRIPTORS)
        os.read(0, 1)
        end_s = time.monotonic() + _PATIENCE_S
        while folder.exists() and time.monotonic() < end_s:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(_PAUSE_S * folder.exists())  # Workers that still write there end, too.
        if root is not None:
            with contextlib.suppress(OSError):
                root.rmdir()
    finally:
        os._exit(0)
