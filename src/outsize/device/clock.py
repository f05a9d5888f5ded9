"""Measures when something happened on a device, on the host's time axis.

    times[at] = clock.mark()        cheap, and the host goes on
        clock.seconds(times)            waits for the device, then returns when it passed each mark

The CPU works within the call, so its mark is the time itself. A GPU passes a mark when everything launched
before it is done: its mark is an event on the compute stream. `seconds` idles the device, records one more
event together with a reading of the host's clock, and computes how long before it each mark was passed. CUDA
gives milliseconds as a 32-bit float: after a minute marks are still precise to some microseconds. Events that
nobody reads any more are recorded again (`free`), so a training loop makes those of one step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final, Protocol, final

import torch

from outsize.device.accelerators import is_accelerator, lacks, synchronize
from outsize.device.cores import CoreWaits


class TimedEvent(Protocol):
    """Describes the part of `torch.Event(enable_timing=True)` that is used."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Returns the milliseconds from this event to `end_event`, both of which have passed."""
        ...

    def query(self) -> bool:
        """Tells whether the device has passed the event."""
        ...


class Clock(ABC):
    """Marks points in the work of one device."""

    @property
    @abstractmethod
    def mark(self) -> Callable[[], Any]:
        """Returns the function that marks; it is fetched once and called often."""

    @abstractmethod
    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Returns when each mark was passed, by the host's `perf_counter`; 0 stands for no mark and
        stays 0.
        """

    @abstractmethod
    def offsets(self, marks: Sequence[Any]) -> list[float] | None:
        """Returns when each mark was passed, in seconds since any moment before; 0 stands for no mark.

        It does not wait: None where the device has not passed all of them.
        """

    @abstractmethod
    def free(self, marks: Sequence[Any]) -> None:
        """Takes back marks that nobody reads any more."""

    def core_waits(self, marks: Sequence[Any]) -> list[float]:
        """Returns for each mark the seconds that its thread had waited for a CPU core by then; zeros where
        that is not counted.
        """
        return [0.0] * len(marks)


@final
class HostClock(Clock):
    """Marks work that computes within the call."""

    @property
    def mark(self) -> Callable[[], float]:
        return perf_counter

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        return list(marks)

    def offsets(self, marks: Sequence[Any]) -> list[float] | None:
        return list(marks)

    def free(self, marks: Sequence[Any]) -> None:
        """Does nothing: a mark is a number."""


@final
class CoreClock(Clock):
    """Marks work of the thread that has made it, and counts how long it has waited for a core.

    A reading takes a microsecond more. Close it after the last mark.
    """

    def __init__(self) -> None:
        self._waits, self._at_mark = CoreWaits(), dict[float, float]()

    @property
    def mark(self) -> Callable[[], float]:
        return self._marked

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        return list(marks)

    def offsets(self, marks: Sequence[Any]) -> list[float] | None:
        return list(marks)

    def free(self, marks: Sequence[Any]) -> None:
        """Does nothing: a mark is a number."""

    def close(self) -> None:
        """Ends the counting; what was counted stays."""
        self._waits.close()

    def core_waits(self, marks: Sequence[Any]) -> list[float]:
        return [self._at_mark.get(mark, 0.0) for mark in marks]

    def _marked(self) -> float:
        waited_s, now_s = self._waits.seconds(), perf_counter()
        self._at_mark[now_s] = waited_s
        return now_s


@final
class EventClock(Clock):
    """Marks work of a device that runs asynchronously.

    `make` returns a new event, `record` records it there; `idle` waits for all work of the device.
    """

    def __init__(
        self, make: Callable[[], Any], record: Callable[[Any], None], idle: Callable[[], None]
    ) -> None:
        self._make, self._record, self._idle = make, record, idle
        self._free: list[TimedEvent] = []

    @property
    def mark(self) -> Callable[[], TimedEvent]:
        return self._recorded

    def free(self, marks: Sequence[Any]) -> None:
        self._free += [mark for mark in marks if mark]

    def offsets(self, marks: Sequence[Any]) -> list[float] | None:
        first = next((mark for mark in marks if mark), None)
        if first is None or not all(mark.query() for mark in marks if mark):
            return None
        # The first one is passed at 1, since 0 stands for no mark.
        return [1.0 + first.elapsed_time(mark) / 1000 if mark else 0.0 for mark in marks]

    def _recorded(self) -> TimedEvent:
        event = self._free.pop() if self._free else self._make()
        self._record(event)
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        self._idle()
        now_s, now = perf_counter(), self._recorded()
        self._idle()
        seconds = [now_s - mark.elapsed_time(now) / 1000 if mark else 0.0 for mark in marks]
        self.free([now])
        return seconds


HOST: Final = HostClock()


def clock_of(device: torch.device) -> Clock:
    """Returns the clock of what is launched on the device's current stream."""
    if not is_accelerator(device) or lacks(device, "streams"):
        return HOST

    def record(event: torch.Event) -> None:
        event.record(torch.accelerator.current_stream(device))

    return EventClock(partial(torch.Event, device, enable_timing=True), record, lambda: synchronize(device))
