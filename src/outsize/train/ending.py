"""How a process of a run ends: without waiting for its peers, and without tripping over gloo's threads.

Two properties of torch's gloo process group make an ordinary interpreter exit unsafe:
- its destructor waits for the collectives in flight, which after a failure never end: a hang;
- its threads drop their last tensors a moment after the collective; they need the interpreter for that, and
  once it is being taken down the process aborts (`terminate called without an active exception`, seen in
  half of the runs that end right after a collective; pytorch pull request 179291).
So a worker runs the exit handlers, flushes what is open, and leaves without tearing the interpreter down.
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
from outsize.train.failure import shown, write_failure

INTERRUPTED = 128 + int(signal.SIGINT)
GLOO_THREADS_S = 0.05
RANK_0_SAYS_S = 1.0


def end_well_outside_workers(error_file: Path | None, rank: int) -> None:
    """For a process that plain python or torchrun has started, once it has joined a group.

    An uncaught exception prints as before, an error of outsize as one line; it goes to `error_file` (torch
    elastic's), and ends the process at once. What every rank raises alike only rank 0 says. Any other end
    destroys the default group before the interpreter goes down.
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
    """As Python itself: `sys.exit()` is 0, `sys.exit(3)` is 3, `sys.exit("text")` and exceptions are 1."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return error.exit_code if isinstance(error, OutsizeError) else 1


def end_now(status: int) -> None:
    """Leave with `status`: exit handlers and flushes yes, destructors no; a good end waits for threads."""
    try:
        if status == 0:
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - what a normal exit calls
        else:
            atexit.unregister(_destroy_group)  # it would wait for the peers
        atexit._run_exitfuncs()
        _flush_open_files()
    finally:
        os._exit(status)


def _destroy_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(GLOO_THREADS_S)  # someone may still hold the group, then destroying did not join its threads


def _flush_open_files() -> None:
    """Files that the script left open are flushed, as a normal exit would."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(Exception):
                thing.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
