"""Runs the user's script as `__main__` in a worker process, and ends it in an orderly way.

    python -P -m outsize.ops.launch.worker LIFELINE script|module TARGET ARGS...
    python -P -m outsize.ops.launch.worker serve DESCRIPTOR FOLDER MODULES     forks such workers

Compared with `python TARGET ARGS...` a script sees the same `sys.argv`, `sys.path[0]` and `__name__`, and:

- an exception goes to elastic's error file (a crash in C to a file next to it), not to stderr: the launcher
  shows the one that matters;
- the process leaves without finalizing the interpreter (exit.py says why);
- LIFELINE is a named pipe that only the launcher holds open for writing: at its end of file the launcher is
  gone, however it died, and the worker removes its temporary folders and kills its own process group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from outsize.train.world.exit import INTERRUPTED, end_now, exit_code
from outsize.train.world.failure import fault_file, write_failure
from outsize.train.world.join import error_file, peer_copies, set_environment

_PRELOADED: Final = ("numpy", "torch.distributed", "outsize.api.running")
OURS: Final = "outsize.cli."
"""Modules that the command line starts by itself: they are told of folders, and meet by `join` alone."""
_ASKING: Final = ("SIGTERM", "SIGUSR1", "SIGUSR2")
_FOR_OTHERS: Final = tuple(getattr(signal, name) for name in _ASKING if hasattr(signal, name))


def main(argv: list[str]) -> None:
    """Runs TARGET and ends the process."""
    lifeline, kind, target, *arguments = argv
    theirs = [Path(lifeline).parent, *(map(Path, arguments) if target.startswith(OURS) else ())]
    folders = [path for path in theirs if path.name.startswith("outsize-")] + _copies()
    threading.Thread(target=_die_with_launcher, args=(lifeline, folders), daemon=True).start()
    _write_whole_lines()
    record = error_file()
    if record is not None:
        faulthandler.enable(file=fault_file(record).open("w"), all_threads=False)
    end_now(_run(kind, [target, *arguments], record))


def _run(kind: str, argv: Sequence[str], record: Path | None) -> int:
    try:
        execute(kind, argv)
    except BaseException as error:
        status = exit_code(error)
        if record is not None and status not in (0, INTERRUPTED):
            write_failure(record, error, status)
        return status
    return 0


def execute(kind: str, argv: Sequence[str]) -> None:
    """Runs a "module" or a "script", argv[0], as `__main__` with what Python gives it."""
    target = argv[0]
    sys.argv = list(argv)
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")


def _copies() -> list[Path]:
    """Returns the launcher's folder for copies in memory, if it has one."""
    copies = peer_copies()
    return [] if copies is None else [copies.folder]


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


def serve(descriptor: int, folder: Path, preloads: Sequence[str] = ()) -> None:
    """Forks workers as the launcher orders them, and tells how they end, until the launcher is gone.

    Then it kills those that still run (one that is stopped cannot end by itself) and removes the launcher's
    temporary folder. Signals that ask a run to end are for the launcher and the workers: Slurm sends them to
    every process of a job, and without this one nobody could tell how the workers have ended.
    """
    for number in _FOR_OTHERS:
        signal.signal(number, signal.SIG_IGN)
    for name in (*_PRELOADED, *preloads):
        __import__(name)
    gc.collect()
    gc.freeze()  # forks share these pages as long as no collection writes to them
    channel = socket.socket(fileno=descriptor)
    stream = channel.makefile("rw", encoding="utf-8")
    awake, wake = os.pipe()
    for end in (awake, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([channel, awake], [], [])
        with contextlib.suppress(OSError):
            if awake in ready:
                os.read(awake, 4096)
                _tell_ends(stream, running)
            if channel in ready:
                line = stream.readline()
                if not line:
                    for pid in running:
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.killpg(pid, signal.SIGKILL)
                    for each in (folder, *_copies()):
                        shutil.rmtree(each, ignore_errors=True)
                    return
                pid = _fork(json.loads(line), [channel.fileno(), awake, wake])
                running.add(pid)
                _tell(stream, {"pid": pid})
                _tell_ends(stream, running)  # of one that ended before its pid was told


def _tell_ends(stream: IO[str], running: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            running.discard(pid)
            _tell(stream, {"pid": pid, "exit_code": os.waitstatus_to_exitcode(status)})


def _tell(stream: IO[str], facts: Mapping[str, int]) -> None:
    stream.write(json.dumps(facts) + "\n")
    stream.flush()


def _fork(order: Mapping[str, Any], ours: Sequence[int]) -> int:
    """Returns the pid of a new worker, once it has a session of its own, so that its group can be killed."""
    ready, started = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(ready)
        os.close(started)
        _work(order, ours)
    os.close(started)
    os.read(ready, 1)
    os.close(ready)
    return pid


def _work(order: Mapping[str, Any], ours: Sequence[int]) -> NoReturn:
    """Becomes the worker; the process ends here whatever happens."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *_FOR_OTHERS):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in ours:
            os.close(descriptor)
        for descriptor, path in zip((1, 2), order["outputs"], strict=True):
            if path is not None:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, descriptor)
                os.close(file)
        set_environment(order["environment"])
        import numpy as np

        np.random.seed()  # Python's own generator does so by itself after a fork
        main(order["arguments"])
    finally:
        os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        main(sys.argv[1:])
