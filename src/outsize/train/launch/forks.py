"""Runs ranks as forks of this process, for work whose objects cannot be sent to a fresh interpreter.

A fork has what the caller has: classes of `__main__` or of a notebook, lambdas, parametrized modules, and
tables that a library filled while the model was built. Each rank works in a new thread of its fork, because
the threads of libgomp that the caller has used do not exist there, and the main thread would wait for them.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from outsize.errors import OutsizeError, RankFailed, error_of
from outsize.files.replace import replace_text
from outsize.train.launch.exit import exit_code
from outsize.train.launch.failure import Failure, first_failure, read_failure, write_failure
from outsize.train.launch.launch import take_place
from outsize.train.launch.spec import private_folder

GRACE_S = 5.0  # how long the other ranks may take to end after a failure


def can_fork() -> bool:
    """Returns whether forks of this process can compute: on Linux, without an accelerator or a group of
    ranks.
    """
    import torch
    import torch.distributed as dist

    is_in_run = dist.is_available() and dist.is_initialized()
    is_child = multiprocessing.current_process().daemon
    return sys.platform == "linux" and not (torch.accelerator.is_available() or is_in_run or is_child)


def run_in_forks(ranks: int, work: Callable[[], None]) -> None:
    """Calls `work` in so many forks, in which `join` finds the place of each; returns when all have ended.

    The first rank that fails ends the others. Its traceback goes to stderr, and RankFailed is raised; an
    error of outsize is raised itself.
    """
    with private_folder("outsize-") as folder:
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_run_rank, args=(folder, rank, ranks, work), daemon=True)
            for rank in range(ranks)
        ]
        try:
            with warnings.catch_warnings():
                # Newer Pythons warn where the caller has threads; nothing of theirs is waited for here.
                warnings.simplefilter("ignore", DeprecationWarning)
                for process in processes:
                    process.start()
            _wait(processes)
            _insist_on_success(folder, processes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _wait(processes: Sequence[ForkProcess]) -> None:
    """Returns when all have ended, or a moment after one of them has failed."""
    grace_s: float | None = None
    while running := [process.sentinel for process in processes if process.exitcode is None]:
        ended = wait(running, grace_s)
        if grace_s is not None and not ended:
            return
        if any(process.exitcode for process in processes):
            grace_s = GRACE_S


def _insist_on_success(folder: Path, processes: Sequence[ForkProcess]) -> None:
    failures: list[Failure] = []
    for rank, process in enumerate(processes):
        record, pid = folder / f"{rank}.json", process.pid or 0
        failure = read_failure(record, rank=rank, pid=pid, exit_code=process.exitcode)
        failures += [failure] if failure is not None else []
    if not failures:
        return
    first = first_failure(failures)
    if first.ours:
        raise error_of(json.loads((folder / f"{first.rank}.fields").read_text(encoding="utf-8")))
    sys.stderr.write(first.shown)
    raise RankFailed(
        first.told(len(processes)),
        numbers=f"{first.ending}, pid {first.pid}",
        next_step="see its traceback above",
    )


def _run_rank(folder: Path, rank: int, ranks: int, work: Callable[[], None]) -> None:
    """Works in a new thread of this fork, records its error, and ends with its exit code."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            take_place(rank, ranks, folder / "store")
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    for error in errors:
        if isinstance(error, OutsizeError):
            replace_text(folder / f"{rank}.fields", json.dumps(error.fields()))
        write_failure(folder / f"{rank}.json", error, exit_code(error))
        sys.exit(exit_code(error))
