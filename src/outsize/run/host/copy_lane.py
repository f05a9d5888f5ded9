"""Moves memory between a device and its host, so that it is on the device again before it is used.

    send   copies to the host; the device's memory is freed behind the copies
    fetch  copies into new memory of the device
    arrive lets what is launched from now on read it

Copies go in one direction at a time: before the next bundle moves, compute is behind the copies of the last
one, so at most one bundle is under way. With `both`, for many small bundles, memory that leaves is freed one
move later.

Orders, on CUDA by events: no copy before the value is computed, none into memory before its last use is over,
no use before the copy, no free before it. On a CPU device and host share memory, and copies are made all the
same. Oracle: tests/unit/run/moves/test_moves_activations.py, test_boundary_values.py on fake streams, where
leaving out any of these orders is detected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, final

import torch
from torch import Tensor

from outsize.device.streams import StreamEvent, Streams
from outsize.ir.graph import SMALL_BYTES
from outsize.run.host.flat_buffer import ALIGN

_HOST: Final = "cpu"


@final
class OffloadedStorage:
    """Holds a storage as flat bytes: on the device (`here`), on the host (`away`), or under way."""

    __slots__ = ("__weakref__", "away", "here")

    def __init__(self, tensor: Tensor) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.here: Tensor | None = flat.set_(tensor.untyped_storage())  # pyright: ignore[reportCallIssue, reportArgumentType]
        self.away: Tensor | None = None


@final
class Handle(NamedTuple):
    """Describes a tensor in an offloaded storage; the storage lives as long as such handles do."""

    memory: OffloadedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, memory: OffloadedStorage, tensor: Tensor) -> Self:
        """Describes a tensor that lies in the storage."""
        return cls(memory, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def tensor(self) -> Tensor:
        """Returns the tensor on the device, where its storage has to be."""
        here = self.memory.here
        assert here is not None
        empty = torch.empty(0, dtype=self.dtype, device=here.device)
        return empty.set_(here.untyped_storage(), self.offset, self.shape, self.stride)  # pyright: ignore[reportCallIssue, reportArgumentType]


@final
@dataclass(slots=True, eq=False)
class HostBuffer:
    """Holds a buffer of the host; the last copy into it or from it is behind the event `over`."""

    data: Tensor
    over: StreamEvent


class Bundle(ABC):
    """Groups storages that move together; `away` holds them on the host, `coming` feeds a copy to
    the device.
    """

    def __init__(self) -> None:
        self.away: HostBuffer | None = None
        self.coming: HostBuffer | None = None

    @abstractmethod
    def memories(self) -> list[OffloadedStorage]:
        """Returns the storages that are still referenced."""


@final
class CopyLane:
    """Copies bundles between one device and the host."""

    def __init__(
        self, streams: Streams, place: str, least_bytes: int = SMALL_BYTES, *, both: bool = False
    ) -> None:
        self.device, self.least_bytes, self._both = streams.device(place), least_bytes, both
        self._streams, self._place, self._compute = streams, place, streams.compute(place)
        here = streams.is_host(place)
        self._out = self._compute if here else streams.copies(place, _HOST)
        self._back = self._compute if here else streams.copies(_HOST, place)
        self._leaving: tuple[StreamEvent, list[Tensor]] | None = None
        self._spare: list[HostBuffer] = []
        self.buffers: list[Tensor] = []  # The list holds all buffers of the host, those in use too.

    def takes(self, tensor: Tensor) -> bool:
        """Returns whether a tensor's storage may move: an ordinary tensor of this device that is
        not small.
        """
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not plain or tensor.device != self.device or tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.untyped_storage().nbytes() >= self.least_bytes

    def send(self, *bundles: Bundle) -> None:
        """Launches the copies to the host."""
        candidates = [(p, [(m, m.here) for m in p.memories() if m.here is not None]) for p in bundles]
        going = [(bundle, memories) for bundle, memories in candidates if memories]
        if not going:
            return
        self.settle()
        self._out.after(self._compute.record())
        blocks = list[Tensor]()
        for _, memories in going:
            block, first = self._take(sum(_aligned(here) for _, here in memories)), 0
            for memory, here in memories:
                memory.away, memory.here = block[first : first + here.numel()], None
                self._out.copy(memory.away, here)
                first += _aligned(here)
            blocks.append(block)
        left = self._out.record()
        for (bundle, _), block in zip(going, blocks, strict=True):
            bundle.away = HostBuffer(block, left)
        self._leaving = left, [here for _, memories in going for _, here in memories]
        if left.done():
            self.settle()

    def fetch(self, bundle: Bundle) -> None:
        """Launches the copies to the device, if the bundle is on the host."""
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
        """Orders compute behind the copies, so that what is launched from now on may read the bundle."""
        self.fetch(bundle)
        if bundle.coming is not None:
            self._compute.after(bundle.coming.over)
            self._spare.append(bundle.coming)
            bundle.coming = None

    def settle(self) -> None:
        """Lets the device memory of the last bundles that were sent be used again."""
        if self._leaving is not None:
            self._compute.after(self._leaving[0])
            self._leaving = None

    def forget(self) -> None:
        """Drops what is on the host or under way."""
        self.settle()
        back = self._back.record()
        self._compute.after(back)
        self._spare = [HostBuffer(data, back) for data in self.buffers]

    def _take(self, size_bytes: int) -> Tensor:
        """Returns a buffer of the host; a spare one that is too small is freed, so their number
        never grows.
        """
        fitting = [block for block in self._spare if block.data.numel() >= size_bytes]
        if fitting:
            best = min(fitting, key=lambda block: block.data.numel())
            self._spare.remove(best)
            return best.data
        if self._spare:
            small = self._spare.pop()
            # Not simulated: on CUDA the memory is unmapped at once (device/pinned_memory.py).
            small.over.wait()
            self.buffers = [data for data in self.buffers if data is not small.data]
        self.buffers.append(self._streams.host(size_bytes))
        return self.buffers[-1]


def _aligned(flat: Tensor) -> int:
    """Returns the bytes, rounded up to ALIGN."""
    return -(-flat.numel() // ALIGN) * ALIGN
