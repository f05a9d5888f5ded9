"""Problem: how many bytes does CUDA's caching allocator reserve for tensors that come and go in this order?

    request   rounded up to 512 bytes                                        the block that is handed out
    pool      small for blocks of at most 1 MiB, large beyond; never mixed
    reuse     the smallest free block of the pool that is large enough       (best fit, lowest address)
    segment   else memory from the driver: 2 MiB for the small pool; in the large one 20 MiB for less than
              10 MiB, beyond that the block rounded up to 2 MiB
    split     what is left of a block becomes a free one: in the small pool from 512 bytes on, in the large
              one when it is more than 1 MiB
    free      a block is merged with its free neighbours of the same segment; segments stay reserved
    full      at the limit, segments that are free as a whole are given back before it gives up

`allocated` are the bytes of blocks in use, `reserved` those of segments, which is what a device must have.
Rules of PyTorch's c10/cuda/CUDACachingAllocator.cpp with default settings, for one stream. Deviations: no
expandable segments, no rounding to powers of two, no limit on splitting; the driver's addresses are one row.
Complexity: O(log b + free blocks moved) per request, b blocks. Oracle:
tests/benchmarks/test_caching_allocator.py, by hand and by properties; on a GPU the
counters of torch.cuda.memory_stats.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, final

from outsize.planner.memory.headroom import LARGE_SEGMENT, SMALL_SEGMENT

KIB: Final = 1024
MIB: Final = 1024 * KIB
SMALLEST: Final = 512
SMALL: Final = MIB
MEDIUM: Final = 10 * MIB
ROUND_LARGE: Final = 2 * MIB


def rounded(size_bytes: int) -> int:
    """Bytes of the block for a request."""
    return max(SMALLEST, -(-size_bytes // SMALLEST) * SMALLEST)


def segment_bytes(block_bytes: int) -> int:
    """What is asked of the driver for a block that no free one can hold."""
    if block_bytes <= SMALL:
        return SMALL_SEGMENT
    if block_bytes < MEDIUM:
        return LARGE_SEGMENT
    return -(-block_bytes // ROUND_LARGE) * ROUND_LARGE


@final
@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment; `before` and `after` are its neighbours there."""

    start: int
    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def whole(self) -> bool:
        """Is it a segment of its own?"""
        return self.before is None and self.after is None


@final
class OutOfSegments(Exception):
    """The limit does not hold the next segment."""


@final
@dataclass(slots=True, eq=False)
class Allocator:
    """A replay. `limit_bytes` None: as much as is asked for."""

    limit_bytes: int | None = None
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    _at: int = 0
    _live: dict[Hashable, Block] = field(default_factory=dict[Hashable, Block])
    _small: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # free: (size, start)
    _large: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _free: dict[int, Block] = field(default_factory=dict[int, Block])  # by start

    def allocate(self, key: Hashable, size_bytes: int) -> Block | None:
        """A block for a tensor; none for one of no bytes. Raises OutOfSegments, KeyError for a key in use."""
        if key in self._live:
            raise KeyError(key)
        if size_bytes <= 0:
            return None
        size = rounded(size_bytes)
        block = self._take(size) or self._segment(size)
        self._split(block, size)
        self._live[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, key: Hashable) -> None:
        """The tensor is gone; nothing happens for one of no bytes."""
        block = self._live.pop(key, None)
        if block is None:
            return
        self.allocated -= block.size
        self._put(self._merged(block))

    def empty_cache(self) -> None:
        """Give back the segments that are free as a whole."""
        for block in [b for b in self._free.values() if b.whole]:
            self._remove(block)
            self.reserved -= block.size

    @property
    def blocks(self) -> tuple[Block, ...]:
        """In use and free, by address."""
        return tuple(sorted((*self._live.values(), *self._free.values()), key=lambda b: b.start))

    def _pool(self, small: bool) -> list[tuple[int, int]]:
        return self._small if small else self._large

    def _take(self, size: int) -> Block | None:
        """The best free block, out of its pool."""
        pool = self._pool(size <= SMALL)
        place = bisect_left(pool, (size, 0))
        if place == len(pool):
            return None
        block = self._free[pool[place][1]]
        self._remove(block)
        return block

    def _segment(self, size: int) -> Block:
        wanted = segment_bytes(size)
        if not self._has_room(wanted):
            self.empty_cache()
            if not self._has_room(wanted):
                raise OutOfSegments(
                    f"{wanted} bytes more than {self.reserved} reserved of {self.limit_bytes}"
                )
        block = Block(self._at, wanted, size <= SMALL)
        self._at += wanted
        self.reserved += wanted
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def _has_room(self, wanted: int) -> bool:
        return self.limit_bytes is None or self.reserved + wanted <= self.limit_bytes

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left >= SMALLEST if block.small else left > SMALL:
            rest = Block(block.start + size, left, block.small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)

    def _merged(self, block: Block) -> Block:
        """With the free neighbours, which leave their pool."""
        if block.before is not None and block.before.free:
            block = self._joined(block.before, block, block.before)
        if block.after is not None and block.after.free:
            block = self._joined(block, block.after, block.after)
        return block

    def _joined(self, left: Block, right: Block, pooled: Block) -> Block:
        self._remove(pooled)
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        return left

    def _put(self, block: Block) -> None:
        block.free = True
        self._free[block.start] = block
        insort(self._pool(block.small), (block.size, block.start))

    def _remove(self, block: Block) -> None:
        block.free = False
        del self._free[block.start]
        pool = self._pool(block.small)
        del pool[bisect_left(pool, (block.size, block.start))]


def replay(sizes: Iterable[tuple[Hashable, int]], limit_bytes: int | None = None) -> Allocator:
    """Run `(key, bytes)` for a birth and `(key, 0)` for an end through a new allocator."""
    allocator = Allocator(limit_bytes)
    for key, size in sizes:
        if size:
            allocator.allocate(key, size)
        else:
            allocator.release(key)
    return allocator
