"""Reads the bytes that this process has allocated, over time, in a thread during the steps, for a trace's
counter.

CUDA: the caching allocator's count. CPU: glibc's (mallinfo2(3): bytes in use, without what malloc keeps of
freed memory), elsewhere resident bytes. A read costs from microseconds to milliseconds (glibc walks its free
blocks), so the pause between two reads grows with their cost: reading takes at most SHARE of one core.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Self, final

import psutil
import torch

from outsize.device.accelerators import allocated_bytes, is_accelerator
from outsize.ir.timeline import Sample, Timeline

EVERY_S: Final = 0.002
SHARE: Final = 0.02
Reading = tuple[float, int]  # perf_counter, bytes
_COUNTS: Final = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


@final
class _MallInfo(ctypes.Structure):
    """The C struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _COUNTS.split())


@final
class MemoryWatch:
    """Reads the allocated bytes while the block runs; `readings` holds them afterwards."""

    def __init__(self, device: torch.device | None, every_s: float = EVERY_S) -> None:
        self.readings: list[Reading] = []
        self._read, self._every_s = reader(device), every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        pause_s = 0.0
        while not self._done.wait(pause_s):
            start = time.perf_counter()
            self.readings.append((start, self._read()))
            pause_s = max(self._every_s, (time.perf_counter() - start) / SHARE)


def reader(device: torch.device | None) -> Callable[[], int]:
    """Returns the function that counts the bytes in use on this device."""
    if device is not None and is_accelerator(device):
        return lambda: allocated_bytes(device)
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # no glibc, or one before 2.33
        process = psutil.Process()
        return lambda: process.memory_info().rss
    mallinfo.restype = _MallInfo

    def read() -> int:
        counts = mallinfo()
        return counts.uordblks + counts.hblkhd

    return read


def with_memory(timeline: Timeline, origin_s: float, readings: Iterable[Sequence[Reading]]) -> Timeline:
    """Returns the timeline of the step that began at `origin_s` with the readings of each rank in it."""
    samples = tuple(
        Sample(rank=rank, time_s=at - origin_s, alive_bytes=alive)
        for rank, rank_readings in enumerate(readings)
        for at, alive in rank_readings
        if 0 <= at - origin_s <= timeline.duration_s
    )
    return timeline.model_copy(update={"samples": samples})
