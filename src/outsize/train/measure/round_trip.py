"""Sends a boundary value from the first to the last rank and back, as a step moves it, to be timed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.run.transport.groups import RankGroup
from outsize.run.transport.process_group import TransportGroups
from outsize.run.transport.same_host import connect


def make_wire(group: dist.ProcessGroup, device: torch.device) -> Callable[[Tensor], Callable[[], None]]:
    """Returns a function that makes the round trip of a tensor.

    Every rank calls this, and then the results on equal tensors in equal order. The ranks in between have
    nothing to do: their round trip returns at once.
    """
    transport = connect(TransportGroups.make(RankGroup.of(group, device), device), device)
    rank, last = group.rank(), group.size() - 1
    transport.open({(0, last, False), (last, 0, False)})
    channels = count(step=2)

    def exchange_of(tensor: Tensor) -> Callable[[], None]:
        channel, peer = next(channels), last - rank

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

    return exchange_of
