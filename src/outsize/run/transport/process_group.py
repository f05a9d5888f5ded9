"""Moves tensors between processes by torch.distributed; the only owner of its point-to-point calls.

Sends and receives do not block, and receive buffers are pooled. The layout of a channel's tensors travels
once, before the first tensor; after that both ends know it and only elements travel.

The receiver gets a new tensor object on a pooled buffer, and returns the buffer by `release`. The buffer is
received into again only when no other tensor lives in its memory, so that a gradient that autograd passed
on, or that a user's hook stores, is never overwritten.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Self, final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.device.malloc import mapped_tensor
from outsize.errors import BoundaryMismatch
from outsize.program.values.tensor_bits import flat_bytes
from outsize.run.transport.base import CHANNELS, Pending, Transport
from outsize.run.transport.groups import HOST_BACKENDS, RankGroup, device_backend, unbound_group
from outsize.run.transport.values import value_bytes, value_of_bytes
from outsize.run.transport.wire_layout import HEADER, NOTHING, WireLayout, pack

# So many sends of a channel, its layout among them, may be under way; unless a schedule needs more to end.
SENDS_AHEAD: Final = 16
Wire = tuple[int, int, bool]
"""The rank that sends, the rank that receives, and whether it carries gradients."""


@final
@dataclass(frozen=True, slots=True)
class TransportGroups:
    """Holds the process groups of a transport.

    An ordered backend has one queue per group and pair of ranks, in which a message holds up those behind it;
    so values and gradients, to higher and to lower ranks, have a group each: `queues`. Layouts are numbers on
    the host and travel over `layouts`, gloo; gloo has tags, so where it moves the elements, too, one group
    serves all.
    """

    queues: tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]
    layouts: dist.ProcessGroup

    @classmethod
    def make(cls, ranks: RankGroup, device: torch.device) -> Self:
        """Makes the groups for tensors of a device; a collective over the ranks."""
        backend = device_backend(ranks.device, device)
        if ranks.size() == 1 or backend in HOST_BACKENDS:
            return cls((ranks.host, ranks.host, ranks.host, ranks.host), ranks.host)
        first, second, third, fourth = (unbound_group(ranks.device, backend, f"queue {n}") for n in range(4))
        return cls((first, second, third, fourth), ranks.host)

    @property
    def has_tags(self) -> bool:
        """Returns whether one group serves all channels."""
        return len(set(map(id, self.queues))) == 1

    def of(self, channel: int, source: int, destination: int) -> dist.ProcessGroup:
        """Returns the group that moves a channel's elements; odd channels carry gradients."""
        return self.queues[channel % 2 * 2 + (source < destination)]

    def line_of(self, channel: int) -> int:
        """Returns the number of a channel's queue; messages of one queue are received in the order of their
        sends.
        """
        return channel if self.has_tags else channel % 2


@final
class ProcessTransport(Transport):
    """Uses torch.distributed point-to-point; tags separate channels and microbatches where the backend has
    tags.
    """

    def __init__(self, groups: TransportGroups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._ahead: int | None = SENDS_AHEAD
        self._outlets: dict[int, _Outlet] = {}
        self._inlets: dict[int, _Inlet] = {}
        self._lines = defaultdict[tuple[int, int], _Line](_Line)  # The key is (peer, number from `line_of`).
        self._open: set[Wire] = set()

    @property
    def buffers_made(self) -> int:
        """Counts the receive buffers that were allocated since the beginning."""
        return sum(inlet.made for inlet in self._inlets.values())

    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        outlet = self._outlets.get(channel)
        if outlet is None:
            outlet = self._outlets[channel] = _Outlet(self._groups, peer, channel)
        outlet.send(microbatch, tensor, self._ahead)
        if not self._groups.has_tags:
            for each in self._outlets.values():
                each.free_finished()

    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        inlet = self._inlets.get(channel)
        if inlet is None:
            line = self._lines[peer, self._groups.line_of(channel)]
            inlet = self._inlets[channel] = _Inlet(self._groups, peer, channel, self._device, line)
        return inlet.post(microbatch)

    def flush(self) -> None:
        for outlet in self._outlets.values():
            outlet.flush()

    def lift_bound(self) -> None:
        """Lets any number of sends be under way, for a schedule that would not end otherwise."""
        self._ahead = None

    def open(self, wires: Iterable[Wire]) -> None:
        """Makes the communicators of wires that have none yet; all ranks call this alike, before messages.

        An ordered backend makes a communicator at the first message of a pair, in which both ranks wait for
        each other. All ranks take the wires in one order, so none of them waits in a circle.
        """
        rank, message = self._groups.layouts.rank(), torch.zeros(1, device=self._device)
        for wire in sorted({*wires} - self._open):
            self._open.add(wire)
            source, destination, is_gradient = wire
            if self._groups.has_tags or rank not in (source, destination):
                continue
            group = self._groups.of(int(is_gradient), source, destination)
            call, peer = (group.send, destination) if rank == source else (group.recv, source)
            call([message], peer, 0).wait()

    def share(self, value: Tensor | None, source: int) -> Tensor:
        """Broadcasts a 0-dim fp64 tensor from rank `source` and returns it on every rank."""
        wire = torch.zeros((), dtype=torch.float64) if value is None else value
        dist.broadcast(wire, group=self._groups.layouts, group_src=source)
        return wire

    def to_rank(self, tensor: Tensor, source: int, destination: int = 0) -> Tensor | None:
        """Sends the tensor of rank `source` to the CPU of another rank over gloo; returns None elsewhere.

        The receiver takes shape and dtype from its own tensor, which may be on meta.
        """
        group = self._groups.layouts
        if group.rank() == source == destination:
            return tensor.detach().cpu()
        if group.rank() == source and tensor.numel():
            dist.send(flat_bytes(tensor.cpu()), group=group, group_dst=destination, tag=_STATE_TAG)
        if group.rank() != destination:
            return None
        value = mapped_tensor(tensor.shape, tensor.dtype)
        if tensor.numel():
            dist.recv(value.reshape(-1).view(torch.uint8), group=group, group_src=source, tag=_STATE_TAG)
        return value

    def forget(self, first_channel: int) -> None:
        """Drops layouts and pooled buffers of the program whose channels begin here, which will not run
        again.
        """
        gone = range(first_channel, first_channel + CHANNELS)
        for table in (self._outlets, self._inlets):
            for channel in [c for c in table if c in gone]:
                del table[channel]


@final
class _Outlet:
    """Sends the tensors of one channel."""

    def __init__(self, groups: TransportGroups, peer: int, channel: int) -> None:
        self._groups, self._peer, self._channel = groups, peer, channel
        self._group, self._tag = groups.of(channel, groups.layouts.rank(), peer), _tag(channel, 0)
        self._layout: WireLayout | None = None
        self._met = False
        # The tuple holds shape, strides and dtype of tensors whose memory is the message as it is.
        self._plain: tuple[Any, ...] = ()
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()
        self._header: tuple[dist.Work, Tensor] | None = None

    def send(self, microbatch: int, tensor: Tensor | None, ahead: int | None) -> None:
        if tensor is None or (tensor.shape, tensor.stride(), tensor.dtype) != self._plain:
            tensor = self._packed(tensor)
        if tensor is None:
            return
        # A bounded number of sends is under way, so a slow peer cannot make this rank keep every tensor.
        if ahead is not None and len(self._leaving) + (self._header is not None) >= ahead:
            self._finish_oldest()
        # dist.isend is avoided: checking its arguments takes longer than gloo takes to send 2 KiB.
        work = self._group.send([tensor], self._peer, self._tag + microbatch)
        self._leaving.append((work, tensor))

    def free_finished(self) -> None:
        """Frees the tensors that have left, as far as a look without waiting tells.

        On a device a send has ended when its event has passed, and no queue reads the tensor any more.
        """
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def flush(self) -> None:
        """Waits until every tensor has left."""
        while self._header is not None or self._leaving:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        """Waits until the oldest tensor has left, and frees it only then: a backend that does not hold its
        tensors itself would send what comes next into that memory.
        """
        if self._header is not None:
            # Not simulated: the header is in the host's memory, and gloo sends it.
            self._header[0].wait()
            self._header = None
            return
        self._leaving[0][0].wait()
        self._leaving.popleft()

    def _packed(self, tensor: Tensor | None) -> Tensor | None:
        """Returns the tensor as it travels, after the layout has been sent once. Raises BoundaryMismatch."""
        layout = WireLayout.of(tensor) if tensor is not None else None
        if not self._met:
            self._met, self._layout = True, layout
            header = layout.encode() if layout is not None else NOTHING
            work = self._groups.layouts.send([header], self._peer, _header_tag(self._channel))
            self._header = work, header
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
    """Begins receives in the order in which they were posted.

    Without tags the k-th message sent goes into the k-th receive begun, so a receive whose layout is not
    known yet holds up those behind it. With tags each channel has its own queue, since a sender that waits
    for a receive to begin (gloo's does) must not wait for another channel's layout.
    """

    def __init__(self) -> None:
        self._posted: deque[_Arrival] = deque()

    def post(self, arrival: _Arrival) -> None:
        """Adds a receive at the end; it begins as soon as all layouts up to it are known."""
        self._posted.append(arrival)
        self._advance()

    def begin_up_to(self, arrival: _Arrival) -> None:
        """Begins a receive, after waiting for the layouts up to it, which its peer has already sent."""
        while not arrival.begun:
            self._posted[0].inlet.learn()
            self._advance()

    def _advance(self) -> None:
        while self._posted and self._posted[0].inlet.known:
            self._posted.popleft().begin()


@final
class _Inlet:
    """Receives the tensors of one channel into a pool of buffers."""

    def __init__(
        self, groups: TransportGroups, peer: int, channel: int, device: torch.device, line: _Line
    ) -> None:
        self._group, self._peer = groups.of(channel, peer, groups.layouts.rank()), peer
        self._tag = _tag(channel, 0)
        self._device, self.line = device, line
        self._layout: WireLayout | None = None
        self._header = torch.empty(HEADER, dtype=torch.int64)
        self._meeting: dist.Work | None = groups.layouts.recv([self._header], peer, _header_tag(channel))
        self.released: deque[_Arrival] = deque()  # other tensors may still live in their buffers
        self.made = 0

    @property
    def known(self) -> bool:
        """Returns whether the layout is known."""
        return self._meeting is None

    def learn(self) -> None:
        """Waits for the layout."""
        if self._meeting is not None:
            self._meeting.wait()
            self._meeting, self._layout = None, WireLayout.decode(self._header)

    def post(self, microbatch: int) -> Pending:
        arrival = self._free() or _Arrival(self)
        arrival.microbatch, arrival.begun = microbatch, False
        self.line.post(arrival)
        return arrival

    def receive(self, arrival: _Arrival) -> dist.Work | None:
        """Begins to receive the elements; returns None when no tensor flows on this channel."""
        if self._layout is None:
            return None
        if arrival.flat is None:
            self.made += 1
            arrival.allocate(self._layout, self._device)
        assert arrival.flat is not None
        return self._group.recv([arrival.flat], self._peer, self._tag + arrival.microbatch)

    def _free(self) -> _Arrival | None:
        """Returns a released buffer in which no other tensor lives; the others belong to the
        tensors in them.
        """
        while self.released:
            arrival = self.released.popleft()
            if arrival.is_free():
                return arrival
        return None


@final
class _Arrival(Pending):
    """Represents a receive and its buffer, which is used again."""

    __slots__ = ("_holders", "_place", "_tensor", "_work", "begun", "flat", "inlet", "microbatch")

    def __init__(self, inlet: _Inlet) -> None:
        self.inlet, self.microbatch, self.begun = inlet, 0, False
        self._tensor: Tensor | None = None
        self.flat: Tensor | None = None
        self._work: dist.Work | None = None
        self._place = self._holders = 0

    def begin(self) -> None:
        """Starts to receive; all receives before it have begun and its layout is known."""
        self.begun, self._work = True, self.inlet.receive(self)

    def allocate(self, layout: WireLayout, device: torch.device) -> None:
        """Allocates the buffer."""
        self._tensor = layout.empty(device)
        self.flat = _real(layout.memory(self._tensor))
        self._place = self._tensor.untyped_storage()._cdata
        self._holders = _tensors_in(self._place)

    def is_free(self) -> bool:
        """Returns whether only this object's own tensor lives in the buffer."""
        return self._tensor is not None and _tensors_in(self._place) == self._holders

    def ready(self) -> bool:
        return True

    def wait(self) -> Tensor | None:
        self.inlet.line.begin_up_to(self)
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._tensor.detach() if self._tensor is not None else None

    def release(self) -> None:
        self.inlet.released.append(self)


def _tensors_in(place: int) -> int:
    return torch._C._storage_Use_Count(place)


def _real(flat: Tensor) -> Tensor:
    """Views complex numbers as pairs of real numbers, since backends move real numbers only."""
    return torch.view_as_real(flat) if flat.is_complex() else flat


# A channel has 2048 tags for microbatches, one of them for the header. Tags are 32-bit numbers, so programs
# share them: programs run one after the other, and messages of one tag arrive in the order of their sends.
_SPAN = 2048
_STATE_TAG = CHANNELS * _SPAN + 1


def _tag(channel: int, microbatch: int) -> int:
    return channel % CHANNELS * _SPAN + microbatch + 1


def _header_tag(channel: int) -> int:
    return channel % CHANNELS * _SPAN


def _changed(channel: int, before: WireLayout | None, now: WireLayout | None) -> BoundaryMismatch:
    return BoundaryMismatch(
        f"the tensor on channel {channel} changed its layout between microbatches",
        numbers=f"first {before}, now {now}",
        next_step="outsize check MODEL, which names the unit",
    )


@final
class ValuePackets:
    """Sends values of any kind between two ranks of a group over the host: what is sent waits for nobody.

    A rank reads the packets of another one in the order in which they were sent.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, peer: int, value: Any) -> None:
        """Begins to send a value. Raises NotSendable."""
        data = value_bytes(value)
        for part in (torch.tensor([len(data)]), data):
            self._sent.append((self._group.send([part], peer, 0), part))

    def receive(self, peer: int) -> Any:
        """Waits for the next value of a rank; its tensors are on the host."""
        size = torch.zeros(1, dtype=torch.int64)
        # Not simulated: the size of a packet is in the host's memory, and gloo sends it.
        self._group.recv([size], peer, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        # Not simulated: a packet is in the host's memory, and gloo sends it.
        self._group.recv([data], peer, 0).wait()
        return value_of_bytes(data)

    def flush(self) -> None:
        """Waits until all that was sent has been read."""
        for work, _ in self._sent:
            # Not simulated: it keeps the memory of what gloo is still sending.
            work.wait()
        self._sent.clear()
