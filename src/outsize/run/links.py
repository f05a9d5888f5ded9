"""Problem: tensors go from device to device of one process while both compute.

    near compute   F0 ──┐     F1 ──┐              ┌─ event: no copy before the value is there
    copies              └─ c0      └─ c1          │  event: no use before the copy
    far compute             └─ F0      └─ F1 ─────┘  event: no reuse of a buffer before its last use

A directed pair of devices has a stream of copies of its own, so copies overlap with the kernels of both ends
and with each other's direction. Buffers are the far end's, used again and again; one is written only behind
the point of the far compute stream where it was made or given back. A source is let go only when the near
compute stream is behind its copy, so its memory is not allocated anew too early. From a CPU, values are
staged in page-locked memory, since a copy from pageable memory makes the host wait.

A copy between two GPUs can be wrong without an error (an IOMMU in the way of peer-to-peer; NVIDIA's
documentation names it), so every pair is tried once with a pattern (`checked_link`); where that comes out
wrong, values go through the host. Oracle: tests/unit/run/test_device_links.py, faults seeded.
"""

from __future__ import annotations

import warnings
from collections import deque
from typing import Final, final

import torch
from torch import Tensor

from outsize.errors import BoundaryMismatch
from outsize.run.layout import Layout, packed_bytes
from outsize.run.streams import Event, Stream, Streams

# Copies under way whose sources are held; staging buffers of page-locked memory.
_DEPTH: Final = 16
_STAGED: Final = 4
# Layouts that a link remembers; boundaries have few, of each shape that occurs.
_KNOWN: Final = 512
# Given-back buffers that are kept for shapes that may come again.
_SPARE: Final = 64
_PATTERN_BYTES: Final = (1 << 20) + 12


@final
class Buffer:
    """Bytes on a place. `free`: the point behind which they may be written."""

    __slots__ = ("_holders", "_place", "data", "free")

    def __init__(self, data: Tensor, free: Event) -> None:
        self.data, self.free = data, free
        self._place = data.untyped_storage()._cdata
        self._holders = torch._C._storage_Use_Count(self._place)

    def is_alone(self) -> bool:
        """Does no other tensor live in it?"""
        return torch._C._storage_Use_Count(self._place) == self._holders


@final
class _Pool:
    """Buffers of one place; the smallest that fits is taken, one that somebody holds is left to him."""

    def __init__(self, streams: Streams, place: str) -> None:
        self._streams, self._place = streams, place
        self._compute = streams.compute(place)
        self._lent: deque[Buffer] = deque()
        self.made = 0

    def take(self, size_bytes: int) -> Buffer:
        self._lent = deque(b for b in self._lent if b.is_alone())
        fitting = [b for b in self._lent if size_bytes <= b.data.numel() <= max(2 * size_bytes, 4096)]
        if fitting:
            best = min(fitting, key=lambda b: b.data.numel())
            self._lent.remove(best)
            return best
        self.made += 1
        data = self._streams.empty(self._place, size_bytes)
        return Buffer(data, self._compute.record())

    def give(self, buffer: Buffer) -> None:
        buffer.free = self._compute.record()
        self._lent.append(buffer)
        if len(self._lent) > _SPARE:
            self._lent.popleft()


@final
class Parcel:
    """A tensor on its way; it opens at its destination."""

    __slots__ = ("_buffer", "_link", "_tensor", "copied")

    def __init__(self, link: Link, buffer: Buffer, layout: Layout, copied: Event) -> None:
        self._link, self._buffer, self.copied = link, buffer, copied
        flat = buffer.data[: layout.size_bytes].view(layout.dtype)
        self._tensor: Tensor | None = flat.as_strided(layout.shape, layout.stride)

    def there(self) -> bool:
        """Would `open` return without making the host wait?"""
        return self._link.is_async or self.copied.done()

    def open(self) -> Tensor:
        """The tensor; what is launched at the destination from now on may read it."""
        self._link.far.after(self.copied)
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        return tensor

    def give_back(self) -> None:
        """Nothing launched from now on reads it."""
        self._link.pool.give(self._buffer)


@final
class Link:
    """From one place to another."""

    def __init__(self, streams: Streams, source: str, destination: str, queue: Stream) -> None:
        self.near, self.far, self._queue = streams.compute(source), streams.compute(destination), queue
        self.pool = _Pool(streams, destination)
        self.is_async = not streams.is_host(destination)
        self._staging = _Staging(streams, source) if streams.is_host(source) else None
        self._leaving: deque[tuple[Event, Tensor]] = deque()
        self._layouts: dict[tuple[object, ...], Layout] = {}

    def carry(self, tensor: Tensor) -> Parcel:
        """Launch the copy."""
        layout, packed = self._layout(tensor), packed_bytes(tensor)
        buffer = self.pool.take(layout.size_bytes)
        self._queue.after(self.near.record())
        self._queue.after(buffer.free)
        source = packed if self._staging is None else self._staging.hold(packed)
        self._queue.copy(buffer.data[: layout.size_bytes], source)
        copied = self._queue.record()
        if self._staging is None:
            self._keep(copied, packed)
        else:
            self._staging.lent(copied)
        return Parcel(self, buffer, layout, copied)

    def flush(self) -> None:
        """Sources may go: what the near end does next is behind their copies."""
        while self._leaving:
            self._let_go()

    def _keep(self, copied: Event, source: Tensor) -> None:
        self._leaving.append((copied, source))
        while self._leaving[0][0].done() or len(self._leaving) > _DEPTH:
            self._let_go()
            if not self._leaving:
                break

    def _let_go(self) -> None:
        copied, _ = self._leaving[0]
        self.near.after(copied)
        self._leaving.popleft()

    def _layout(self, tensor: Tensor) -> Layout:
        key = (tensor.shape, tensor.stride(), tensor.dtype)
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= _KNOWN:
                self._layouts.clear()
            found = self._layouts[key] = Layout.of(tensor)
        return found


@final
class _Staging:
    """Page-locked memory of the host that values wait in."""

    def __init__(self, streams: Streams, place: str) -> None:
        self._streams, self._place = streams, place
        self._slots: deque[tuple[Event, Tensor]] = deque()
        self._held: Tensor | None = None

    def hold(self, packed: Tensor) -> Tensor:
        """The bytes, page-locked; `lent` says until when."""
        size, room = packed.numel(), None
        if len(self._slots) >= _STAGED or (self._slots and self._slots[0][0].done()):
            copied, room = self._slots.popleft()
            copied.wait()
        if room is None or room.numel() < size:
            room = self._streams.empty(self._place, size)
        self._held = room
        return room[:size].copy_(packed)

    def lent(self, copied: Event) -> None:
        """The bytes of the last `hold` have left behind this event."""
        assert self._held is not None
        self._slots.append((copied, self._held))
        self._held = None


@final
class _ThroughHost(Stream):
    """Copies from GPU to GPU by way of page-locked memory; the host does not wait."""

    def __init__(self, streams: Streams, source: str, destination: str) -> None:
        self._streams = streams
        self._down, self._up = streams.copies(source, "cpu"), streams.copies("cpu", destination)
        self._room: Tensor | None = None

    def record(self) -> Event:
        return self._up.record()

    def after(self, event: Event) -> None:
        self._down.after(event)

    def copy(self, into: Tensor, source: Tensor) -> None:
        size = source.numel()
        left = self._up.record()
        if self._room is None or self._room.numel() < size:
            left.wait()
            self._room = self._streams.empty("cpu", size)
        self._down.after(left)
        self._down.copy(self._room[:size], source)
        self._up.after(self._down.record())
        self._up.copy(into, self._room[:size])


def checked_link(streams: Streams, source: str, destination: str) -> Link:
    """A link that carries a pattern right; through the host, with a warning, where the direct way does not.

    Raises BoundaryMismatch when that is wrong, too.
    """
    direct = Link(streams, source, destination, streams.copies(source, destination))
    wrong = _wrong_bytes(streams, source, direct)
    if not wrong:
        return direct
    what = f"copies from {source} to {destination} arrive damaged"
    numbers = f"{wrong} of {_PATTERN_BYTES} bytes of a test pattern are wrong"
    if not (streams.is_host(source) or streams.is_host(destination)):
        staged = Link(streams, source, destination, _ThroughHost(streams, source, destination))
        if not _wrong_bytes(streams, source, staged):
            warnings.warn(
                f"{what} ({numbers}): they go through the host instead, which is slower. Peer-to-peer copies "
                "behind an IOMMU do this; disable it, or the ACS of the PCIe bridges",
                stacklevel=2,
            )
            return staged
    raise BoundaryMismatch(what, numbers=numbers, next_step="train with other devices, and test this one")


def _wrong_bytes(streams: Streams, source: str, link: Link) -> int:
    """Of a pattern that was carried; it differs from page to page."""
    pattern = torch.arange(_PATTERN_BYTES // 4, dtype=torch.int32).mul_(-1640531527).view(torch.uint8)
    sent = streams.empty(source, pattern.numel()).copy_(pattern)
    found = link.carry(sent).open().cpu()
    link.flush()
    return int((found != pattern).sum())
