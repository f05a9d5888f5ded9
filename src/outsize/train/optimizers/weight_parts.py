"""Moves weights and gradients between the ranks that hold parts of them and an owner of the whole.

    weight   rank 0 has    rank 1 has     owner       before the step           after it
    w1       rows 0-1      rows 2-3       rank 0      rank 1 sends 2-3          rank 0 sends 2-3 back
    w2       rows 0-1      rows 2-3       rank 1      rank 0 sends 0-1          rank 1 sends 0-1 back
    norm     all           all            rank 1      nothing is sent           rank 1 sends all

Once, ranks tell each other which boxes of each weight they have (checkpoint/regions.py), so every layout is
one case: parts of tensor parallelism, of experts, shards of those, and stages of a pipeline, whose other
ranks have nothing. What several ranks have is taken from the owner itself, or else from the first of them.
Each way is one all-to-all of bytes: a rank sends what it has of each weight to that weight's owner.

Complexity: a rank sends and gets its part of all weights and gradients once, and holds a copy meanwhile.
Oracle: tests/dist/test_owned_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, final

import torch
from torch import Tensor

from outsize.run.transport.control_messages import all_gather_json
from outsize.run.transport.groups import RankGroup
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.train.checkpoint.regions import Region

_ALIGNMENT_BYTES: Final = 16  # of a box in a message, so that it can be read as any dtype
_Find = Callable[[str], Tensor]  # of the tensor of a weight by its name
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a box begins in the whole weight, and its sizes."""


@final
@dataclass(frozen=True, slots=True)
class _Holding:
    """A box of a weight, and the ranks that have it; the first of them sends it to the owner."""

    box: Box
    ranks: tuple[int, ...]


@final
class WeightParts:
    """The parts of weights among the ranks of a group; `owners` has the rank in the group of each weight."""

    def __init__(
        self,
        group: RankGroup,
        owners: Mapping[str, int],
        own: Mapping[str, Sequence[Region]],
        device: torch.device,
    ) -> None:
        """Tells the others which regions of each weight this rank has; all ranks of the group call this."""
        self._group, self._owners, self._own, self._device = group, owners, own, device
        self.rank = group.rank()
        boxes = {name: [[r.offsets, r.sizes] for r in regions] for name, regions in own.items()}
        every = all_gather_json(boxes, group.host, "parts of weights")
        self._holdings = {
            name: _holdings([rank.get(name, []) for rank in every], owners[name]) for name in owners
        }

    def is_own(self, name: str) -> bool:
        """Tells whether this rank owns a weight."""
        return self._owners[name] == self.rank

    def has(self, name: str) -> bool:
        """Tells whether this rank has a part of a weight."""
        return bool(self._own.get(name))

    def gather(self, names: Iterable[str], part: _Find, whole: _Find) -> None:
        """Fills the whole of each weight that this rank owns from the parts of all ranks."""
        sends, receives = self._messages(), self._messages()
        for name in names:
            for holding in self._holdings[name]:
                source = holding.ranks[0]
                if source == self.rank:
                    sends[self._owners[name]].append(self._region(name, holding).of(part(name)))
                if self.is_own(name):
                    receives[source].append(_within(whole(name), holding.box))
        self._exchange(sends, receives)

    def scatter(self, names: Iterable[str], part: _Find, whole: _Find) -> None:
        """Fills the parts of all ranks from the whole of each weight, which its owner has."""
        sends, receives = self._messages(), self._messages()
        for name in names:
            for holding in self._holdings[name]:
                if self.is_own(name):
                    for rank in holding.ranks:
                        sends[rank].append(_within(whole(name), holding.box))
                if self.rank in holding.ranks:
                    receives[self._owners[name]].append(self._region(name, holding).of(part(name)))
        self._exchange(sends, receives)

    def _messages(self) -> list[list[Tensor]]:
        return [[] for _ in range(self._group.size())]

    def _region(self, name: str, holding: _Holding) -> Region:
        return next(r for r in self._own[name] if (r.offsets, r.sizes) == holding.box)

    def _exchange(self, sends: list[list[Tensor]], receives: list[list[Tensor]]) -> None:
        """Sends `sends[rank]` to each rank and fills `receives[rank]` with what it sends."""
        for target, source in zip(receives[self.rank], sends[self.rank], strict=True):
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        sends[self.rank], receives[self.rank] = [], []
        if self._group.size() == 1:
            return
        sent_bytes, received_bytes = (
            [sum(map(_room_bytes, one)) for one in way] for way in (sends, receives)
        )
        outgoing, incoming = (
            torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            for sizes in (sent_bytes, received_bytes)
        )
        for tensor, place in _placed(outgoing, sends):
            place.copy_(tensor)
        RankCollectives.of(self._group.device).all_to_all(incoming, outgoing, received_bytes, sent_bytes)
        for tensor, place in _placed(incoming, receives):
            tensor.copy_(place)


def _holdings(boxes_by_rank: Sequence[Sequence[Any]], owner: int) -> list[_Holding]:
    """Returns each distinct box of a weight with the ranks that have it, the owner first if it is one."""
    ranks: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(boxes_by_rank):
        for offsets, sizes in boxes:
            ranks.setdefault((tuple(offsets), tuple(sizes)), []).append(rank)
    return [_Holding(box, tuple(sorted(some, key=lambda r: (r != owner, r)))) for box, some in ranks.items()]


def _within(whole: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def _room_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _placed(message: Tensor, tensors: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Returns each tensor with its place in a message, as a tensor of its dtype and shape."""
    flat = [tensor for some in tensors for tensor in some]
    starts = [0, *accumulate(map(_room_bytes, flat))]
    return [
        (t, message[at : at + t.numel() * t.element_size()].view(t.dtype).view(t.shape))
        for t, at in zip(flat, starts, strict=False)
    ]
