"""What macOS and Windows lack is hidden from a process of Linux, so that tests see what is done without it.

Only what outsize itself would use is taken away: `/proc` as pathlib and os open it (psutil, which has its own
ways on each system, still reads it), functions of `os`, signals, modules. torch and the standard library
have to be imported before Windows is hidden from, because they choose by `sys.platform`.
"""

from __future__ import annotations

import io
import os
import platform
import signal
import sys
from collections.abc import Callable
from typing import Any

MACOS = (
    "memfd_create",
    "sched_getaffinity",
    "sched_setaffinity",
    "posix_fallocate",
)
WINDOWS = (
    *MACOS,
    *("fork", "forkpty", "killpg", "getpgrp", "setsid", "mkfifo", "statvfs", "sysconf", "geteuid", "getuid"),
    *("O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "WNOHANG", "fchmod", "posix_fadvise", "uname"),
)
SIGNALS = ("SIGKILL", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGSTOP", "SIGCONT")
MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty")


def hide_proc() -> None:
    """Makes `/proc` a folder that is not there, for pathlib and the functions of os."""

    def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *more: Any, **named: Any) -> Any:
            if not isinstance(path, int) and os.fsdecode(path).startswith("/proc"):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return function(path, *more, **named)

        return call

    io.open = hidden(io.open)
    for name in ("open", "readlink", "stat"):
        setattr(os, name, hidden(getattr(os, name)))


def hide_futexes() -> None:
    """Makes this another processor, before outsize is imported; there futexes are not used."""
    platform.machine = lambda: "arm64"


def hide_macos_lacks() -> None:
    """Hides all that macOS lacks."""
    hide_proc()
    hide_futexes()
    for name in MACOS:
        delattr(os, name)


def hide_windows_lacks() -> None:
    """Hides all that Windows lacks."""
    hide_proc()
    hide_futexes()
    for name in WINDOWS:
        delattr(os, name)
    for name in SIGNALS:
        delattr(signal, name)
    for name in MODULES:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]
