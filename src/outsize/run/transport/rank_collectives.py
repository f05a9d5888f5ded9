"""Defines RankCollectives: the collectives of a process group, by the fastest way that its ranks have.

    tensors of the host, ranks on one machine     memory that they share (shared_memory_group.py)
    all others                                    the group's backend, by torch.distributed

Each group has one such object in a process, since ranks make its calls in one order, whoever makes them.
Where the forward of a microbatch and the backward of another one alternate (device/alternation.py), the one
that would wait gives way to the other first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol, Self, final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.device import futex
from outsize.device.accelerators import is_accelerator
from outsize.device.alternation import give_way, is_alternating
from outsize.run.transport.control_messages import all_gather_json
from outsize.run.transport.groups import backend_of, made_once
from outsize.run.transport.memory_offers import MemoryOffer, each_has_a_core
from outsize.run.transport.shared_memory import SPIN_S, PeerBell
from outsize.run.transport.shared_memory_group import SharedMemoryGroup, new_arena

_COMBINES: Final[dict[Any, Callable[..., Tensor]]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}
_READERS: Final = 4  # Each rank of an all-reduce reads what all have; with more ranks a ring is faster.


class Begun(Protocol):
    """A collective that has begun."""

    def wait(self) -> object:
        """Waits until its result is there, or lets the current stream wait."""
        ...


@final
class SummedTerms:
    """A sum over ranks that has begun: `terms` add up to it, in their order, until `close`."""

    def __init__(self, x: Tensor, work: Begun | None, near: SharedMemoryGroup | None, number: int) -> None:
        self._x, self._work, self._near, self._number = x, work, near, number

    def terms(self) -> Sequence[Tensor]:
        """Waits, and returns each rank's tensor, or the sum alone."""
        if self._near is not None:
            return self._near.terms(self._number, self._x)
        if self._work is not None:
            self._work.wait()
        return [self._x]

    def close(self) -> None:
        """Says that the terms have been read."""
        if self._near is not None:
            self._near.end(self._number)


@final
class _NearWork(dist.Work):
    """An operation in shared memory; FSDP2 waits for objects of torch's class alone."""

    def __init__(self, near: SharedMemoryGroup, number: int) -> None:
        super().__init__()
        self._near, self._number = near, number

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Ends it, and those before it."""
        self._near.end(self._number)
        return True


@final
class RankCollectives:
    """The collectives of one process group; `begin_...` returns at once, and what it was given is not touched
    before `wait`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._near, self._has_looked = group, None, False

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        """Returns those of a group."""
        ranks = dist.get_process_group_ranks(group)
        return made_once(("collectives", dist.get_backend_config(group), *ranks), lambda: cls(group))

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Adds up all ranks' x, or reduces them by `op`, in place."""
        if self._may_wait(self._reader(x, op)):
            _in_turn(self.begin_all_reduce(x, op))
        else:
            dist.all_reduce(x, op, group=self._group)

    def begin_all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Begun:
        """Begins to add up all ranks' x, or to reduce them by `op`, in place."""
        near = self._reader(x, op)
        if near is None:
            return _begun(dist.all_reduce(x, op, group=self._group, async_op=True))
        return _NearWork(near, near.begin_all_reduce(x, _COMBINES[op]))

    def begin_sum(self, x: Tensor) -> SummedTerms:
        """Begins to add up all ranks' x, which is best made by `buffer`; the caller adds up the terms."""
        near = self._reader(x)
        if near is None:
            return SummedTerms(x, dist.all_reduce(x, group=self._group, async_op=True), None, 0)
        return SummedTerms(x, None, near, near.begin_terms(x))

    def all_gather(self, out: Tensor, own: Tensor) -> None:
        """Puts all ranks' tensors into `out`, in a row."""
        if self._may_wait(self._shared_by(own)):
            _in_turn(self.begin_all_gather(out, own))
        else:
            _all_gather(out, own, self._group, async_op=False)

    def begin_all_gather(self, out: Tensor, own: Tensor) -> Begun:
        """Begins to put all ranks' tensors into `out`, in a row."""
        near = self._shared_by(own)
        if near is None:
            return _begun(_all_gather(out, own, self._group, async_op=True))
        return _NearWork(near, near.begin_all_gather(out, own))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Puts the sum of all ranks' parts for this rank into `out`; x are the parts for all ranks."""
        if self._may_wait(self._shared_by(x)):
            _in_turn(self.begin_reduce_scatter(out, x))
        else:
            _reduce_scatter(out, x, self._group, async_op=False)

    def begin_reduce_scatter(self, out: Tensor, x: Tensor) -> Begun:
        """Begins to put the sum of all ranks' parts for this rank into `out`."""
        near = self._shared_by(x)
        if near is None:
            return _begun(_reduce_scatter(out, x, self._group, async_op=True))
        return _NearWork(near, near.begin_reduce_scatter(out, x))

    def all_to_all(self, out: Tensor, own: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Sends `sent[r]` rows to each rank r, in the order of ranks; puts those that come into `out`."""
        if self._may_wait(self._shared_by(own)):
            _in_turn(self.begin_all_to_all(out, own, received, sent))
        else:
            dist.all_to_all_single(out, own, list(received), list(sent), group=self._group)

    def begin_all_to_all(
        self, out: Tensor, own: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Begun:
        """Begins to send `sent[r]` rows to each rank r, and to put those that come into `out`."""
        near, sizes = self._shared_by(own), (list(received), list(sent))
        if near is None:
            return _begun(dist.all_to_all_single(out, own, *sizes, group=self._group, async_op=True))
        return _NearWork(near, near.begin_all_to_all(out, own, received, sent))

    def broadcast(self, x: Tensor, source: int) -> None:
        """Puts the tensor of rank `source` of the group into x."""
        near = self._shared_by(x)
        if near is None:
            dist.broadcast(x, group=self._group, group_src=source)
        else:
            near.broadcast(x, source)

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for so many elements, which a collective need not copy, and which is not written to
        behind it.
        """
        near = None if is_accelerator(device) else self._shared()
        return torch.empty(count, dtype=dtype, device=device) if near is None else near.buffer(count, dtype)

    # -- memory that ranks share -----------------------------------------------------------------------------

    def _may_wait(self, near: SharedMemoryGroup | None) -> bool:
        """Tells whether a collective is begun, and waited for behind what else there is to compute."""
        return near is not None or is_alternating()

    def _reader(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> SharedMemoryGroup | None:
        """Returns the group for a reduction, of which every rank reads all terms."""
        return self._shared_by(x) if op in _COMBINES and self._group.size() <= _READERS else None

    def _shared_by(self, x: Tensor) -> SharedMemoryGroup | None:
        return None if is_accelerator(x.device) else self._shared()

    def _shared(self) -> SharedMemoryGroup | None:
        """Returns the group over memory that all ranks share; the first call is a collective."""
        if not self._has_looked:
            self._near, self._has_looked = _shared_memory_group(self._group), True
        return self._near


def _all_gather(out: Tensor, own: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Begun | None:
    # The first name is that of torch 2.13, the second that of earlier versions; so below.
    send = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return send(out, own, group=group, async_op=async_op)


def _reduce_scatter(out: Tensor, x: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Begun | None:
    send = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return send(out, x, group=group, async_op=async_op)


def _begun(work: Begun | None) -> Begun:
    assert work is not None
    return work


def _in_turn(work: Begun) -> None:
    """Waits for a collective, behind what the other of two computations has to compute meanwhile."""
    give_way()
    work.wait()


def _shared_memory_group(group: dist.ProcessGroup) -> SharedMemoryGroup | None:
    """Connects the ranks of a group over gloo; None where a pair of them cannot share memory."""
    if group.size() == 1 or backend_of(group, "cpu") != "gloo":
        return None
    rank, arena = group.rank(), None
    if futex.AVAILABLE:
        try:
            arena = new_arena()
        except OSError:
            arena = None
    told = {} if arena is None else MemoryOffer.of({0: arena}).written()
    offers = [MemoryOffer.read(each) for each in all_gather_json(told, group, "shared memory of a group")]
    known = [offer for offer in offers if offer is not None]
    opened = {at: offer.opened(0) for at, offer in enumerate(offers) if offer is not None and at != rank}
    peers = {at: memory for at, memory in opened.items() if memory is not None}
    has_all = arena is not None and len(peers) == group.size() - 1
    if not all(all_gather_json(has_all, group, "opened memory of a group")) or arena is None:
        return None
    spin_s = SPIN_S if each_has_a_core(known, dist.get_world_size() // group.size()) else 0.0
    timeout_s = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    ranks, pids = dist.get_process_group_ranks(group), [0 if o is None else o.pid for o in offers]
    return SharedMemoryGroup(
        rank,
        arena,
        {
            at: (memory, PeerBell(ranks[at], pids[at], memory, spin_s, timeout_s))
            for at, memory in peers.items()
        },
    )
