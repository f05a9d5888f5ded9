"""Transport: how boundary values get from stage to stage. The only owner of point-to-point calls.

    sender                                     receiver
    send(peer, channel, mb, tensor)            post(peer, channel, mb) -> Pending     (does not block)
                                               pending.wait() -> tensor               (when it is needed)

A channel is one boundary value in one direction between two stages. Its layout travels once, before the
first tensor; after that both ends know it and only elements travel. `ProcessTransport` is torch.distributed
with non-blocking sends and receives and pooled buffers; `LocalTransport` hands tensors over in one process.

A pooled buffer is lent: a receiver gets a tensor of its own on it, and gives the buffer back (`release`). It
is received into again only once nothing else lives in its memory, so that a gradient that autograd passed on,
or that the user's hook keeps, is never overwritten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, final

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

    @abstractmethod
    def release(self) -> None:
        """The receiver is done with the tensor: its memory may be received into again when nobody holds it.

        What is not released is freed like any tensor when its last holder lets go.
        """


class Transport(ABC):
    """Moves tensors between ranks."""

    @abstractmethod
    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        """Start sending; never blocks compute."""

    @abstractmethod
    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        """Start receiving."""

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
        self._boxes[self._rank, peer, channel, microbatch] = tensor

    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        return _LocalPending(self._boxes, (peer, self._rank, channel, microbatch))

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

    def release(self) -> None:
        """Nothing was copied, so nothing comes back."""


# -- processes -----------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups of a transport. NCCL has one queue per group and pair, in which a receive holds up what
    is posted behind it; so values and gradients, to higher and to lower ranks, have a group each: `queues`.
    Its communicators are made at the first message of a pair, once. Layouts are numbers for the host and go
    over gloo; on gloo, which has tags, one group serves all.
    """

    queues: tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]
    layouts: dist.ProcessGroup

    def of(self, channel: int, source: int, destination: int) -> dist.ProcessGroup:
        """The group that moves a channel's elements; odd channels carry gradients."""
        return self.queues[channel % 2 * 2 + (source < destination)]

    def line_of(self, channel: int) -> int:
        """Channels of one number are received in the order in which they are sent."""
        has_tags = len(set(map(id, self.queues))) == 1
        return channel if has_tags else channel % 2


@final
class ProcessTransport(Transport):
    """torch.distributed point-to-point; tags keep channels and microbatches apart where there are tags."""

    def __init__(self, groups: Groups, device: torch.device, depth: int = 16) -> None:
        self._groups, self._device, self._depth = groups, device, depth
        self._outlets: dict[int, _Outlet] = {}
        self._inlets: dict[int, _Inlet] = {}
        self._lines = defaultdict[tuple[int, int], _Line](_Line)  # of a peer and a number of `line_of`

    @property
    def buffers_made(self) -> int:
        """Receive buffers since the beginning."""
        return sum(inlet.made for inlet in self._inlets.values())

    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        outlet = self._outlets.get(channel)
        if outlet is None:
            outlet = self._outlets[channel] = _Outlet(self._groups, peer, channel, self._depth)
        outlet.send(microbatch, tensor)

    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        inlet = self._inlets.get(channel)
        if inlet is None:
            line = self._lines[peer, self._groups.line_of(channel)]
            inlet = self._inlets[channel] = _Inlet(self._groups, peer, channel, self._device, line)
        return inlet.post(microbatch)

    def flush(self) -> None:
        for outlet in self._outlets.values():
            outlet.flush()

    def share(self, value: Tensor | None, source: int) -> Tensor:
        """A 0-dim fp64 tensor of rank `source`, on every rank."""
        wire = torch.zeros((), dtype=torch.float64) if value is None else value
        dist.broadcast(wire, group=self._groups.layouts, group_src=source)
        return wire

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
        for table in (self._outlets, self._inlets):
            for channel in [c for c in table if c in gone]:
                del table[channel]


@final
class _Outlet:
    """The sending end of a channel."""

    def __init__(self, groups: Groups, peer: int, channel: int, depth: int) -> None:
        self._groups, self._peer, self._channel, self._depth = groups, peer, channel, depth
        self._group, self._tag = groups.of(channel, groups.layouts.rank(), peer), _tag(channel, 0)
        self._layout: Layout | None = None
        self._met = False
        # Shape and strides of tensors whose memory is the message as it is.
        self._plain: tuple[Any, ...] = ()
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, microbatch: int, tensor: Tensor | None) -> None:
        if tensor is None or (tensor.shape, tensor.stride(), tensor.dtype) != self._plain:
            tensor = self._packed(tensor)
        if tensor is None:
            return
        # A bounded number of sends is under way, so a slow peer cannot make this rank keep every tensor.
        if len(self._leaving) >= self._depth:
            self._leaving.popleft()[0].wait()
        # Not dist.isend, which takes longer to check its arguments than gloo takes to send 2 KiB.
        work = self._group.send([tensor], self._peer, self._tag + microbatch)
        self._leaving.append((work, tensor))

    def flush(self) -> None:
        """Wait until everything has left."""
        while self._leaving:
            self._leaving.popleft()[0].wait()

    def _packed(self, tensor: Tensor | None) -> Tensor | None:
        """The tensor as it travels; the peer hears of its layout first. Raises BoundaryMismatch."""
        layout = Layout.of(tensor) if tensor is not None else None
        if not self._met:
            self._met, self._layout = True, layout
            header = layout.encode() if layout is not None else NOTHING
            work = self._groups.layouts.send([header], self._peer, _header_tag(self._channel))
            self._leaving.append((work, header))
        elif self._layout != layout:
            raise _changed(self._channel, self._layout, layout)
        if tensor is None:
            return None
        if tensor.is_contiguous() and not tensor.is_complex():
            self._plain = (tensor.shape, tensor.stride(), tensor.dtype)
            return tensor
        return _real(pack(tensor))


@final
class _Line:
    """Receives that are begun in the order in which they were posted.

    Without tags the k-th message sent goes into the k-th receive begun, and one whose layout is not known yet
    cannot begin: those behind it wait, too. With tags each channel is a line of its own, since a sender that
    waits for a receive to begin (gloo's does) must not wait for another channel's layout.
    """

    def __init__(self) -> None:
        self._posted: deque[_Arrival] = deque()

    def post(self, arrival: _Arrival) -> None:
        """Behind the others; begins as soon as all layouts up to it are known."""
        self._posted.append(arrival)
        self._advance()

    def bring(self, arrival: _Arrival) -> None:
        """Begin it, waiting for the layouts up to it: its peer has sent them before."""
        while not arrival.begun:
            self._posted[0].inlet.learn()
            self._advance()

    def _advance(self) -> None:
        while self._posted and self._posted[0].inlet.known:
            self._posted.popleft().begin()


@final
class _Inlet:
    """The receiving end of a channel, with its pool of buffers."""

    def __init__(self, groups: Groups, peer: int, channel: int, device: torch.device, line: _Line) -> None:
        self._group, self._peer = groups.of(channel, peer, groups.layouts.rank()), peer
        self._tag = _tag(channel, 0)
        self._device, self.line = device, line
        self._layout: Layout | None = None
        self._header = torch.empty(HEADER, dtype=torch.int64)
        self._meeting: dist.Work | None = groups.layouts.recv([self._header], peer, _header_tag(channel))
        self.lent: deque[_Arrival] = deque()  # given back, perhaps still held by somebody
        self.made = 0

    @property
    def known(self) -> bool:
        """Is the layout?"""
        return self._meeting is None

    def learn(self) -> None:
        """Wait for the layout."""
        if self._meeting is not None:
            self._meeting.wait()
            self._meeting, self._layout = None, Layout.decode(self._header)

    def post(self, microbatch: int) -> Pending:
        arrival = self._free() or _Arrival(self)
        arrival.microbatch, arrival.begun = microbatch, False
        self.line.post(arrival)
        return arrival

    def receive(self, arrival: _Arrival) -> dist.Work | None:
        """Begin to receive the elements; None when nothing travels here."""
        if self._layout is None:
            return None
        if arrival.flat is None:
            self.made += 1
            arrival.own(self._layout, self._device)
        assert arrival.flat is not None
        return self._group.recv([arrival.flat], self._peer, self._tag + arrival.microbatch)

    def _free(self) -> _Arrival | None:
        """A buffer that was given back and that nobody holds any more; held ones are their holders'."""
        while self.lent:
            arrival = self.lent.popleft()
            if arrival.is_free():
                return arrival
        return None


@final
class _Arrival(Pending):
    """A receive and its buffer, which is used again and again."""

    __slots__ = ("_holders", "_place", "_tensor", "_work", "begun", "flat", "inlet", "microbatch")

    def __init__(self, inlet: _Inlet) -> None:
        self.inlet, self.microbatch, self.begun = inlet, 0, False
        self._tensor: Tensor | None = None
        self.flat: Tensor | None = None
        self._work: dist.Work | None = None
        self._place = self._holders = 0

    def begin(self) -> None:
        """Its turn has come, and its layout is known."""
        self.begun, self._work = True, self.inlet.receive(self)

    def own(self, layout: Layout, device: torch.device) -> None:
        """Make the buffer."""
        self._tensor = layout.empty(device)
        self.flat = _real(layout.memory(self._tensor))
        self._place = self._tensor.untyped_storage()._cdata
        self._holders = _tensors_in(self._place)

    def is_free(self) -> bool:
        """Does no tensor but our own live in the buffer?"""
        return self._tensor is not None and _tensors_in(self._place) == self._holders

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor | None:
        self.inlet.line.bring(self)
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._tensor.detach() if self._tensor is not None else None

    def release(self) -> None:
        self.inlet.lent.append(self)


def _tensors_in(place: int) -> int:
    return torch._C._storage_Use_Count(place)


def _real(flat: Tensor) -> Tensor:
    """Backends move real numbers."""
    return torch.view_as_real(flat) if flat.is_complex() else flat


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
