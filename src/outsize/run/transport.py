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
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.errors import BoundaryMismatch
from outsize.run.layout import HEADER, NOTHING, Layout, pack


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
        """A received tensor is no longer used; its memory may be received into again."""

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
class ProcessTransport(Transport):
    """torch.distributed point-to-point over `group`; tags keep channels and microbatches apart."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, depth: int = 16) -> None:
        self._group, self._device, self._depth = group, device, depth
        self._sent: dict[int, Layout | None] = {}
        self._known: dict[int, Layout | None] = {}
        self._free: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}
        self._leaving: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        self.buffers_made = 0

    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        layout = Layout.of(tensor) if tensor is not None else None
        if channel not in self._sent:
            self._sent[channel] = layout
            self._start(peer, layout.encode() if layout is not None else NOTHING, _header_tag(channel))
        elif self._sent[channel] != layout:
            raise _changed(channel, self._sent[channel], layout)
        if tensor is not None:
            self._start(peer, pack(tensor), _tag(channel, microbatch))

    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        return _ProcessPending(self, peer, channel, microbatch)

    def release(self, channel: int, tensor: Tensor) -> None:
        pair = self._lent.pop(id(tensor), None)
        if pair is not None:
            self._free.setdefault(channel, []).append(pair)

    def flush(self) -> None:
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft()[0].wait()

    def _start(self, peer: int, flat: Tensor, tag: int) -> None:
        leaving = self._leaving.setdefault(peer, deque())
        # A bounded number of sends is under way, so a slow peer cannot make this rank keep every tensor.
        while len(leaving) >= self._depth:
            leaving.popleft()[0].wait()
        work = dist.isend(flat, group=self._group, group_dst=peer, tag=tag)
        assert work is not None
        leaving.append((work, flat))

    # -- what _ProcessPending needs --

    def knows(self, channel: int) -> bool:
        """Has the channel's layout arrived?"""
        return channel in self._known

    def learn(self, channel: int, header: Tensor) -> None:
        """Remember the channel's layout."""
        self._known[channel] = Layout.decode(header)

    def receive(self, peer: int, flat: Tensor, tag: int) -> dist.Work:
        """Post a raw receive."""
        work = dist.irecv(flat, group=self._group, group_src=peer, tag=tag)
        assert work is not None
        return work

    def buffer(self, channel: int) -> tuple[Tensor, Tensor] | None:
        """A pooled buffer of the channel's layout; None when nothing travels on it."""
        layout = self._known[channel]
        if layout is None:
            return None
        free = self._free.get(channel)
        if free:
            pair = free.pop()
        else:
            self.buffers_made += 1
            pair = layout.empty(self._device)
        self._lent[id(pair[0])] = pair
        return pair


@final
class _ProcessPending(Pending):
    """Until the layout is known the header is what is waited for; then the elements are received."""

    def __init__(self, transport: ProcessTransport, peer: int, channel: int, microbatch: int) -> None:
        self._transport, self._peer, self._channel = transport, peer, channel
        self._tag = _tag(channel, microbatch)
        self._header: Tensor | None = None
        self._pair: tuple[Tensor, Tensor] | None = None
        if transport.knows(channel):
            self._work = self._payload()
        elif microbatch == 0:
            self._header = torch.empty(HEADER, dtype=torch.int64)
            self._work = transport.receive(peer, self._header, _header_tag(channel))
        else:
            # Microbatch 0 brings the layout, and is waited for first.
            self._work = None
        self._posted = transport.knows(channel)

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor | None:
        if not self._posted:
            self._learn()
        if self._work is not None:
            self._work.wait()
        return self._pair[0] if self._pair is not None else None

    def _learn(self) -> None:
        if self._header is not None and self._work is not None:
            self._work.wait()
            self._transport.learn(self._channel, self._header)
        self._work, self._posted = self._payload(), True

    def _payload(self) -> dist.Work | None:
        self._pair = self._transport.buffer(self._channel)
        if self._pair is None:
            return None
        return self._transport.receive(self._peer, self._pair[1], self._tag)


# 2048 microbatches per channel, and one more tag for the header.
_SPAN = 2048


def _tag(channel: int, microbatch: int) -> int:
    return channel * _SPAN + microbatch + 1


def _header_tag(channel: int) -> int:
    return channel * _SPAN


def _changed(channel: int, before: Layout | None, now: Layout | None) -> BoundaryMismatch:
    return BoundaryMismatch(
        f"the tensor on channel {channel} changed its layout between microbatches",
        numbers=f"first {before}, now {now}",
        next_step="outsize check MODEL, which names the unit",
    )
