"""Runs a worker of the command line, with all that it starts, up to its end or to a limit of time.

    caller  --FOLDER, a pipe that nobody writes to-->  worker  --> its ranks
    caller  <--FOLDER/output, and the exit code

A worker that crashes, hangs or takes all memory ends alone: its whole process group is killed, and the file
has its last lines. It ends with its caller, too, however that ends, because it sees the end of the pipe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from outsize.cli.processes.job import JobFolder


def run_limited(worker: str, folder: JobFolder, limit_s: float) -> tuple[int | None, str]:
    """Returns the exit code of `outsize.cli.processes.<worker> FOLDER`, None where it was not over in time,
    and what it has written.
    """
    command = [sys.executable, "-m", f"outsize.cli.processes.{worker}", str(folder.path)]
    with (folder.path / "output").open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_group(process)
        output.seek(0)
        return code, output.read().strip()


def end_with_caller() -> None:
    """Ends the process group of this worker when its caller is gone."""
    threading.Thread(target=_wait_for_end, daemon=True).start()


def _wait_for_end() -> None:
    """Waits until nobody holds the other end of this process's input."""
    os.read(0, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the worker's process and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
