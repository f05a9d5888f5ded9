"""Start the workers of one machine, watch them, and end them all when one fails or the user says so.

    start --> watch --+-- all ended with 0 ----------------------------> 0
                      +-- one failed --> settle --> end(SIGTERM) ------> its Failure
                      +-- a signal came ---------> end(that signal) ---> 128 + signal

`settle` is the moment in which the other ranks' failures arrive, so that the first can be told from its
consequences. `end` signals the workers that still run, waits `grace_s` seconds, then kills each worker's
whole process group (data-loader processes too). A second signal from the user skips the wait.

Each worker leads a session of its own, so the Ctrl-C of a terminal reaches the launcher alone. Rank 0 has
the launcher's own stdin, stdout and stderr, so a progress bar still sees the terminal; the lines of every
other rank pass through a pipe and come out whole, prefixed with `[rank] `.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, final

from outsize.train.failure import Failure, WorkerFiles, read_failure

POLL_S = 0.05
SETTLE_S = 0.3
STDOUT, STDERR = 1, 2


@final
@dataclass(frozen=True)
class Worker:
    """A running rank of this machine."""

    process: subprocess.Popen[bytes]
    files: WorkerFiles
    pumps: tuple[threading.Thread, ...]

    @property
    def runs(self) -> bool:
        """Whether the process has not ended yet."""
        return self.process.poll() is None

    @property
    def failed(self) -> bool:
        """Whether it ended badly, or is about to (its record is written before its exit handlers run)."""
        return self.process.poll() not in (None, 0) or self.files.error.exists()

    def failure(self) -> Failure:
        """How it failed."""
        return read_failure(self.files, pid=self.process.pid, exit_code=self.process.poll())


def start(command: Sequence[str], env: Mapping[str, str], files: WorkerFiles, lifeline: int) -> Worker:
    """Start one worker with exactly `env`; the file descriptor `lifeline` stays open in it."""
    plain = files.rank == 0
    process = subprocess.Popen(
        command,
        env=env,
        stdin=None if plain else subprocess.DEVNULL,
        stdout=None if plain else subprocess.PIPE,
        stderr=None if plain else subprocess.PIPE,
        pass_fds=(lifeline,),
        start_new_session=True,
    )
    outlets = ((process.stdout, STDOUT), (process.stderr, STDERR))
    pumps = tuple(_pump(pipe, fd, f"[{files.rank}] ".encode()) for pipe, fd in outlets if pipe is not None)
    return Worker(process, files, pumps)


def watch(workers: Sequence[Worker], signals: Sequence[int]) -> list[Failure]:
    """Return when all ended well or a signal came (no failures), or shortly after the first failure."""
    while not signals:
        if any(worker.failed for worker in workers):
            _wait(workers, SETTLE_S, lambda: bool(signals))
            return [worker.failure() for worker in workers if worker.failed]
        if not any(worker.runs for worker in workers):
            break
        time.sleep(POLL_S)
    return []


def end(workers: Sequence[Worker], signum: int, grace_s: float, signals: Sequence[int]) -> None:
    """End every worker and its children; waits at most `grace_s` seconds."""
    asked = len(signals)
    for worker in workers:
        if worker.runs and not worker.failed:
            worker.process.send_signal(signum)
    _wait(workers, grace_s, lambda: len(signals) > asked)
    for worker in workers:
        _kill_group(worker)


def kill(workers: Sequence[Worker]) -> None:
    """End at once what still runs."""
    for worker in workers:
        if worker.runs:
            _kill_group(worker)


def drain(workers: Sequence[Worker], timeout_s: float = 1.0) -> None:
    """Let the last lines through; a child that kept a pipe open does not hold the launcher."""
    for pump in (pump for worker in workers for pump in worker.pumps):
        pump.join(timeout_s)


@contextlib.contextmanager
def lifeline() -> Iterator[int]:
    """The read end of a pipe that this process alone can write to: its end of file tells that we are gone."""
    ours, held = os.pipe()
    try:
        yield ours
    finally:
        os.close(ours)
        os.close(held)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """The signals that ask the launcher to stop, in order of arrival, instead of their usual effect.

    An ignored signal (nohup) stays ignored; outside the main thread, which alone may do this, none is caught.
    """
    arrived: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        arrived.append(signum)

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    in_main = threading.current_thread() is threading.main_thread()
    mine = [one for one in wanted if in_main and signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, note) for one in mine}
    try:
        yield arrived
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def say(text: str, fd: int = STDERR) -> None:
    """Write `text` and a line end to the launcher's own stderr, in one piece."""
    _write(fd, text.encode(errors="backslashreplace") + b"\n")


def _wait(workers: Sequence[Worker], timeout_s: float, give_up: Callable[[], bool]) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not give_up() and any(worker.runs for worker in workers):
        time.sleep(POLL_S)


def _kill_group(worker: Worker) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()


def _pump(pipe: IO[bytes], fd: int, prefix: bytes) -> threading.Thread:
    def forward() -> None:
        for line in pipe:
            _write(fd, prefix + line if line.endswith(b"\n") else prefix + line + b"\n")

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    return thread


def _write(fd: int, data: bytes) -> None:
    # a reader that went away (`| head`) must not stop the draining of the pipes
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data) :]
