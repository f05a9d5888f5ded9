"""Runs ranks on this machine without a launcher: forks of this process, or new interpreters.

A fork has what the caller has, also what cannot be sent to another process: classes of `__main__` or of a
notebook, lambdas, parametrized modules, and tables that a library filled while the model was built. Each rank
works in a new thread of its fork, because the threads of libgomp that the caller has used do not exist there,
and the main thread would wait for them. Where a fork cannot compute, a rank is an interpreter that runs a
module:

    python -m outsize.train.world.local_ranks FOLDER RANK RANKS MODULE ARGUMENT ...

It ends with the process that has started it, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, final

from outsize.errors import RankFailed, error_of
from outsize.files.private_folder import private_folder
from outsize.train.world.exit import exit_code
from outsize.train.world.failure import Failure, first_failure, read_failure, write_failure
from outsize.train.world.join import take_place

GRACE_S: Final = 5.0  # how long the other ranks may take to end after a failure
_POLL_S: Final = 0.01


class _RankProcess(Protocol):
    """Describes what is asked of the process of a rank."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None:
        """Returns how it has ended; None as long as it runs."""
        ...

    def kill(self) -> None: ...

    def join(self) -> None: ...


@final
class _Interpreter:
    """A new interpreter, which sees by its standard input when this process has ended."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """Kills it, if it still runs."""
        self._process.kill()

    def join(self) -> None:
        """Waits for its end, and closes its standard input."""
        self._process.communicate()


def can_fork(*, of_ranks: bool = False) -> bool:
    """Returns whether forks of this process can compute: on Linux, without an accelerator or a group of
    ranks; `of_ranks` forget the group first (`world.forget_groups`).
    """
    import torch
    import torch.distributed as dist

    is_in_run = not of_ranks and dist.is_available() and dist.is_initialized()
    is_child = multiprocessing.current_process().daemon
    return sys.platform == "linux" and not (torch.accelerator.is_available() or is_in_run or is_child)


def run_in_forks(ranks: int, work: Callable[[], None], *, joins: bool = True) -> None:
    """Calls `work` in so many forks, in which `join` finds the place of each, unless none of them `joins` a
    run; returns when all have ended.

    The first rank that fails ends the others. Its traceback goes to stderr, and RankFailed is raised; an
    error of outsize is raised itself, also the watchdog's, which ends all ranks. Python's generator is in
    each fork what it is here, where Python would seed it anew.
    """
    context, state = multiprocessing.get_context("fork"), random.getstate()

    def run() -> None:
        random.setstate(state)
        work()

    def fork(folder: Path, rank: int) -> _RankProcess:
        place = ranks if joins else 0
        process = context.Process(target=_run_in_thread, args=(folder, rank, place, run), daemon=True)
        with warnings.catch_warnings():
            # Newer Pythons warn where the caller has threads; nothing of theirs is waited for here.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        return process

    _run(ranks, fork)


def run_in_interpreters(ranks: int, module: str, *arguments: str) -> None:
    """Runs `python -m module arguments...` as so many ranks; returns and raises as `run_in_forks` does."""

    def start(folder: Path, rank: int) -> _RankProcess:
        own = (str(folder), str(rank), str(ranks), module, *arguments)
        return _Interpreter(["-P", "-m", __name__, *own])

    _run(ranks, start)


def _run(ranks: int, start: Callable[[Path, int], _RankProcess]) -> None:
    processes: list[_RankProcess] = []
    with private_folder("outsize-") as folder:
        try:
            for rank in range(ranks):
                processes.append(start(folder, rank))
            _wait(processes)
            _insist_on_success(folder, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _wait(processes: Sequence[_RankProcess]) -> None:
    """Returns when all have ended, or a moment after one of them has failed."""
    end_s: float | None = None
    while any(process.exitcode is None for process in processes):
        if end_s is None and any(process.exitcode for process in processes):
            end_s = time.monotonic() + GRACE_S
        if end_s is not None and time.monotonic() > end_s:
            return
        time.sleep(_POLL_S)


def _insist_on_success(folder: Path, processes: Sequence[_RankProcess]) -> None:
    failures: list[Failure] = []
    for rank, process in enumerate(processes):
        record, pid = folder / f"{rank}.json", process.pid or 0
        failure = read_failure(record, rank=rank, pid=pid, exit_code=process.exitcode)
        failures += [failure] if failure is not None else []
    if not failures:
        return
    first = first_failure(failures)
    if first.ours:
        raise error_of(first.fields)
    sys.stderr.write(first.shown)
    raise RankFailed(
        first.told(len(processes)),
        numbers=f"{first.ending}, pid {first.pid}",
        next_step="see its traceback above" if first.shown else "see what it has written above, if anything",
    )


def _run_in_thread(folder: Path, rank: int, ranks: int, work: Callable[[], None]) -> None:
    """Works in a new thread of this fork, and ends it with its exit code."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(_run_rank(folder, rank, ranks, work)))
    thread.start()
    thread.join()
    sys.exit(codes[0])


def _run_rank(folder: Path, rank: int, ranks: int, work: Callable[[], None]) -> int:
    """Works as a rank, one of none without a place; records its error, and returns its exit code."""
    try:
        if ranks:
            take_place(rank, ranks, folder / "store", folder / f"{rank}.json")
        work()
    except BaseException as error:
        write_failure(folder / f"{rank}.json", error, exit_code(error))
        return exit_code(error)
    return 0


def _end_with_parent() -> None:
    """Ends this process when the one that has started it is gone."""
    while os.read(0, 1):  # Not sys.stdin, whose lock this thread would hold when the interpreter ends.
        pass
    os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Runs as `python -m outsize.train.world.local_ranks`; returns the exit code."""
    folder, rank, ranks, module, *rest = arguments
    sys.argv = [module, *rest]
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def work() -> None:
        runpy.run_module(module, run_name="__main__")

    return _run_rank(Path(folder), int(rank), int(ranks), work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
