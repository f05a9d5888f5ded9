"""Finds out which ranks can share memory, and combines shared memory with the process group.

    all ranks      pid, for each peer a ring of their own (its file), cores they may use        all_gather
    each rank      opens the rings that were made for it; reads their cookies
    all ranks      whom they could read                                                        all_gather

A pair shares memory when each has read the other's cookie. A rank polls before it sleeps (`SPIN_S`) only when
every rank of its machine has a core to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor

from outsize.device import futex
from outsize.run.transport.base import CHANNELS, Pending, Transport
from outsize.run.transport.control_messages import all_gather_json
from outsize.run.transport.memory_offers import MemoryOffer, each_has_a_core
from outsize.run.transport.process_group import ProcessTransport, TransportGroups, Wire
from outsize.run.transport.shared_memory import SPIN_S, Arrival, Inbox, Outbox

_SHARED: Final = -1  # The channel belongs to `share` and to no program.


@final
class SameHostTransport(Transport):
    """Uses shared memory with the peers of `outboxes` and `inboxes`, and the process group with all others.

    `whole` says that every rank shares memory with every other rank.
    """

    def __init__(
        self,
        far: ProcessTransport,
        outboxes: Mapping[int, Outbox],
        inboxes: Mapping[int, Inbox],
        *,
        whole: bool = False,
    ) -> None:
        self._far, self._outboxes, self._inboxes, self._whole = far, outboxes, inboxes, whole

    @property
    def buffers_made(self) -> int:
        """Counts the receive buffers that were made since the beginning."""
        return self._far.buffers_made + sum(box.slots for box in self._inboxes.values())

    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        box = self._outboxes.get(peer)
        if box is None:
            self._far.send(peer, channel, microbatch, tensor)
        else:
            box.send(channel, microbatch, tensor)

    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        box = self._inboxes.get(peer)
        return (
            self._far.post(peer, channel, microbatch) if box is None else Arrival(box, (channel, microbatch))
        )

    def flush(self) -> None:
        for box in self._outboxes.values():
            box.flush()
        self._far.flush()

    def lift_bound(self) -> None:
        """Lets any number of sends over the process group be under way."""
        self._far.lift_bound()

    def open(self, wires: Iterable[Wire]) -> None:
        """Makes the communicators of wires that have none yet."""
        self._far.open(wires)

    def share(self, value: Tensor | None, source: int) -> Tensor:
        """Broadcasts a 0-dim tensor from rank `source`; a message waits in memory for a rank that comes
        later.
        """
        if not self._whole:
            return self._far.share(value, source)
        if value is None:
            arrival = self.post(source, _SHARED, 0)
            received = arrival.wait()
            assert received is not None
            value = received.clone()
            del received
            arrival.release()
            return value
        for box in self._outboxes.values():
            box.send(_SHARED, 0, value)
            box.flush()
        return value

    def to_rank(self, tensor: Tensor, source: int, destination: int = 0) -> Tensor | None:
        """Sends the tensor of rank `source` to the CPU of another rank."""
        return self._far.to_rank(tensor, source, destination)

    def forget(self, first_channel: int) -> None:
        """Drops buffers of the program whose channels begin here."""
        gone = range(first_channel, first_channel + CHANNELS)
        for box in (*self._outboxes.values(), *self._inboxes.values()):
            box.forget(gone)
        self._far.forget(first_channel)


def connect(
    groups: TransportGroups, device: torch.device, replicas: int = 1
) -> SameHostTransport | ProcessTransport:
    """Connects the ranks of a group; where gloo moves values, memory is shared with every rank that can.

    The call is a collective over `groups.layouts`. `replicas` counts the pipelines whose ranks live on the
    same machines, this one included.
    """
    far = ProcessTransport(groups, device)
    if not groups.has_tags or groups.layouts.size() == 1:
        return far
    rank, inboxes = groups.layouts.rank(), dict[int, Inbox]()
    outboxes, own = _offer(groups, lambda: any(box.has_unread() for box in inboxes.values()))
    offers = list(map(MemoryOffer.read, all_gather_json(own, groups.layouts, "shared memory")))
    spin_s = SPIN_S if each_has_a_core([offer for offer in offers if offer is not None], replicas) else 0.0
    for peer, offer in enumerate(offers):
        memory = offer.opened(rank) if offer is not None and peer in outboxes else None
        if offer is not None and memory is not None:
            inboxes[peer] = Inbox(peer, offer.pid, memory, spin_s, _timeout_s(groups))
    read: list[list[int]] = all_gather_json(sorted(inboxes), groups.layouts, "opened memory")
    near = {peer for peer in inboxes if rank in read[peer]}
    for far_peer in set(inboxes) - near:
        del inboxes[far_peer]
    whole = all(len(peers) == len(read) - 1 for peers in read)
    return SameHostTransport(far, {p: outboxes[p] for p in near}, inboxes, whole=whole) if near else far


def _offer(
    groups: TransportGroups, wanted: Callable[[], bool]
) -> tuple[dict[int, Outbox], Mapping[str, Any]]:
    """Makes a ring for each peer and says so, or none where the system cannot share memory like this."""
    peers = set(range(groups.layouts.size())) - {groups.layouts.rank()}
    if not futex.AVAILABLE:
        return {}, {}
    try:
        boxes = {peer: Outbox(wanted) for peer in sorted(peers)}
        return boxes, MemoryOffer.of({peer: box.memory for peer, box in boxes.items()}).written()
    except OSError:
        return {}, {}


def _timeout_s(groups: TransportGroups) -> float:
    return groups.layouts._get_backend(torch.device("cpu")).options._timeout.total_seconds()
