"""How a process of a run ends after an exception: recorded, and without waiting for its peers.

The destructor of a gloo process group waits for the collectives in flight; after a failure these never
end, and an ordinary interpreter exit hangs in it. So exit handlers run and then the process leaves at once.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from pathlib import Path
from types import TracebackType

from outsize.errors import OutsizeError
from outsize.train.failure import write_failure

INTERRUPTED = 128 + int(signal.SIGINT)


def install_crash_hook(error_file: Path | None) -> None:
    """Let an uncaught exception print as before, go to torch elastic's `error_file`, and end the process."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        show(kind, error, tb)
        status = exit_code(error)
        if error_file is not None and status != INTERRUPTED:
            write_failure(error_file, error, status)
        end_now(status)

    sys.excepthook = hook


def exit_code(error: BaseException) -> int:
    """As Python itself: `sys.exit()` is 0, `sys.exit(3)` is 3, `sys.exit("text")` and exceptions are 1."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return error.exit_code if isinstance(error, OutsizeError) else 1


def end_now(status: int) -> None:
    """Run the exit handlers and leave without destructors."""
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
