"""Collectives in memory that ranks share, here all in one process: an operation ends when it is asked to."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from patience import PATIENCE_S
from torch import Tensor

from outsize.device import futex
from outsize.run.transport import rank_collectives, shared_memory_group
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.run.transport.shared_memory import PeerBell, SharedMemory
from outsize.run.transport.shared_memory_group import SharedMemoryGroup, new_arena

pytestmark = pytest.mark.skipif(not futex.AVAILABLE, reason="memory is shared on Linux and x86-64 alone")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def groups(count: int, pid: int | None = None, timeout_s: float = PATIENCE_S) -> list[SharedMemoryGroup]:
    """So many ranks; `pid` is the process to which all peers are said to belong."""
    arenas = [new_arena() for _ in range(count)]

    def peer(rank: int) -> tuple[SharedMemory, PeerBell]:
        memory = SharedMemory.open(os.getpid(), arenas[rank].file)
        return memory, PeerBell(rank, pid or os.getpid(), memory, 0.0, timeout_s)

    others = [[at for at in range(count) if at != rank] for rank in range(count)]
    return [
        SharedMemoryGroup(rank, arenas[rank], {at: peer(at) for at in others[rank]}) for rank in range(count)
    ]


def drawn(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [(torch.randn(*shape) * 10).to(dtype) for _ in range(count)]


def ended(ranks: list[SharedMemoryGroup], numbers: list[int]) -> None:
    for rank, number in reversed(list(zip(ranks, numbers, strict=True))):
        rank.end(number)


def in_order(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 1000, 300_000])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(count: int, size: int, dtype: torch.dtype) -> None:
    ranks, own = groups(count), drawn(count, size, dtype=dtype)
    expected = in_order([each.clone() for each in own])
    before = [each.clone() for each in own]
    numbers = [rank.begin_all_reduce(x, torch.add) for rank, x in zip(ranks, own, strict=True)]
    assert all(torch.equal(x, y) for x, y in zip(own, before, strict=True)), "touched before its end"
    ended(ranks, numbers)
    assert all(torch.equal(x, expected) for x in own)


def test_terms_are_read_where_they_lie() -> None:
    ranks, values = groups(3), drawn(3, 5000)
    own = [rank.buffer(5000, torch.float32) for rank in ranks]
    for buffer, value in zip(own, values, strict=True):
        buffer.copy_(value)
    numbers = [rank.begin_terms(x) for rank, x in zip(ranks, own, strict=True)]
    for rank, number, x in zip(ranks, numbers, own, strict=True):
        assert torch.equal(in_order(rank.terms(number, x)), in_order(values))
        rank.end(number)
    assert [rank._blocks[0].number for rank in ranks] == numbers, "one block each: nothing was copied"
    assert {len(rank._blocks) for rank in ranks} == {1}


def test_gathered_and_scattered_parts_come_from_every_rank() -> None:
    ranks, own = groups(3), drawn(3, 4, 5)
    whole = [torch.empty(12, 5) for _ in ranks]
    pairs = zip(ranks, whole, own, strict=True)
    ended(ranks, [rank.begin_all_gather(out, x) for rank, out, x in pairs])
    assert all(torch.equal(out, torch.cat(own)) for out in whole)

    given, parts = drawn(3, 6, 5), [torch.empty(2, 5) for _ in ranks]
    before = [each.clone() for each in given]
    ended(ranks, [r.begin_reduce_scatter(out, x) for r, out, x in zip(ranks, parts, given, strict=True)])
    total = in_order(before).chunk(3)
    assert all(torch.equal(part, total[at]) for at, part in enumerate(parts))
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_a_part_of_the_gathered_whole_is_not_copied() -> None:
    ranks, values = groups(2), drawn(2, 3000)
    whole = [rank.buffer(6000, torch.float32) for rank in ranks]
    for at, value in enumerate(values):
        whole[at][3000 * at : 3000 * (at + 1)] = value
    parts = [out[3000 * at : 3000 * (at + 1)] for at, out in enumerate(whole)]
    ended(ranks, [rank.begin_all_gather(o, x) for rank, o, x in zip(ranks, whole, parts, strict=True)])
    assert all(torch.equal(out, torch.cat(values)) for out in whole)
    assert {len(rank._blocks) for rank in ranks} == {1}


def test_a_block_is_used_again_when_all_have_read_it_and_no_tensor_lives_there() -> None:
    (first, second), value = groups(2), torch.ones(1000)
    held = first.buffer(1000, torch.float32)
    numbers = [first.begin_all_reduce(value.clone(), torch.add) for _ in range(3)]
    assert len(first._blocks) == 4, "the other rank has read none of them"
    for _ in range(3):
        second.end(second.begin_all_reduce(value.clone(), torch.add))
    first.end(numbers[-1])
    for _ in range(50):
        number = first.begin_all_reduce(value.clone(), torch.add)
        second.end(second.begin_all_reduce(value.clone(), torch.add))
        first.end(number)
    assert len(first._blocks) == 4
    del held
    assert sum(first._is_free(block) for block in first._blocks) == 4


def test_blocks_that_lie_unused_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_group, "_UNUSED", 5)
    first, second = groups(2)
    for size in (1 << 20, *(100,) * 10, 1 << 18):
        number = first.begin_all_reduce(torch.ones(size), torch.add)
        second.end(second.begin_all_reduce(torch.ones(size), torch.add))
        first.end(number)
    large = next(block for block in first._blocks if block.size >= 1 << 22)
    assert not large.is_backed
    assert not large.bytes.any(), "the system has taken the pages"
    x, y = torch.ones(1 << 20), torch.ones(1 << 20)
    number = first.begin_all_reduce(x, torch.add)
    second.end(second.begin_all_reduce(y, torch.add))
    first.end(number)
    assert large.is_backed
    assert bool((x == 2).all())
    assert torch.equal(x, y)


def test_who_broadcasts_needs_nobody_and_waits_for_those_that_are_far_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory_group, "_AHEAD", 4)
    waits: list[float] = []
    monkeypatch.setattr(shared_memory_group, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(shared_memory_group, "sleep", waits.append)
    source, other = groups(2)
    for step in range(8):
        source.broadcast(torch.full((3,), float(step)), 0)
        assert bool(waits) is (step >= 5)
    for step in range(8):
        x = torch.empty(3)
        other.broadcast(x, 0)
        assert x.tolist() == [step] * 3


def test_a_rank_that_has_gone_or_posts_nothing_is_named() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(ConnectionResetError, match=r"rank 1 has gone \(pid"):
        groups(2, pid=gone.pid)[0].broadcast(torch.ones(2), 1)
    with pytest.raises(TimeoutError, match="rank 1 sent nothing in 0 s: collective 1"):
        groups(2, timeout_s=0.1)[0].broadcast(torch.ones(2), 1)


def test_memory_goes_with_the_group() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ranks = groups(2)
    ended(ranks, [rank.begin_all_reduce(torch.ones(10), torch.add) for rank in ranks])
    assert len(os.listdir("/proc/self/fd")) > before
    del ranks
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def every_collective(group: dist.ProcessGroup) -> dict[str, Any]:
    ranks, rank, count = RankCollectives.of(group), group.rank(), group.size()
    own = torch.arange(12.0) + 100 * rank
    total, most, whole, part = own.clone(), own.clone(), torch.empty(12 * count), torch.empty(12 // count)
    ranks.all_reduce(total)
    ranks.all_reduce(most, dist.ReduceOp.MAX)
    ranks.all_gather(whole, own)
    ranks.reduce_scatter(part, own)
    sent = [rank + to + 1 for to in range(count)]
    rows = torch.arange(2.0 * sum(sent)).view(-1, 2) + 100 * rank
    received = [of + rank + 1 for of in range(count)]
    exchanged = torch.empty(sum(received), 2)
    ranks.all_to_all(exchanged, rows, received, sent)
    spread = own.clone()
    ranks.broadcast(spread, count - 1)
    found = {"total": total, "most": most, "whole": whole, "part": part, "spread": spread}
    return found | {"exchanged": exchanged, "near": ranks._near is not None}


def check_every(found: list[dict[str, Any]]) -> None:
    count = len(found)
    own = [torch.arange(12.0) + 100 * rank for rank in range(count)]
    for rank, each in enumerate(found):
        assert torch.equal(each["total"], in_order(own))
        assert torch.equal(each["most"], own[-1])
        assert torch.equal(each["whole"], torch.cat(own))
        assert torch.equal(each["part"], in_order(own).chunk(count)[rank])
        assert torch.equal(each["spread"], own[-1])
        parts = []
        for source in range(count):
            sizes = [source + to + 1 for to in range(count)]
            rows = torch.arange(2.0 * sum(sizes)).view(-1, 2) + 100 * source
            parts.append(rows.split(sizes)[rank])
        assert torch.equal(each["exchanged"], torch.cat(parts))


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_of_one_machine_use_memory(tmp_path: Path, count: int) -> None:
    found = on_ranks(tmp_path, count, every_collective)
    assert all(each["near"] for each in found)
    check_every(found)


def without(rank: int) -> Callable[[dist.ProcessGroup], dict[str, Any]]:
    """The same where the system gives one rank no memory to share."""

    def work(group: dist.ProcessGroup) -> dict[str, Any]:
        def none() -> SharedMemory:
            raise OSError("no room")

        with pytest.MonkeyPatch.context() as patch:
            if group.rank() == rank:
                patch.setattr(rank_collectives, "new_arena", none)
            return every_collective(group)

    return work


def test_where_one_rank_has_none_all_use_the_backend(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, 2, without(1))
    assert not any(each["near"] for each in found)
    check_every(found)


def parts_early(group: dist.ProcessGroup) -> float:
    value = torch.tensor([3.0 if group.rank() == 0 else 0.0])
    ranks = RankCollectives.of(group)
    ranks.all_reduce(torch.zeros(1))
    if group.rank() == 1:
        ready = torch.zeros(1)
        dist.recv(ready, 0)  # Rank 0 has broadcast, and says so last of all.
    else:
        ranks.broadcast(value, 0)
        dist.send(torch.zeros(1), 1)
        return 3.0
    ranks.broadcast(value, 0)
    return value.item()


def test_what_a_rank_has_posted_is_read_when_it_is_gone(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 2, parts_early) == [3.0, 3.0]
