"""The entry of a worker process: run the user's script as `__main__`, and end in an orderly way.

    python -P -m outsize.train.worker ERROR_FILE FAULT_FILE LIFELINE_FD script|module TARGET ARGS...

Compared with `python TARGET ARGS...` a script sees the same `sys.argv`, `sys.path[0]` and `__name__`, and:
- an exception goes to ERROR_FILE (a crash in C to FAULT_FILE), not to stderr: the launcher shows
  the one that matters;
- the process leaves without tearing the interpreter down (ending.py says why);
- LIFELINE_FD is the read end of a pipe whose write end the launcher alone holds: at its end of file the
  launcher is gone, however it died, and the worker kills its own process group.
"""

from __future__ import annotations

import faulthandler
import io
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

from outsize.train.ending import INTERRUPTED, end_now, exit_code
from outsize.train.failure import write_failure


def main(argv: list[str]) -> None:
    """Run TARGET and end the process."""
    error_file, fault_file, lifeline, kind, target, *arguments = argv
    threading.Thread(target=_die_with_launcher, args=(int(lifeline),), daemon=True).start()
    _write_whole_lines()
    faulthandler.enable(file=Path(fault_file).open("w"), all_threads=False)  # noqa: SIM115 - open until the end
    sys.argv = [target, *arguments]
    end_now(_run(kind, target, Path(error_file)))


def _run(kind: str, target: str, error_file: Path) -> int:
    try:
        _execute(kind, target)
    except BaseException as error:
        status = exit_code(error)
        if status not in (0, INTERRUPTED):
            write_failure(error_file, error, status)
        return status
    return 0


def _execute(kind: str, target: str) -> None:
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")


def _write_whole_lines() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _die_with_launcher(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
