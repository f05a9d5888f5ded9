"""Starts workers as forks of one process that has imported torch and outsize already.

A run that may start its workers again (`--max-restarts`) would import both in each worker of each attempt,
which takes 4 s of CPU time per worker: most of the time from a fault to the next step. One server process
imports them once, before the first attempt, and each worker is a fork of it:

    launcher  -- JSON line: arguments, environment, output files -->  server     (a socket pair)
              <- JSON line: pid; later pid and exit code            --

The server has used no thread and no accelerator, so a fork of it is as good as a fresh interpreter. It ends
when the launcher closes the socket or dies. As with Python's own `multiprocessing.forkserver`, variables that
torch reads while it is imported (OMP_NUM_THREADS) have to be set outside of the script.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

from outsize.train.world.failure import KILLED

_SERVER: Final = "outsize.ops.launch.worker"
_POLL_S: Final = 0.01
_END_S: Final = 5.0


def can_serve_forks() -> bool:
    """Tells whether forks of a process with torch can compute: on Linux."""
    return sys.platform == "linux"


@final
class ForkServer:
    """The launcher's end: starts workers, and learns how they have ended."""

    def __init__(self, environment: Mapping[str, str], folder: Path, preloads: Sequence[str] = ()) -> None:
        """Starts the server in this environment; the first worker waits until it has imported all, and the
        modules `preloads`, which start no thread.

        It removes the launcher's temporary `folder` when the launcher is gone.
        """
        ours, theirs = socket.socketpair()
        number = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _SERVER, "serve", str(number), str(folder), *preloads],
            env=environment,
            pass_fds=[number],
            start_new_session=True,
        )
        theirs.close()
        self._socket, self._unread = ours, b""
        self._started: list[int] = []
        self._exit_codes: dict[int, int] = {}

    @property
    def pid(self) -> int:
        """Returns the process id of the server."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Tells whether it can start workers."""
        return self._process.poll() is None

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], outputs: Sequence[str | None]
    ) -> ForkedProcess | None:
        """Starts a worker with worker.py's arguments; `outputs` are files for stdout and stderr, or None.

        Returns None where the server has died.
        """
        order = {"arguments": [*arguments], "environment": dict(environment), "outputs": [*outputs]}
        try:
            self._socket.sendall(f"{json.dumps(order)}\n".encode())
            while not self._started:
                if not self._listen():
                    return None
        except OSError:
            return None
        return ForkedProcess(self._started.pop(), self)

    def exit_code_of(self, pid: int) -> int | None:
        """Returns how a worker has ended, as subprocess gives it; None while it runs."""
        with contextlib.suppress(OSError):
            while pid not in self._exit_codes and select.select([self._socket], [], [], 0)[0]:
                if not self._listen():
                    break
        if pid not in self._exit_codes and not self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # nobody could tell how it ends
            self._exit_codes[pid] = KILLED
        return self._exit_codes.get(pid)

    def close(self) -> None:
        """Ends the server, which kills the workers that still run."""
        self._socket.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it still imports
            self._process.kill()
            self._process.wait()

    def _listen(self) -> bool:
        """Waits for news of the server and notes them; returns False where it has died."""
        data = self._socket.recv(65536)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            told: dict[str, int] = json.loads(line)
            if "exit_code" in told:
                self._exit_codes[told["pid"]] = told["exit_code"]
            else:
                self._exit_codes.pop(told["pid"], None)  # of a worker that had the same number
                self._started.append(told["pid"])
        return bool(data)


@final
class ForkedProcess:
    """A worker that the server has forked, with those methods of subprocess.Popen that elastic calls."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid, self._server = pid, server

    @property
    def returncode(self) -> int | None:
        """Returns the exit code, negative for a signal; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while it runs."""
        return self._server.exit_code_of(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code once it has ended. Raises TimeoutExpired after `timeout` seconds."""
        end_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end_s is not None and time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return code
