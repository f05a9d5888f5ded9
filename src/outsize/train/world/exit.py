"""Ends a process of a run without waiting for its peers, and without an abort in gloo's threads.

Two properties of torch's gloo process group make an ordinary interpreter exit unsafe:

- its destructor waits for the collectives in flight, which after a failure never end: a hang;
- its threads drop their last tensors a moment after the collective; they need the interpreter for that, and
  once it is being shut down the process aborts (`terminate called without an active exception`, seen in
  half of the runs that end right after a collective; pytorch pull request 179291).

So a worker runs the exit handlers, flushes what is open, and leaves without finalizing the interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from outsize.errors import OutsizeError
from outsize.train.world.failure import shown, write_failure

INTERRUPTED = 128 + int(signal.SIGINT)
GLOO_THREADS_S = 0.05
RANK_0_SAYS_S = 1.0


def end_well_outside_workers(error_file: Path | None, rank: int) -> None:
    """Installs an orderly exit for a process that plain python or torchrun started, once it is in a group.

    An uncaught exception prints as before, an error of outsize as one line; it goes to `error_file` (torch
    elastic's), and ends the process at once. An error that all ranks raise is printed by rank 0 alone. Any
    other end destroys the default group before the interpreter shuts down.
    """
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        status = exit_code(error)
        if isinstance(error, OutsizeError) and error.shared and rank > 0:
            time.sleep(RANK_0_SAYS_S)  # launchers end all ranks as soon as one has ended
            end_now(status)
        if isinstance(error, OutsizeError):
            os.write(2, f"{shown(error)}\n".encode(errors="backslashreplace"))
        else:
            show(kind, error, tb)
        if error_file is not None and status != INTERRUPTED:
            write_failure(error_file, error, status)
        end_now(status)

    sys.excepthook = hook
    atexit.register(_destroy_group)


def exit_code(error: BaseException) -> int:
    """Returns Python's exit code: `sys.exit()` is 0, `sys.exit(3)` is 3, `sys.exit("text")` and exceptions
    are 1.
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return error.exit_code if isinstance(error, OutsizeError) else 1


def end_now(status: int) -> None:
    """Ends the process: runs exit handlers and flushes, but no destructors; a good end waits for threads."""
    try:
        if status == 0:
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - what a normal exit calls
        else:
            atexit.unregister(_destroy_group)  # destroying the group would wait for the peers
        atexit._run_exitfuncs()
        _flush_open_files()
    finally:
        os._exit(status)


def _destroy_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(GLOO_THREADS_S)  # the group's threads still run if the script holds it


def _flush_open_files() -> None:
    """Flushes files that the script left open, as a normal exit would."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(Exception):
                thing.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
