"""A lane between a device and its host: memory of the device leaves, and is there again before it is used.

    send      copies to the host; the device's memory is let go behind them
    fetch     copies into new memory of the device
    arrive    what is launched from now on may read it

One direction at a time: before the next one moves, compute is behind the copies of the last, so that one
bundle at most is on its way. Or `both`, where much is small: what leaves is let go one move later.
Orders, on CUDA by events: no copy before the value is there, none into memory whose last use is not over, no
use before the copy, no letting go before it. On a CPU device and host are the same memory, and copies are
made all the same. Oracle: tests/unit/run/test_activations.py, test_values.py on fake streams, each order left
out and found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, final

import torch
from torch import Tensor

from outsize.ir.graph import SMALL_BYTES
from outsize.run.flat import ALIGN
from outsize.run.streams import Event, Streams

_HOST: Final = "cpu"


@final
class Memory:
    """A storage as flat bytes: on the device, on the host, or between them."""

    __slots__ = ("__weakref__", "away", "here")

    def __init__(self, tensor: Tensor) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.here: Tensor | None = flat.set_(tensor.untyped_storage())  # pyright: ignore[reportCallIssue, reportArgumentType]
        self.away: Tensor | None = None


@final
class Handle(NamedTuple):
    """Stands for a tensor. The memory lives as long as such handles do."""

    memory: Memory
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, memory: Memory, tensor: Tensor) -> Self:
        """Of a tensor that lies there."""
        return cls(memory, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def tensor(self) -> Tensor:
        """On the device, where the memory has to be."""
        here = self.memory.here
        assert here is not None
        empty = torch.empty(0, dtype=self.dtype, device=here.device)
        return empty.set_(here.untyped_storage(), self.offset, self.shape, self.stride)  # pyright: ignore[reportCallIssue, reportArgumentType]


@final
@dataclass(slots=True, eq=False)
class Block:
    """A buffer of the host. `over`: the point behind which the last copy into it or from it is."""

    data: Tensor
    over: Event


class Bundle(ABC):
    """Memories that leave and come back together; where it is on the host, and from where it is coming."""

    def __init__(self) -> None:
        self.away: Block | None = None
        self.coming: Block | None = None

    @abstractmethod
    def memories(self) -> list[Memory]:
        """Those that somebody still has."""


@final
class Lane:
    """Between a device and the host."""

    def __init__(
        self, streams: Streams, place: str, least_bytes: int = SMALL_BYTES, *, both: bool = False
    ) -> None:
        self.device, self.least_bytes, self._both = streams.device(place), least_bytes, both
        self._streams, self._place, self._compute = streams, place, streams.compute(place)
        here = streams.is_host(place)
        self._out = self._compute if here else streams.copies(place, _HOST)
        self._back = self._compute if here else streams.copies(_HOST, place)
        self._leaving: tuple[Event, list[Tensor]] | None = None
        self._spare: list[Block] = []
        self.buffers: list[Tensor] = []  # of the host, those in use too

    def takes(self, tensor: Tensor) -> bool:
        """Whether its storage may move: an ordinary tensor of this device that is not small."""
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not plain or tensor.device != self.device or tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.untyped_storage().nbytes() >= self.least_bytes

    def send(self, *bundles: Bundle) -> None:
        """Launch the copies to the host."""
        found = [(p, [(m, m.here) for m in p.memories() if m.here is not None]) for p in bundles]
        going = [(bundle, memories) for bundle, memories in found if memories]
        if not going:
            return
        self.settle()
        self._out.after(self._compute.record())
        for bundle, memories in going:
            block = bundle.away = self._take(sum(_aligned(here) for _, here in memories))
            first = 0
            for memory, here in memories:
                memory.away, memory.here = block.data[first : first + here.numel()], None
                self._out.copy(memory.away, here)
                first += _aligned(here)
        left = self._out.record()
        for bundle, _ in going:
            assert bundle.away is not None
            bundle.away.over = left
        self._leaving = left, [here for _, memories in going for _, here in memories]
        if left.done():
            self.settle()

    def fetch(self, bundle: Bundle) -> None:
        """Launch the copies to the device, if it is away."""
        block = bundle.away
        if block is None:
            return
        if not self._both:
            self.settle()
        coming = [(m, m.away) for m in bundle.memories() if m.away is not None]
        for memory, away in coming:
            memory.here, memory.away = self._streams.empty(self._place, away.numel()), None
        self._back.after(self._compute.record())
        self._back.after(block.over)
        for memory, away in coming:
            assert memory.here is not None
            self._back.copy(memory.here, away)
        block.over = self._back.record()
        bundle.away, bundle.coming = None, block

    def arrive(self, bundle: Bundle) -> None:
        """What is launched on the device from now on may read it, and may write what it was copied from."""
        self.fetch(bundle)
        if bundle.coming is not None:
            self._compute.after(bundle.coming.over)
            self._spare.append(bundle.coming)
            bundle.coming = None

    def settle(self) -> None:
        """The last ones that were sent have left: their memory on the device may be used anew."""
        if self._leaving is not None:
            self._compute.after(self._leaving[0])
            self._leaving = None

    def forget(self) -> None:
        """Nobody wants what is away, or on its way."""
        self.settle()
        back = self._back.record()
        self._compute.after(back)
        self._spare = [Block(data, back) for data in self.buffers]

    def _take(self, size_bytes: int) -> Block:
        """A buffer of the host; a spare one that is too small goes, so there are no more than were in use."""
        fitting = [block for block in self._spare if block.data.numel() >= size_bytes]
        if fitting:
            best = min(fitting, key=lambda block: block.data.numel())
            self._spare.remove(best)
            return best
        if self._spare:
            small = self._spare.pop()
            small.over.wait()
            self.buffers = [data for data in self.buffers if data is not small.data]
        self.buffers.append(self._streams.host(size_bytes))
        return Block(self.buffers[-1], self._compute.record())


def _aligned(flat: Tensor) -> int:
    """Its bytes, or a few more."""
    return -(-flat.numel() // ALIGN) * ALIGN
