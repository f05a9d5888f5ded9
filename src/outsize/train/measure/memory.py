"""Reads the bytes that this process has allocated, over time, in a thread during the steps, for a trace's
counter.

Accelerators: the caching allocator's count. CPU: glibc's (mallinfo2(3): bytes in use, without what malloc
keeps of freed memory), elsewhere resident bytes. A read costs from microseconds to milliseconds (glibc walks
its free blocks), so the pause between two reads grows with their cost: reading takes at most SHARE of one
core.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Self, final

import psutil
import torch
from torch import Tensor

from outsize.device.accelerators import allocated_bytes, is_accelerator, peak_bytes, reset_peak
from outsize.ir.timeline import Sample, Timeline
from outsize.run.collectives.tensor_parallel import local_of

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
        self._device, self._read, self._every_s = device, reader(device), every_s
        self._others_bytes, self._settled_s = 0, 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def settle(self, own_bytes: int) -> None:
        """Counts of what the process holds now `own_bytes` alone, and forgets the peak so far.

        The rest is not the run's: a CPU's count has all of Python in it. Of several calls the one that finds
        the smallest rest holds: before a first step there is what the step frees, after it what it keeps.
        """
        gc.collect()
        others_bytes = self._read() - own_bytes
        self._others_bytes = min(others_bytes, self._others_bytes) if self._settled_s else others_bytes
        self._settled_s = time.perf_counter()
        if self._device is not None and is_accelerator(self._device):
            reset_peak(self._device)

    @property
    def own_readings(self) -> list[Reading]:
        """Returns the readings without what is not the run's."""
        return [(at_s, max(0, size - self._others_bytes)) for at_s, size in self.readings]

    @property
    def peak_bytes(self) -> int:
        """Returns the most bytes of the run since it has settled: an accelerator's allocator knows them,
        elsewhere the highest reading tells.
        """
        if self._device is not None and is_accelerator(self._device):
            return max(0, peak_bytes(self._device) - self._others_bytes)
        return max((size for at_s, size in self.own_readings if at_s >= self._settled_s), default=0)

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


def tensor_bytes(tensors: Iterable[Any], place: torch.device) -> int:
    """Returns the bytes of those tensors' memory that is on `place`; memory that several share counts once.

    Of a tensor that ranks hold parts of this rank's part counts; what is no tensor does not.
    """
    own = (local_of(each) for each in tensors if isinstance(each, Tensor))
    storages = (each.untyped_storage() for each in own if each.device == place and not each.is_meta)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def with_memory(timeline: Timeline, origin_s: float, readings: Iterable[Sequence[Reading]]) -> Timeline:
    """Returns the timeline of the step that began at `origin_s` with the readings of each rank in it.

    At the step's beginning there is what was read last before it, so that a step that is shorter than the
    pause between two readings has memory, too.
    """
    samples = tuple(
        Sample(rank=rank, time_s=time_s, alive_bytes=alive)
        for rank, rank_readings in enumerate(readings)
        for time_s, alive in _within(rank_readings, origin_s, timeline.duration_s)
    )
    return timeline.model_copy(update={"samples": samples})


def _within(readings: Sequence[Reading], origin_s: float, duration_s: float) -> Iterator[Reading]:
    """Yields seconds since the step's beginning and bytes."""
    before = [alive for at_s, alive in readings if at_s < origin_s]
    if before:
        yield 0.0, before[-1]
    yield from ((at_s - origin_s, alive) for at_s, alive in readings if 0 <= at_s - origin_s <= duration_s)
