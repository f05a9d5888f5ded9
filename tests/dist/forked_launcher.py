"""`run_script` in a fork of this process, which has torch already; a new interpreter costs a second."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from forked_python import preload
from patience import until

from outsize.ops.launch.launch import run_script


@final
@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@final
@dataclass
class ForkedLauncher:
    """A launcher in `folder`, whose streams go to files there; `code` once it has been waited for."""

    pid: int
    out: Path
    err: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def finish(self) -> Result:
        """Wait for its end."""
        until(
            lambda: self.poll() is not None,
            lambda: f"runs on: {self.out.read_text()}\n{self.err.read_text()}",
        )
        assert self.code is not None
        return Result(self.code, self.out.read_text(), self.err.read_text())

    def send_signal(self, signum: int) -> None:
        """To the launcher alone."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def clean_up(self) -> None:
        """After a failed test: the workers notice that it has gone."""
        self.send_signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            self.finish()


def launch_in_fork(
    folder: Path,
    argv: Sequence[str],
    nproc: int,
    *options: str,
    env: Mapping[str, str] | None = None,
    name: str = "launcher",
) -> ForkedLauncher:
    """`outsize run OPTIONS ARGV` over `nproc` processes, in `folder`, with `env` beside what is set."""
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    for path in (out, err):
        path.touch()
    preload()
    pid = os.fork()
    if pid:
        return ForkedLauncher(pid, out, err)
    code = 70
    try:
        gc.freeze()
        for fd, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.chdir(folder)
        os.environ.update(env or {})
        tempfile.tempdir = None  # It is found anew, by TMPDIR.
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits an ignored one
        code = run_script(argv, nproc, options=options)
    except BaseException as error:
        os.write(2, f"{''.join(traceback.format_exception(error))}".encode())
    finally:
        os._exit(code)
