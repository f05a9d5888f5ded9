from __future__ import annotations

from itertools import pairwise

import pytest
from caching_allocator import (
    MIB,
    Allocator,
    OutOfSegments,
    replay,
    rounded,
    segment_bytes,
)
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = st.one_of(st.integers(1, 5000), st.integers(MIB - 600, MIB + 600), st.integers(1, 60 * MIB))


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Tensors that come and go in any order."""
    events: list[tuple[int, int]] = []
    alive: list[int] = []
    for number in range(draw(st.integers(1, 40))):
        if alive and draw(st.booleans()):
            events.append((alive.pop(draw(st.integers(0, len(alive) - 1))), 0))
        else:
            events.append((number, draw(SIZES)))
            alive.append(number)
    return events


def test_rounding_and_segments() -> None:
    assert [rounded(n) for n in (1, 512, 513, 4000)] == [512, 512, 1024, 4096]
    assert segment_bytes(MIB) == 2 * MIB
    assert segment_bytes(MIB + 512) == 20 * MIB
    assert segment_bytes(10 * MIB - 512) == 20 * MIB
    assert segment_bytes(10 * MIB) == 10 * MIB
    assert segment_bytes(11 * MIB) == 12 * MIB


def test_small_tensors_share_a_segment_of_two_mib() -> None:
    allocator = replay([(i, 1000) for i in range(2048)])
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)
    allocator.allocate("more", 1)
    assert allocator.reserved == 4 * MIB


def test_a_large_block_is_split_only_when_more_than_one_mib_is_left() -> None:
    allocator = Allocator()
    block = allocator.allocate("a", 5 * MIB)
    assert block is not None
    assert block.size == 5 * MIB
    rest = allocator.allocate("b", 14 * MIB)
    assert rest is not None
    assert (rest.start, rest.size) == (5 * MIB, 15 * MIB)  # the last MiB stays with it
    assert (allocator.allocated, allocator.reserved) == (20 * MIB, 20 * MIB)


def test_the_smallest_that_is_large_enough_is_used_again() -> None:
    allocator = replay([("a", 40 * MIB), ("b", 16 * MIB), ("a", 0), ("b", 0), ("c", 15 * MIB)])
    assert (allocator.reserved, allocator.allocated) == (56 * MIB, 16 * MIB)
    found = allocator.allocate("d", 17 * MIB)
    assert found is not None
    assert (found.start, found.size) == (0, 17 * MIB)


def test_neighbours_that_are_free_become_one() -> None:
    events = [("a", 3 * MIB), ("b", 4 * MIB), ("c", 5 * MIB), ("a", 0), ("c", 0), ("b", 0)]
    allocator = replay(events)
    (only,) = allocator.blocks
    assert (only.size, only.free, allocator.allocated) == (20 * MIB, True, 0)


def test_what_is_small_never_takes_from_the_large_pool() -> None:
    allocator = replay([("a", 30 * MIB), ("a", 0), ("b", 1000)])
    assert allocator.reserved == 32 * MIB


def test_fragments_that_no_request_fits() -> None:
    """Two holes of 30 do not hold 60: reserved is twice what is allocated."""
    allocator = replay([("a", 30 * MIB), ("b", 30 * MIB), ("a", 0), ("b", 0), ("c", 60 * MIB)])
    assert (allocator.allocated, allocator.reserved) == (60 * MIB, 120 * MIB)


def test_at_the_limit_free_segments_are_given_back_first() -> None:
    events = [("a", 30 * MIB), ("b", 30 * MIB), ("a", 0), ("b", 0), ("c", 60 * MIB)]
    allocator = replay(events, limit_bytes=64 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (60 * MIB, 60 * MIB)
    with pytest.raises(OutOfSegments, match="of 67108864"):
        allocator.allocate("d", 10 * MIB)
    assert allocator.allocated == 60 * MIB


def test_no_bytes_no_block_and_no_key_twice() -> None:
    allocator = Allocator()
    assert allocator.allocate("none", 0) is None
    allocator.release("none")
    allocator.allocate("a", 1)
    with pytest.raises(KeyError):
        allocator.allocate("a", 1)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(lives())
def test_blocks_tile_the_segments_and_hold_what_is_alive(events: list[tuple[int, int]]) -> None:
    allocator, alive = Allocator(), dict[int, int]()
    for key, size in events:
        if size:
            alive[key] = size
            block = allocator.allocate(key, size)
            assert block is not None
            assert size <= block.size
        else:
            del alive[key]
            allocator.release(key)
        used = [b for b in allocator.blocks if not b.free]
        assert len(used) == len(alive)
        assert sum(map(rounded, alive.values())) <= allocator.allocated <= allocator.reserved
        assert sum(b.size for b in allocator.blocks) == allocator.reserved
        assert all(a.start + a.size == b.start for a, b in pairwise(allocator.blocks))
        assert not any(a.free and b.free and a.after is b for a, b in pairwise(allocator.blocks))


@settings(max_examples=50, derandomize=True, deadline=None)
@given(lives())
def test_the_same_events_give_the_same_blocks(events: list[tuple[int, int]]) -> None:
    one, other = replay(events), replay(events)
    assert [(b.start, b.size, b.free) for b in one.blocks] == [
        (b.start, b.size, b.free) for b in other.blocks
    ]
    assert one.peak_reserved >= one.peak_allocated
    one.empty_cache()
    assert one.reserved <= other.reserved
