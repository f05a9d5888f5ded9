"""Keeps other cores of the host busy while units are timed, as the other ranks of a step would.

    parent     core 1: fork, wait until every neighbour has done a lap, time laps, end the neighbours
    neighbour  core 2, 3, ...: lap, lap, lap, ... over weights of its own

Ranks on one host share caches and the bandwidth of memory, so a unit takes longer beside others than alone:
how much longer depends on how much memory it moves, which only the unit itself shows. A neighbour is a fork
that runs what is timed, so it needs neither a second model nor its code. It ends with its parent.
"""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

Lap = Callable[[], object]
PATIENCE_S: Final = 120.0


@contextmanager
def neighbours(lap_of: Callable[[], Lap], cores: Sequence[int]) -> Iterator[int]:
    """Runs laps on each of these cores during the context, which begins once each has done one.

    `lap_of` is called in the neighbour and makes its lap. Yields how many there are: fewer where one has
    failed, and none where the system cannot fork.
    """
    pairs = [_forked(lap_of, core) for core in cores] if hasattr(os, "fork") else []
    try:
        yield sum(_has_begun(pipe) for _, pipe in pairs)
    finally:
        for pid, pipe in pairs:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(pipe)


def _has_begun(pipe: int) -> bool:
    """Tells whether a neighbour has done a lap; one that takes `PATIENCE_S` for it does not count."""
    return bool(select.select([pipe], [], [], PATIENCE_S)[0]) and os.read(pipe, 1) == b"."


def _forked(lap_of: Callable[[], Lap], core: int) -> tuple[int, int]:
    """Returns a neighbour's process, and the pipe that says when it has done a lap or has failed."""
    reads, writes = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads; it computes alone
        pid = os.fork()
    if pid:
        os.close(writes)
        return pid, reads
    try:
        os.close(reads)
        os.sched_setaffinity(0, {core})
        lap = lap_of()
        lap()
        os.write(writes, b".")
        os.close(writes)
        while os.getppid() == parent:
            lap()
    finally:
        os._exit(0)
