"""Sends values as a step moves them, to be timed: from the first to the last rank and back, and over all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.run.transport.groups import RankGroup
from outsize.run.transport.process_group import TransportGroups
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.run.transport.same_host import connect


@final
class TimedWire:
    """The messages and the collectives of a group; every rank makes one, and the same calls in one order."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        ranks = RankGroup.of(group, device)
        self.collectives = RankCollectives.of(ranks.device)
        self._transport = connect(TransportGroups.make(ranks, device), device)
        self._rank, self._last = group.rank(), group.size() - 1
        self._transport.open({(0, self._last, False), (self._last, 0, False)})
        self._channels = count(step=2)

    def round_trip(self, tensor: Tensor) -> Callable[[], None]:
        """Returns a function that sends a tensor from the first rank to the last and back.

        The ranks in between have nothing to do: theirs returns at once.
        """
        transport, rank, last = self._transport, self._rank, self._last
        channel, peer = next(self._channels), last - rank

        def there_and_back() -> None:
            coming = transport.post(peer, channel, 0)
            if rank == 0:
                transport.send(peer, channel, 0, tensor)
            coming.wait()
            coming.release()
            if rank == last:
                transport.send(peer, channel, 0, tensor)
            transport.flush()

        return there_and_back if rank in (0, last) else lambda: None
