"""Says which boxes of a whole tensor a rank has, and where they lie in the rank's own tensor.

    whole (6 x 4)         divided along dim 0 in parts of 4 and 2 over two tensor-parallel ranks
    rows 0 1 | 2 3        rank 0 has rows 0, 1, 4: two regions, (0..1) at its row 0 and (4) at its row 2
    rows 4 | 5            rank 1 has rows 2, 3, 5

FSDP divides what a rank of the tensor-parallel group has once more, along dim 0. Both together are the
intersection of ranges along one dim with a box.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from outsize.program.sharding.share import RankPosition, Share
from outsize.run.collectives.tensor_parallel import LocalBox, local_box, local_of

Sizes = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Region:
    """A box: where it begins in the whole tensor and in this rank's own, and its sizes."""

    offsets: Sizes
    starts: Sizes
    sizes: Sizes

    def of(self, local: Tensor) -> Tensor:
        """Returns the box as a view of this rank's tensor."""
        if self.sizes == tuple(local.shape):
            return local
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


@final
@dataclass(frozen=True, slots=True)
class Located:
    """The shape of a whole tensor, the regions of it that this rank has, and whether it writes them."""

    shape: Sizes
    regions: tuple[Region, ...]
    writes: bool


@final
@dataclass(frozen=True, slots=True)
class Division:
    """How tensor-parallel ranks divide one tensor: its share, and this rank's place among them."""

    share: Share
    place: RankPosition


def located(tensor: Tensor, division: Division | None = None) -> Located:
    """Returns where a tensor of this rank lies in the whole one; `writes` is of the replicas of its part."""
    box, sizes = local_box(tensor), tuple(local_of(tensor).shape)
    if division is None:
        regions = () if 0 in sizes and 0 not in box.shape else (_all_of(box, sizes),)
        return Located(box.shape, regions, box.first)
    dim = division.share.dim
    shape = (*box.shape[:dim], division.share.size, *box.shape[dim + 1 :])
    ranges = division.place.ranges(division.share)
    return Located(shape, tuple(_within(box, sizes, dim, ranges)), box.first)


def _all_of(box: LocalBox, sizes: Sizes) -> Region:
    return Region(box.offsets, (0,) * len(sizes), sizes)


def _within(box: LocalBox, sizes: Sizes, dim: int, ranges: Iterable[tuple[int, int]]) -> Iterable[Region]:
    """Yields what is in the box of each range of the whole dim; on the rank the ranges lie in a row."""
    first, last, done = box.offsets[dim], box.offsets[dim] + sizes[dim], 0
    for start, stop in ranges:
        begin, end = max(done, first), min(done + stop - start, last)
        if begin < end and 0 not in sizes[:dim] + sizes[dim + 1 :]:
            yield Region(
                (*box.offsets[:dim], start + begin - done, *box.offsets[dim + 1 :]),
                (*((0,) * dim), begin - first, *((0,) * (len(sizes) - dim - 1))),
                (*sizes[:dim], end - begin, *sizes[dim + 1 :]),
            )
        done += stop - start
