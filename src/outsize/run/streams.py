"""Streams: queues of launched work on the devices of one process, and events that order them.

    stream.record() -> event      everything launched there so far
    other.after(event)            what is launched there from now on runs behind it
    stream.copy(into, source)     launched, not done: what reads `into` must be after an event behind it

On CUDA a launch returns at once. The CPU is its own stream: what it is told is done when the call returns,
and being after an event means waiting for it. Places are names of torch's devices.
`tests/unit/run/fake_streams.py` is a third kind, which delays copies and proves what happens before what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Final, final

import torch
from torch import Tensor

from outsize.run.page_locked import page_locked

_HOST: Final = "cpu"


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Has the device come past it?"""

    @abstractmethod
    def wait(self) -> None:
        """The host waits until it has."""


class Stream(ABC):
    """A queue of work on a device."""

    @abstractmethod
    def record(self) -> Event:
        """Everything launched here so far."""

    @abstractmethod
    def after(self, event: Event) -> None:
        """What is launched here from now on runs behind the event."""

    @abstractmethod
    def copy(self, into: Tensor, source: Tensor) -> None:
        """Launch a copy of flat bytes."""


class Streams(ABC):
    """The streams of all places of one process."""

    @abstractmethod
    def compute(self, place: str) -> Stream:
        """Where the kernels of the place's stages are launched."""

    @abstractmethod
    def copies(self, source: str, destination: str) -> Stream:
        """A new stream for copies from one place to another."""

    @abstractmethod
    def empty(self, place: str, size_bytes: int) -> Tensor:
        """Bytes on a place, from what its compute stream allocates; the host's can be copied to unpaged."""

    def host(self, size_bytes: int) -> Tensor:
        """Bytes on the host that can be copied to unpaged, no more than are asked for."""
        return self.empty(_HOST, size_bytes)

    @abstractmethod
    def device(self, place: str) -> torch.device:
        """Its tensors' device."""

    @abstractmethod
    def working(self, place: str) -> AbstractContextManager[object]:
        """Launches within are the place's."""

    @abstractmethod
    def bring(self, tensors: Sequence[Tensor], place: str) -> list[Tensor]:
        """The user's tensors on the place; afterwards he may change his own."""

    @abstractmethod
    def synchronize(self) -> None:
        """The host waits for everything."""

    def is_host(self, place: str) -> bool:
        """Is it the CPU, which computes within the call?"""
        return place == _HOST


@final
class _Done(Event):
    """What the host does is done."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """It is."""


@final
class _HostStream(Stream):
    def record(self) -> Event:
        return _Done()

    def after(self, event: Event) -> None:
        event.wait()

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)


@final
class _CudaEvent(Event):
    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


@final
class _CudaCompute(Stream):
    """The stream that is current on the device, the user's if he has set one."""

    def __init__(self, place: str) -> None:
        self._device = torch.device(place)

    def record(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self._device).record_event())

    def after(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            torch.cuda.current_stream(self._device).wait_event(event.event)

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source, non_blocking=True)


@final
class _CudaCopies(Stream):
    """A stream on each end that is a GPU. torch runs a copy on the current stream of the source and lets the
    destination's current stream wait for it: were that the compute stream, nothing would overlap.
    """

    def __init__(self, ends: Sequence[str]) -> None:
        self._streams = [torch.cuda.Stream(torch.device(end)) for end in ends if end != _HOST]

    def record(self) -> Event:
        return _CudaEvent(self._streams[0].record_event())

    def after(self, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            self._streams[0].wait_event(event.event)

    def copy(self, into: Tensor, source: Tensor) -> None:
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            into.copy_(source, non_blocking=True)


@final
class TorchStreams(Streams):
    """The CPU and CUDA devices of this machine."""

    def __init__(self, places: Sequence[str]) -> None:
        self._gpus = [torch.device(place) for place in dict.fromkeys(places) if place != _HOST]
        self._feeds = {str(gpu): torch.cuda.Stream(gpu) for gpu in self._gpus}

    def compute(self, place: str) -> Stream:
        return _HostStream() if place == _HOST else _CudaCompute(place)

    def copies(self, source: str, destination: str) -> Stream:
        return _CudaCopies((source, destination))

    def empty(self, place: str, size_bytes: int) -> Tensor:
        pinned = place == _HOST and bool(self._gpus)
        return torch.empty(size_bytes, dtype=torch.uint8, device=place, pin_memory=pinned)

    def host(self, size_bytes: int) -> Tensor:
        return page_locked(size_bytes) if self._gpus else torch.empty(size_bytes, dtype=torch.uint8)

    def device(self, place: str) -> torch.device:
        return torch.device(place)

    def working(self, place: str) -> AbstractContextManager[object]:
        return nullcontext() if place == _HOST else torch.cuda.device(place)

    def bring(self, tensors: Sequence[Tensor], place: str) -> list[Tensor]:
        device = torch.device(place)
        if place == _HOST or all(t.device == device for t in tensors):
            return [t.to(device) for t in tensors]
        feed, compute = self._feeds[place], torch.cuda.current_stream(device)
        with torch.cuda.stream(feed):  # waited for by the host, which need not wait for kernels
            found = [t.to(device) for t in tensors]
        compute.wait_stream(feed)
        for tensor in found:
            tensor.record_stream(compute)
        return found

    def synchronize(self) -> None:
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
