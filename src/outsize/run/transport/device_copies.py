"""Copies tensors from device to device of one process while both devices compute.

    near compute   F0 ──┐     F1 ──┐              ┌─ event: no copy before the value is there
    copies              └─ c0      └─ c1          │  event: no use before the copy
    far compute             └─ F0      └─ F1 ─────┘  event: no reuse of a buffer before its last use

A directed pair of devices has its own stream of copies, so copies overlap with the kernels of both ends and
with copies in the other direction. Buffers belong to the destination and are used again: a buffer is written
only behind the point of the destination's compute stream where it was allocated or released. A source is
freed only when the source's compute stream is behind its copy, so the allocator cannot reuse its memory too
early. From a CPU, values are staged in page-locked memory, since a copy from pageable memory blocks the host.

A copy between two GPUs can be wrong without an error (an IOMMU breaks peer-to-peer copies; NVIDIA's
documentation describes it), so every pair is tested once with a pattern (`checked_link`); where the pattern
arrives damaged, values go through the host. Oracle: tests/unit/run/transport/test_device_links.py, with
seeded faults.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

import torch
from torch import Tensor

from outsize.device.streams import Stream, StreamEvent, Streams
from outsize.errors import BoundaryMismatch
from outsize.program.source_line import warn_user
from outsize.run.transport.wire_layout import WireLayout, packed_bytes

# So many copies may be under way before the oldest source is freed; so many page-locked staging buffers
# exist.
_DEPTH: Final = 16
_STAGED: Final = 4
# A link caches so many layouts; boundaries have one for each shape that occurs.
_KNOWN: Final = 512
# A pool stores so many released buffers for shapes that may come again.
_SPARE: Final = 64
_PATTERN_BYTES: Final = (1 << 20) + 12


@final
class Buffer:
    """Holds bytes on a device; they may be written behind the event `free`."""

    __slots__ = ("_holders", "_place", "data", "free")

    def __init__(self, data: Tensor, free: StreamEvent) -> None:
        self.data, self.free = data, free
        self._place = data.untyped_storage()._cdata
        self._holders = torch._C._storage_Use_Count(self._place)

    def is_alone(self) -> bool:
        """Returns whether no other tensor lives in the buffer."""
        return torch._C._storage_Use_Count(self._place) == self._holders


@final
class _Pool:
    """Reuses the buffers of one device: the smallest that fits, unless a tensor still lives in it."""

    def __init__(self, streams: Streams, place: str) -> None:
        self._streams, self._place = streams, place
        self._compute = streams.compute(place)
        self._released: deque[Buffer] = deque()
        self.made = 0

    def take(self, size_bytes: int) -> Buffer:
        self._released = deque(b for b in self._released if b.is_alone())
        fitting = [b for b in self._released if size_bytes <= b.data.numel() <= max(2 * size_bytes, 4096)]
        if fitting:
            best = min(fitting, key=lambda b: b.data.numel())
            self._released.remove(best)
            return best
        self.made += 1
        data = self._streams.empty(self._place, size_bytes)
        return Buffer(data, self._compute.record())

    def give(self, buffer: Buffer) -> None:
        buffer.free = self._compute.record()
        self._released.append(buffer)
        if len(self._released) > _SPARE:
            self._released.popleft()


@final
class DeviceCopy:
    """Represents a copy that was launched; `open` gives its tensor at the destination."""

    __slots__ = ("_buffer", "_link", "_tensor", "copied")

    def __init__(self, link: DeviceLink, buffer: Buffer, layout: WireLayout, copied: StreamEvent) -> None:
        self._link, self._buffer, self.copied = link, buffer, copied
        flat = buffer.data[: layout.size_bytes].view(layout.dtype)
        self._tensor: Tensor | None = flat.as_strided(layout.shape, layout.stride)

    def is_ready(self) -> bool:
        """Returns whether `open` would return without blocking the host."""
        return self._link.is_async or self.copied.done()

    def open(self) -> Tensor:
        """Returns the tensor; whatever the destination launches from now on may read it."""
        self._link.far.after(self.copied)
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        return tensor

    def release(self) -> None:
        """Returns the buffer to its pool; nothing that is launched from now on may read it."""
        self._link.pool.give(self._buffer)


@final
class DeviceLink:
    """Copies tensors from one device to another."""

    def __init__(self, streams: Streams, source: str, destination: str, queue: Stream) -> None:
        self.near, self.far, self._queue = streams.compute(source), streams.compute(destination), queue
        self.pool = _Pool(streams, destination)
        self.is_async = not streams.is_host(destination)
        self._staging = _Staging(streams, source) if streams.is_host(source) else None
        self._leaving: deque[tuple[StreamEvent, Tensor]] = deque()
        self._layouts: dict[tuple[object, ...], WireLayout] = {}

    def carry(self, tensor: Tensor) -> DeviceCopy:
        """Launches the copy."""
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
            self._staging.release_after(copied)
        return DeviceCopy(self, buffer, layout, copied)

    def flush(self) -> None:
        """Allows the sources to be freed: what the source device does next is behind their copies."""
        while self._leaving:
            self._let_go()

    def _keep(self, copied: StreamEvent, source: Tensor) -> None:
        self._leaving.append((copied, source))
        while self._leaving[0][0].done() or len(self._leaving) > _DEPTH:
            self._let_go()
            if not self._leaving:
                break

    def _let_go(self) -> None:
        copied, _ = self._leaving[0]
        self.near.after(copied)
        self._leaving.popleft()

    def _layout(self, tensor: Tensor) -> WireLayout:
        key = (tensor.shape, tensor.stride(), tensor.dtype)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _KNOWN:
                self._layouts.clear()
            layout = self._layouts[key] = WireLayout.of(tensor)
        return layout


@final
class _Staging:
    """Holds page-locked host memory in which values wait for their copy."""

    def __init__(self, streams: Streams, place: str) -> None:
        self._streams, self._place = streams, place
        self._slots: deque[tuple[StreamEvent, Tensor]] = deque()
        self._held: Tensor | None = None

    def hold(self, packed: Tensor) -> Tensor:
        """Returns the bytes in page-locked memory, which stays reserved until `release_after` is called."""
        size, room = packed.numel(), None
        if len(self._slots) >= _STAGED or (self._slots and self._slots[0][0].done()):
            copied, room = self._slots.popleft()
            copied.wait()
        if room is None or room.numel() < size:
            room = self._streams.empty(self._place, size)
        self._held = room
        return room[:size].copy_(packed)

    def release_after(self, copied: StreamEvent) -> None:
        """Lets the memory of the last `hold` be used again behind this event."""
        assert self._held is not None
        self._slots.append((copied, self._held))
        self._held = None


@final
class _ThroughHost(Stream):
    """Copies from GPU to GPU by way of page-locked memory, without blocking the host."""

    def __init__(self, streams: Streams, source: str, destination: str) -> None:
        self._streams = streams
        self._down, self._up = streams.copies(source, "cpu"), streams.copies("cpu", destination)
        self._room: Tensor | None = None

    def record(self) -> StreamEvent:
        return self._up.record()

    def after(self, event: StreamEvent) -> None:
        self._down.after(event)

    def copy(self, into: Tensor, source: Tensor) -> None:
        size = source.numel()
        left = self._up.record()
        if self._room is None or self._room.numel() < size:
            # torch's allocator does not give page-locked memory out again before its copies have ended.
            self._room = self._streams.empty("cpu", size)
        self._down.after(left)
        self._down.copy(self._room[:size], source)
        self._up.after(self._down.record())
        self._up.copy(into, self._room[:size])


def checked_link(streams: Streams, source: str, destination: str) -> DeviceLink:
    """Returns a link that delivers a test pattern unchanged.

    Where the direct copy damages the pattern, it warns and returns a link through the host. Raises
    BoundaryMismatch when that is damaged, too.
    """
    direct = DeviceLink(streams, source, destination, streams.copies(source, destination))
    wrong = _wrong_bytes(streams, source, direct)
    if not wrong:
        return direct
    what = f"copies from {source} to {destination} arrive damaged"
    numbers = f"{wrong} of {_PATTERN_BYTES} bytes of a test pattern are wrong"
    if not (streams.is_host(source) or streams.is_host(destination)):
        staged = DeviceLink(streams, source, destination, _ThroughHost(streams, source, destination))
        if not _wrong_bytes(streams, source, staged):
            warn_user(
                f"{what} ({numbers}): they go through the host instead, which is slower. Peer-to-peer copies "
                "behind an IOMMU do this; disable it, or the ACS of the PCIe bridges",
            )
            return staged
    raise BoundaryMismatch(what, numbers=numbers, next_step="train with other devices, and test this one")


def _wrong_bytes(streams: Streams, source: str, link: DeviceLink) -> int:
    """Counts the bytes that arrive damaged of a test pattern that differs from page to page."""
    pattern = torch.arange(_PATTERN_BYTES // 4, dtype=torch.int32).mul_(-1640531527).view(torch.uint8)
    sent = streams.empty(source, pattern.numel()).copy_(pattern)
    received = link.carry(sent).open().cpu()
    link.flush()
    return int((received != pattern).sum())
