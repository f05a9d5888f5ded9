"""Runs the user's script as `__main__` in a worker process, and ends it in an orderly way.

    python -P -m outsize.train.launch.worker LIFELINE script|module TARGET ARGS...

Compared with `python TARGET ARGS...` a script sees the same `sys.argv`, `sys.path[0]` and `__name__`, and:

- an exception goes to elastic's error file (a crash in C to a file next to it), not to stderr: the launcher
  shows the one that matters;
- the process leaves without finalizing the interpreter (exit.py says why);
- LIFELINE is a named pipe that only the launcher holds open for writing: at its end of file the launcher is
  gone, however it died, and the worker removes its temporary folders and kills its own process group.
"""

from __future__ import annotations

import faulthandler
import io
import os
import runpy
import shutil
import signal
import sys
import threading
from pathlib import Path

from outsize.train.launch.exit import INTERRUPTED, end_now, exit_code
from outsize.train.launch.failure import fault_file, write_failure
from outsize.train.launch.launch import error_file


def main(argv: list[str]) -> None:
    """Runs TARGET and ends the process."""
    lifeline, kind, target, *arguments = argv
    theirs = [Path(lifeline).parent, *(map(Path, arguments) if target.startswith("outsize.") else ())]
    folders = [path for path in theirs if path.name.startswith("outsize-")]
    threading.Thread(target=_die_with_launcher, args=(lifeline, folders), daemon=True).start()
    _write_whole_lines()
    record = error_file()
    if record is not None:
        faulthandler.enable(file=fault_file(record).open("w"), all_threads=False)
    sys.argv = [target, *arguments]
    end_now(_run(kind, target, record))


def _run(kind: str, target: str, record: Path | None) -> int:
    try:
        _execute(kind, target)
    except BaseException as error:
        status = exit_code(error)
        if record is not None and status not in (0, INTERRUPTED):
            write_failure(record, error, status)
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


def _die_with_launcher(lifeline: str, folders: list[Path]) -> None:
    """Waits until the launcher has died; removes its temporary folders, and ends this process group."""
    # Opened without blocking: a launcher that has died already would never open its end.
    descriptor = os.open(lifeline, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    os.read(descriptor, 1)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
