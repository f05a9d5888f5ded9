"""Runs the collectives of the ranks along one dim of a mesh, without gradients, and counts their bytes.

    total        all-reduce        the sum of all ranks' x
    whole        all-gather        the whole of which each rank has a shard
    part         nothing is sent   this rank's shard of what it has whole
    total_part   reduce-scatter    this rank's shard of the sum

A `Share` says what a shard is. Ranks whose shards differ in size send them padded to the largest, since one
call of NCCL sends equally much from each. What gradients do is in the files of the axes, beside this one.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from outsize.program.sharding.share import RankPosition, Share
from outsize.run.collectives.functions import InFlight
from outsize.run.transport.rank_collectives import RankCollectives


@final
class MeshCollectives:
    """Runs collectives over one dim of a mesh; `sent` counts bytes of whole tensors by kind of collective.

    The bytes are counted as in ir/hardware/collectives.py: the input of an all_reduce and a reduce_scatter,
    the output of an all_gather.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.place = RankPosition(mesh.get_local_rank(), mesh.size())
        self.sent: Counter[str] = Counter()
        self._ranks = RankCollectives.of(mesh.get_group())

    def total(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Returns the sum (or reduction by `op`) of all ranks' x, without gradients."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        self.sent["all_reduce"] += x.numel() * x.element_size()
        self._ranks.all_reduce(x, op)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Returns the elementwise maximum of all ranks' x, without gradients."""
        return self.total(x, dist.ReduceOp.MAX)

    def part(self, x: Tensor, share: Share) -> Tensor:
        """Returns a copy of this rank's shard of the whole x."""
        return part_of(x, share, self.place)

    def whole(self, x: Tensor, share: Share) -> Tensor:
        """Gathers all shards into the whole tensor, without gradients."""
        places = [RankPosition(rank, self.place.ranks) for rank in range(self.place.ranks)]
        sizes = [place.size(share) for place in places]
        shape, is_even = [*x.shape], len(set(sizes)) == 1
        shape[share.dim] = max(sizes)
        mine = x.detach().contiguous() if is_even else x.new_zeros(shape)
        if not is_even:
            mine.narrow(share.dim, 0, x.shape[share.dim]).copy_(x.detach())
        parts = x.new_empty([len(places) * shape[0], *shape[1:]])
        self._ranks.all_gather(parts, mine)
        shape[share.dim] = share.size
        self.sent["all_gather"] += math.prod(shape) * x.element_size()
        if is_even and share.dim == 0 and len(share.parts) == 1:  # the ranks' parts in a row
            return parts
        gathered = x.new_empty(shape)
        for place, part in zip(places, parts.unflatten(0, (len(places), -1)), strict=True):
            done = 0
            for start, stop in place.ranges(share):
                piece = part.narrow(share.dim, done, stop - start)
                gathered.narrow(share.dim, start, stop - start).copy_(piece)
                done += stop - start
        return gathered

    def total_part(self, x: Tensor, share: Share) -> Tensor:
        """Returns this rank's shard of the sum of all ranks' x, without gradients."""
        return self._total_part(x, share, is_async=False).wait()

    def begin_total(self, x: Tensor) -> InFlight:
        """Begins to add up all ranks' x, in place."""
        self.sent["all_reduce"] += x.numel() * x.element_size()
        return InFlight(self._ranks.begin_all_reduce(x), (x,), x)

    def begin_total_part(self, x: Tensor, share: Share) -> InFlight:
        """Begins to add up all ranks' x, of which this rank gets its shard."""
        return self._total_part(x, share, is_async=True)

    def _total_part(self, x: Tensor, share: Share, *, is_async: bool) -> InFlight:
        parts = self._in_rows(x.detach(), share)
        self.sent["reduce_scatter"] += x.numel() * x.element_size()
        mine = torch.empty_like(parts[0])
        flat = parts.flatten(0, 1)
        work = self._ranks.begin_reduce_scatter(mine, flat) if is_async else None
        if work is None:
            self._ranks.reduce_scatter(mine, flat)
        return InFlight(work, (parts, mine), mine.narrow(share.dim, 0, self.place.size(share)))

    def _in_rows(self, x: Tensor, share: Share) -> Tensor:
        """Returns the ranks' shards one after the other, padded to equal sizes: (ranks, ..., shard, ...)."""
        places = [RankPosition(rank, self.place.ranks) for rank in range(self.place.ranks)]
        sizes = [place.size(share) for place in places]
        if len(set(sizes)) == len(share.parts) == 1:
            return x.unflatten(share.dim, (len(places), sizes[0])).movedim(share.dim, 0).contiguous()
        shape = [len(places), *x.shape]
        shape[share.dim + 1] = max(sizes)
        parts = x.new_zeros(shape)
        for place, into, size in zip(places, parts, sizes, strict=True):
            into.narrow(share.dim, 0, size).copy_(part_of(x, share, place))
        return parts


def part_of(x: Tensor, share: Share, place: RankPosition) -> Tensor:
    """Returns a copy of the shard that a rank has of the whole x."""
    if len(set(share.parts)) == 1 and not share.mirrored:
        start, stop = place.block(share.parts[0])
        rows = x.unflatten(share.dim, (len(share.parts), share.parts[0]))
        part = rows.narrow(share.dim + 1, start, stop - start)
        return part.flatten(share.dim, share.dim + 1).clone(memory_format=torch.contiguous_format)
    pieces = [x.narrow(share.dim, start, stop - start) for start, stop in place.ranges(share)]
    return torch.cat(pieces, share.dim)
