"""Defines streams, which are queues of launched work on the devices of a process, and events that order them.

        stream.record() -> event      completes when everything launched there so far is done
    other.after(event)            what is launched there from now on runs behind it
        stream.copy(into, source)     launches; what reads `into` must be behind an event recorded after it

On an accelerator a launch returns at once. The CPU is its own stream: what is launched is done when the call
returns, and being behind an event means waiting for it. A device without streams has one queue, which keeps
the order of launches, and copies between it and the host are done when the call returns. Places are names of
torch's devices. `tests/unit/fake_streams.py` is a third implementation, which delays copies and proves what
happens before what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import accumulate
from typing import Final, final

import torch
from torch import Tensor

from outsize.device.accelerators import lacks, synchronize
from outsize.device.pinned_memory import page_locked

_HOST: Final = "cpu"
_ALIGNMENT: Final = 512  # That of torch's allocators, by which kernels choose.


class StreamEvent(ABC):
    """Marks a point in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Returns whether the device has passed the point."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the host until the device has passed the point."""


class Stream(ABC):
    """Represents a queue of work on a device."""

    @abstractmethod
    def record(self) -> StreamEvent:
        """Returns an event that completes when everything launched here so far is done."""

    @abstractmethod
    def after(self, event: StreamEvent) -> None:
        """Orders what is launched here from now on behind the event."""

    @abstractmethod
    def copy(self, into: Tensor, source: Tensor) -> None:
        """Launches a copy of flat bytes."""


class Streams(ABC):
    """Holds the streams of all devices of one process."""

    @abstractmethod
    def compute(self, place: str) -> Stream:
        """Returns the stream on which the kernels of the place's stages are launched."""

    @abstractmethod
    def copies(self, source: str, destination: str) -> Stream:
        """Makes a new stream for copies from one place to another."""

    @abstractmethod
    def empty(self, place: str, size_bytes: int) -> Tensor:
        """Allocates bytes on a place from its compute stream's pool; host memory is page-locked."""

    def host(self, size_bytes: int) -> Tensor:
        """Allocates exactly as many bytes of page-locked host memory as are asked for."""
        return self.empty(_HOST, size_bytes)

    @abstractmethod
    def device(self, place: str) -> torch.device:
        """Returns the torch device of a place."""

    @abstractmethod
    def device_context(self, place: str) -> AbstractContextManager[object]:
        """Returns a context within which launches go to the place."""

    @abstractmethod
    def move_inputs(self, tensors: Sequence[Tensor], place: str) -> list[Tensor]:
        """Returns the user's tensors on the place; afterwards the user may change the originals."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until all devices are idle."""

    def is_host(self, place: str) -> bool:
        """Returns whether the place is the CPU, which computes within the call."""
        return place == _HOST


@final
class _Done(StreamEvent):
    """Represents an event of the host, which has always passed."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Returns at once."""


@final
class _HostStream(Stream):
    """Represents the CPU, or the one queue of a device without streams."""

    def record(self) -> StreamEvent:
        return _Done()

    def after(self, event: StreamEvent) -> None:
        event.wait()

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)


@final
class _DeviceEvent(StreamEvent):
    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


@final
class _DeviceCompute(Stream):
    """Wraps the stream that is current on the device, which may be one that the user has set."""

    def __init__(self, place: str) -> None:
        self._device = torch.device(place)

    def record(self) -> StreamEvent:
        return _DeviceEvent(torch.accelerator.current_stream(self._device).record_event())

    def after(self, event: StreamEvent) -> None:
        if isinstance(event, _DeviceEvent):
            torch.accelerator.current_stream(self._device).wait_event(event.event)

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source, non_blocking=True)


@final
class _DeviceCopies(Stream):
    """Wraps a stream on each end that is a device.

    torch runs a copy on the current stream of the source and makes the destination's current stream wait for
    it: if that were the compute stream, nothing would overlap.
    """

    def __init__(self, ends: Sequence[str]) -> None:
        self._streams = [torch.Stream(torch.device(end)) for end in ends]

    def record(self) -> StreamEvent:
        return _DeviceEvent(self._streams[0].record_event())

    def after(self, event: StreamEvent) -> None:
        if isinstance(event, _DeviceEvent):
            self._streams[0].wait_event(event.event)

    def copy(self, into: Tensor, source: Tensor) -> None:
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(stream)
            into.copy_(source, non_blocking=True)


def _copied_at_once(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Returns copies of the host's tensors on a device, launched as one copy of page-locked memory, so that
    the host does not wait.
    """
    layouts = [torch.empty_like(t, device="meta") for t in tensors]
    starts = [0, *accumulate(-(-layout.nbytes // _ALIGNMENT) * _ALIGNMENT for layout in layouts)]
    staging = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for tensor, layout, start in zip(tensors, layouts, starts, strict=False):
        _within(staging, layout, start).copy_(tensor)
    there = torch.empty_like(staging, device=device).copy_(staging, non_blocking=True)
    return [_within(there, layout, start) for layout, start in zip(layouts, starts, strict=False)]


def _within(buffer: Tensor, layout: Tensor, start: int) -> Tensor:
    """Returns the tensor of this layout in a buffer of bytes."""
    flat = buffer[start : start + layout.nbytes].view(layout.dtype)
    return flat.as_strided(layout.shape, layout.stride(), flat.storage_offset())


def _has_streams(place: str) -> bool:
    return place != _HOST and not lacks(place, "streams")


@final
class TorchStreams(Streams):
    """Gives the streams of the CPU and the accelerators of this machine."""

    def __init__(self, places: Sequence[str]) -> None:
        self._devices = [torch.device(place) for place in dict.fromkeys(places) if place != _HOST]
        self._feeds = {
            str(device): torch.Stream(device) for device in self._devices if not lacks(device, "streams")
        }

    def compute(self, place: str) -> Stream:
        return _DeviceCompute(place) if _has_streams(place) else _HostStream()

    def copies(self, source: str, destination: str) -> Stream:
        ends = [end for end in (source, destination) if end != _HOST]
        return _DeviceCopies(ends) if all(map(_has_streams, ends)) else _HostStream()

    def empty(self, place: str, size_bytes: int) -> Tensor:
        pinned = place == _HOST and bool(self._feeds)
        return torch.empty(size_bytes, dtype=torch.uint8, device=place, pin_memory=pinned)

    def host(self, size_bytes: int) -> Tensor:
        return page_locked(size_bytes) if self._feeds else torch.empty(size_bytes, dtype=torch.uint8)

    def device(self, place: str) -> torch.device:
        return torch.device(place)

    def device_context(self, place: str) -> AbstractContextManager[object]:
        return nullcontext() if place == _HOST else torch.accelerator.device_index(torch.device(place).index)

    def move_inputs(self, tensors: Sequence[Tensor], place: str) -> list[Tensor]:
        device = torch.device(place)
        if not _has_streams(place) or all(t.device == device for t in tensors):
            return [t.to(device) for t in tensors]
        feed, compute = self._feeds[place], torch.accelerator.current_stream(device)
        staged = [t for t in tensors if t.device.type == _HOST]
        with feed:
            copies = iter(_copied_at_once(staged, device))
            moved = [next(copies) if t.device.type == _HOST else t.to(device) for t in tensors]
        compute.wait_stream(feed)
        for tensor in moved:
            tensor.record_stream(compute)
        return moved

    def synchronize(self) -> None:
        for device in self._devices:
            synchronize(device)
