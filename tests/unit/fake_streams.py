"""Devices that are none: copies run as late as they may, and every access must follow what it depends on.

A stream has a clock; an event is a moment of it with all that was known there, so `a happened before b` is a
comparison (Lamport 1978; Mattern 1989). A copy fills its target with poison when it is launched, holds its
source weakly, as an allocator does that may give freed memory away, and moves bytes only when some stream
comes to wait for it. So what is used too early, or let go too early, shows in the numbers; what is written
while somebody may still read it is found by the clocks (`Access`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from outsize.device.streams import Stream, StreamEvent, Streams

POISON = 0xFF  # as float32: NaN


class Access(AssertionError):
    """Two accesses of one memory without an order."""


@final
@dataclass
class FakeEvent(StreamEvent):
    stream: FakeStream
    known: dict[str, int]
    host_waits: int = 0

    def done(self) -> bool:
        return not self.stream.world.ripe(self.known)

    def wait(self) -> None:
        self.host_waits += 1
        self.stream.world.run_until(self.known)


@final
@dataclass
class Pending:
    """A copy that was launched."""

    moment: tuple[str, int]
    into: Tensor
    source: StorageWeakRef
    first: int


@final
@dataclass
class FakeStream(Stream):
    world: FakeStreams
    name: str
    is_host: bool = False
    known: dict[str, int] = field(default_factory=dict)

    def tick(self) -> tuple[str, int]:
        self.known[self.name] = self.known.get(self.name, 0) + 1
        return self.name, self.known[self.name]

    def record(self) -> FakeEvent:
        return FakeEvent(self, dict(self.known))

    def after(self, event: StreamEvent) -> None:
        assert isinstance(event, FakeEvent)
        if self.world.skip(self, event):
            return
        for name, moment in event.known.items():
            self.known[name] = max(moment, self.known.get(name, 0))
        if self.name.startswith("compute"):
            self.world.run_until(event.known)

    def copy(self, into: Tensor, source: Tensor) -> None:
        moment = self.tick()
        self.world.insist_made(source, self)
        self.world.insist_unused(into, self)
        into.fill_(POISON)
        self.world.written[place_of(into)] = moment
        weak = StorageWeakRef(source.untyped_storage())
        self.world.waiting.append(Pending(moment, into, weak, int(source.storage_offset())))


def place_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@final
class FakeStreams(Streams):
    """Places with any names; `cpu` is the host. `damaged`: pairs whose direct copies are wrong."""

    def __init__(self, damaged: Sequence[tuple[str, str]] = ()) -> None:
        self.waiting: list[Pending] = []
        self.written: dict[int, tuple[str, int]] = {}
        self.used: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
        self.made: dict[int, tuple[str, int]] = {}
        self.skip: Callable[[FakeStream, FakeEvent], bool] = lambda stream, event: False
        self.copied = 0
        self._computing: dict[str, FakeStream] = {}
        self._damaged, self._links = set(damaged), 0

    def compute(self, place: str) -> FakeStream:
        host = self.is_host(place)
        return self._computing.setdefault(place, FakeStream(self, f"compute {place}", host))

    def copies(self, source: str, destination: str) -> FakeStream:
        self._links += 1
        bad = " damaged" if (source, destination) in self._damaged else ""
        return FakeStream(self, f"copies {source} {destination} {self._links}{bad}")

    def empty(self, place: str, size_bytes: int) -> Tensor:
        found = torch.full((size_bytes,), POISON, dtype=torch.uint8)
        # Memory that the allocator gives out anew: kernels of the place may still be at work in it. What the
        # host did is over, and torch keeps page-locked memory from what was launched.
        self.used[place_of(found)] = [] if self.is_host(place) else [self.compute(place).tick()]
        self.made.pop(place_of(found), None)
        return found

    def device(self, place: str) -> torch.device:
        return torch.device("cpu")

    def device_context(self, place: str) -> AbstractContextManager[object]:
        return self._work(place)

    @contextmanager
    def _work(self, place: str) -> Iterator[None]:
        self.compute(place).tick()
        yield
        self.compute(place).tick()

    def move_inputs(self, tensors: Sequence[Tensor], place: str) -> list[Tensor]:
        return list(tensors)

    def synchronize(self) -> None:
        for pending in self.waiting:
            self._move(pending)
        self.waiting.clear()

    # -- what a test asks for --------------------------------------------------------------------------

    def make(self, tensor: Tensor, place: str) -> Tensor:
        """A kernel of the place writes it."""
        self.made[place_of(tensor)] = self.compute(place).tick()
        return tensor

    def use(self, tensor: Tensor, place: str) -> None:
        """A kernel of the place reads it. Raises Access before the copy that wrote it."""
        stream = self.compute(place)
        moment = self.written.get(place_of(tensor))
        if moment is not None and stream.known.get(moment[0], 0) < moment[1]:
            raise Access(f"{place} reads before the copy {moment}")
        self.used[place_of(tensor)].append(stream.tick())

    def insist_unused(self, into: Tensor, stream: FakeStream) -> None:
        for name, moment in self.used[place_of(into)] if into.numel() else ():
            if stream.known.get(name, 0) < moment:
                raise Access(f"{stream.name} writes before the last use of it at {moment} of {name}")

    def insist_made(self, source: Tensor, stream: FakeStream) -> None:
        name, moment = self.made.get(place_of(source), ("", 0))
        if stream.known.get(name, 0) < moment:
            raise Access(f"{stream.name} copies before the value is there")

    def ripe(self, known: dict[str, int]) -> list[Pending]:
        """Copies that an event is behind, and that were not run."""
        return [p for p in self.waiting if known.get(p.moment[0], 0) >= p.moment[1]]

    def run_until(self, known: dict[str, int]) -> None:
        """The copies that an event is behind."""
        for pending in self.ripe(known):
            self.waiting.remove(pending)
            self._move(pending)

    def _move(self, pending: Pending) -> None:
        self.copied += 1
        if pending.source.expired():
            return  # let go before it was read: poison stays
        storage = torch.UntypedStorage._new_with_weak_ptr(pending.source.cdata)
        flat = torch.empty(0, dtype=torch.uint8).set_(storage, pending.first, pending.into.shape)  # pyright: ignore[reportCallIssue]
        pending.into.copy_(flat)
        if pending.moment[0].endswith("damaged"):
            pending.into[5:8] ^= 1


Fault = Callable[[FakeStream, FakeEvent], bool]
# What must not be left out between the place `a` and the host, by what goes wrong then.
LANE_FAULTS: dict[str, Fault] = {
    "they leave before they are made": lambda s, e: "a cpu" in s.name and "compute" in e.stream.name,
    "they are let go before they left": lambda s, e: "compute a" in s.name and "a cpu" in e.stream.name,
    "they come into memory that is in use": lambda s, e: "cpu a" in s.name and "compute" in e.stream.name,
    "they are used before they are there": lambda s, e: "compute a" in s.name and "cpu a" in e.stream.name,
}
