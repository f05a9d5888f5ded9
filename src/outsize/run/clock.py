"""Clock: when something happened on a device, on the host's time axis.

    times[at] = clock.mark()        cheap, and the host goes on
    clock.seconds(times)            waits for the device, then says when it came past each mark

The CPU works within the call, so its mark is the time itself. A GPU comes past a mark when everything
launched before it is done: its mark is an event on the compute stream. When somebody asks, the device is
idled and one more event recorded beside a reading of the host's clock; every mark is so many milliseconds
before it. CUDA gives them as a 32-bit float: a minute later they are still known to some microseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final, Protocol, final

import torch


class TimedEvent(Protocol):
    """What is used of `torch.cuda.Event(enable_timing=True)`, recorded."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to that one, both of which are past."""
        ...


class Clock(ABC):
    """Marks points in the work of one device."""

    @property
    @abstractmethod
    def mark(self) -> Callable[[], Any]:
        """The call that marks; fetched once, called often."""

    @abstractmethod
    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When each was passed, by the host's `perf_counter`; 0 stays 0, and is no mark."""


@final
class HostClock(Clock):
    """Of what computes within the call."""

    @property
    def mark(self) -> Callable[[], float]:
        return perf_counter

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        return list(marks)


@final
class EventClock(Clock):
    """Of a device behind its host. `record` gives an event recorded there, `idle` waits for all its work."""

    def __init__(self, record: Callable[[], TimedEvent], idle: Callable[[], None]) -> None:
        self._record, self._idle = record, idle

    @property
    def mark(self) -> Callable[[], TimedEvent]:
        return self._record

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        self._idle()
        now_s, now = perf_counter(), self._record()
        self._idle()
        return [now_s - mark.elapsed_time(now) / 1000 if mark else 0.0 for mark in marks]


HOST: Final = HostClock()


def clock_of(device: torch.device) -> Clock:
    """The clock of what is launched on the device's current stream."""
    if device.type != "cuda":
        return HOST

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return EventClock(record, lambda: torch.cuda.synchronize(device))
