"""Transport: how boundary values get from stage to stage. The only owner of point-to-point calls.

    sender                                     receiver
    send(peer, channel, mb, tensor)            post(peer, channel, mb) -> Pending     (does not block)
                                               pending.wait() -> tensor               (when it is needed)

A channel is one boundary value in one direction between two stages. Its layout travels once, before the
first tensor; after that both ends know it and only elements travel. `ProcessTransport` is torch.distributed
with non-blocking sends and receives and pooled buffers; `LocalTransport` hands tensors over in one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.errors import BoundaryMismatch
from outsize.run.layout import HEADER, NOTHING, Layout, pack

# Channels of one program; the next program's come behind them.
CHANNELS = 1 << 16


class Pending(ABC):
    """A receive that was posted."""

    @abstractmethod
    def ready(self) -> bool:
        """May `wait` be called without blocking for ever in one process?"""

    @abstractmethod
    def wait(self) -> Tensor | None:
        """The tensor; None when no gradient flows on this channel."""


class Transport(ABC):
    """Moves tensors between ranks."""

    @abstractmethod
    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        """Start sending; never blocks compute."""

    @abstractmethod
    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        """Start receiving."""

    @abstractmethod
    def release(self, channel: int, tensor: Tensor) -> None:
        """Nobody holds a received tensor or a view of it any more: its memory may be received into again.

        What is not released is freed like any tensor when its last holder lets go.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything that was sent has left."""


# -- one process ---------------------------------------------------------------------------------------


@final
class Mailboxes:
    """Shared by the LocalTransports of all ranks in one process."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int, int], Tensor | None] = {}


@final
class LocalTransport(Transport):
    """Hand-over inside one process: (source, destination, channel, microbatch) -> tensor."""

    def __init__(self, rank: int, mailboxes: Mailboxes) -> None:
        self._rank, self._boxes = rank, mailboxes.boxes

    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        key = (self._rank, peer, channel, microbatch)
        self._boxes[key] = tensor.detach() if tensor is not None else None

    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        return _LocalPending(self._boxes, (peer, self._rank, channel, microbatch))

    def release(self, channel: int, tensor: Tensor) -> None:
        """Nothing was copied, so nothing comes back."""

    def flush(self) -> None:
        """Nothing is under way."""


@final
class _LocalPending(Pending):
    def __init__(
        self, boxes: dict[tuple[int, int, int, int], Tensor | None], key: tuple[int, int, int, int]
    ) -> None:
        self._boxes, self._key = boxes, key

    def ready(self) -> bool:
        return self._key in self._boxes

    def wait(self) -> Tensor | None:
        return self._boxes.pop(self._key)


# -- processes -----------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups of a transport. NCCL has one queue per pair and group, so each direction has its own;
    layouts are numbers for the host and go over gloo. On gloo one group serves all three.
    """

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    layouts: dist.ProcessGroup

    def of(self, channel: int) -> dist.ProcessGroup:
        """The group that moves a channel's elements; odd channels carry gradients."""
        return self.backward if channel % 2 else self.forward


@final
class ProcessTransport(Transport):
    """torch.distributed point-to-point; tags keep channels and microbatches apart where there are tags."""

    def __init__(self, groups: Groups, device: torch.device, depth: int = 16) -> None:
        self._groups, self._device, self._depth = groups, device, depth
        self._sent: dict[int, Layout | None] = {}
        self._known: dict[int, Layout | None] = {}
        self._free: dict[int, list[Tensor]] = {}
        self._leaving: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        self._unknown: dict[int, _Introduction] = {}
        self.buffers_made = 0

    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        layout = Layout.of(tensor) if tensor is not None else None
        if channel not in self._sent:
            self._sent[channel] = layout
            header = layout.encode() if layout is not None else NOTHING
            self._start(self._groups.layouts, peer, header, _header_tag(channel))
        elif self._sent[channel] != layout:
            raise _changed(channel, self._sent[channel], layout)
        if tensor is not None:
            self._start(self._groups.of(channel), peer, pack(tensor), _tag(channel, microbatch))

    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        pending = _ProcessPending(self, channel, microbatch)
        if channel in self._known:
            pending.start(peer)
        else:
            self._introduction(peer, channel).waiting.append(pending)
        return pending

    def release(self, channel: int, tensor: Tensor) -> None:
        self._free.setdefault(channel, []).append(tensor)

    def flush(self) -> None:
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft()[0].wait()

    def to_first(self, tensor: Tensor, source: int) -> Tensor | None:
        """The tensor of rank `source` on the CPU of rank 0, over gloo; None on the other ranks.

        Rank 0 takes shape and dtype from its own tensor, which may be on meta.
        """
        group = self._groups.layouts
        if group.rank() == source == 0:
            return tensor.detach().cpu()
        if group.rank() == source and tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            dist.send(flat, group=group, group_dst=0, tag=_STATE_TAG)
        if group.rank() != 0:
            return None
        value = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.numel():
            dist.recv(value.reshape(-1).view(torch.uint8), group=group, group_src=source, tag=_STATE_TAG)
        return value

    def forget(self, first_channel: int) -> None:
        """Drop layouts and pooled buffers of the program whose channels begin here; it will not run again."""
        gone = range(first_channel, first_channel + CHANNELS)
        for table in (self._sent, self._known, self._free):
            for channel in [c for c in table if c in gone]:
                del table[channel]

    def learn(self, channel: int) -> None:
        """Wait for a channel's layout, then start every receive that was posted before it was known."""
        met = self._unknown.pop(channel)
        met.work.wait()
        self._known[channel] = Layout.decode(met.header)
        for pending in met.waiting:
            pending.start(met.peer)

    def receive(self, peer: int, channel: int, microbatch: int) -> tuple[Tensor | None, dist.Work | None]:
        """A pooled buffer and the receive into it; nothing when nothing travels on the channel."""
        layout = self._known[channel]
        if layout is None:
            return None, None
        tensor = self._buffer(channel, layout)
        flat, group = layout.memory(tensor), self._groups.of(channel)
        return tensor, dist.irecv(flat, group=group, group_src=peer, tag=_tag(channel, microbatch))

    def _buffer(self, channel: int, layout: Layout) -> Tensor:
        free = self._free.get(channel)
        if free:
            return free.pop()
        self.buffers_made += 1
        return layout.empty(self._device)

    def _introduction(self, peer: int, channel: int) -> _Introduction:
        if channel not in self._unknown:
            header = torch.empty(HEADER, dtype=torch.int64)
            tag = _header_tag(channel)
            work = dist.irecv(header, group=self._groups.layouts, group_src=peer, tag=tag)
            assert work is not None
            self._unknown[channel] = _Introduction(peer, header, work, [])
        return self._unknown[channel]

    def _start(self, group: dist.ProcessGroup, peer: int, flat: Tensor, tag: int) -> None:
        leaving = self._leaving.setdefault(peer, deque())
        # A bounded number of sends is under way, so a slow peer cannot make this rank keep every tensor.
        while len(leaving) >= self._depth:
            leaving.popleft()[0].wait()
        work = dist.isend(flat, group=group, group_dst=peer, tag=tag)
        assert work is not None
        leaving.append((work, flat))


@final
@dataclass(frozen=True, slots=True)
class _Introduction:
    """A channel whose layout is on its way, and the receives that wait for it, in order."""

    peer: int
    header: Tensor
    work: dist.Work
    waiting: list[_ProcessPending]


@final
class _ProcessPending(Pending):
    def __init__(self, transport: ProcessTransport, channel: int, microbatch: int) -> None:
        self._transport, self._channel, self._microbatch = transport, channel, microbatch
        self._started = False
        self._tensor: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, peer: int) -> None:
        """Receive the elements, now that the layout is known."""
        self._tensor, self._work = self._transport.receive(peer, self._channel, self._microbatch)
        self._started = True

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor | None:
        if not self._started:
            self._transport.learn(self._channel)
        if self._work is not None:
            self._work.wait()
        return self._tensor


# 2048 microbatches per channel, and one more tag for the header. Tags are 32-bit numbers, so programs share
# them: they run one after the other, and messages of one tag arrive in the order in which they were sent.
_SPAN = 2048
_STATE_TAG = CHANNELS * _SPAN + 1


def _tag(channel: int, microbatch: int) -> int:
    return channel % CHANNELS * _SPAN + microbatch + 1


def _header_tag(channel: int) -> int:
    return channel % CHANNELS * _SPAN


def _changed(channel: int, before: Layout | None, now: Layout | None) -> BoundaryMismatch:
    return BoundaryMismatch(
        f"the tensor on channel {channel} changed its layout between microbatches",
        numbers=f"first {before}, now {now}",
        next_step="outsize check MODEL, which names the unit",
    )
