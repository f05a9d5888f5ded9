"""The rules of tests/dist/strict_group.py, each with what happens where it does not hold."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strict_group import HostTensor, Joined, Strict, strictly

pytestmark = pytest.mark.dist
UNBOUND, BOUND = Strict(), Strict(bound=True)
UNBOUND_HANGS, BOUND_HANGS = Strict(limit_s=2.0), Strict(bound=True, limit_s=2.0)


def one(value: float = 0.0) -> torch.Tensor:
    return torch.full((1,), value)


def wait(*works: Any) -> None:
    for work in works:
        work.wait()


def send(joined: Joined, peer: int, value: float = 0.0, tag: int = 0) -> Any:
    return joined.group.send([one(value)], peer, tag)


def receive(joined: Joined, peer: int, into: torch.Tensor | None = None, tag: int = 0) -> Any:
    return joined.group.recv([one() if into is None else into], peer, tag)


def test_messages_match_by_their_order_and_a_send_waits_for_its_receive(tmp_path: Path) -> None:
    def work(joined: Joined) -> Any:
        first, second = one(), one()
        if joined.group.rank() == 0:
            sends = [send(joined, 1, 5.0, tag=5), send(joined, 1, 6.0, tag=6)]
            time.sleep(0.2)
            early = [one.is_completed() for one in sends]
            joined.group.barrier().wait()
            wait(*sends)
            return early
        wait(receive(joined, 0, first, tag=6))
        joined.group.barrier().wait()
        wait(receive(joined, 0, second, tag=5))
        return [first.item(), second.item()]

    assert strictly(tmp_path, 2, work, UNBOUND) == [[True, False], [5.0, 6.0]]


def both_send_first(joined: Joined) -> Any:
    """Two ranks that send to each other and then receive, without a batch."""
    peer, into = 1 - joined.group.rank(), one()
    wait(send(joined, peer), receive(joined, peer, into))
    return "ended"


def test_a_pair_has_one_queue_for_both_directions(tmp_path: Path) -> None:
    for text in strictly(tmp_path, 2, both_send_first, UNBOUND_HANGS):
        assert "rank 0 | group 0 [0:1]: send float32[1] to 1, behind it recv float32[1] from 1" in text
        assert "rank 1 | group 0 [0:1]: send float32[1] to 0, behind it recv float32[1] from 0" in text


@pytest.mark.parametrize("rules", [UNBOUND, BOUND], ids=["unbound", "bound"])
def test_a_batch_begins_at_once(tmp_path: Path, rules: Strict) -> None:
    def work(joined: Joined) -> Any:
        rank, into = joined.group.rank(), one()
        wait(
            *dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, one(float(rank)), 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
            )
        )
        return into.item(), set(joined.executed)

    assert strictly(tmp_path, 2, work, rules) == [(1.0, {"group 0 [all]"}), (0.0, {"group 0 [all]"})]


def behind_another_peer(joined: Joined) -> Any:
    """Rank 0 sends to 2 and to 1; 2 receives only when 1, which has its message, allows it."""
    rank = joined.group.rank()
    for pair in ((0, 1), (0, 2), (1, 2)):  # communicators are made in one order
        if rank in pair:
            wait(send(joined, pair[1]) if rank == pair[0] else receive(joined, pair[0]))
    if rank == 0:
        wait(send(joined, 2), send(joined, 1))
    elif rank == 1:
        wait(receive(joined, 0))
        wait(send(joined, 2))
    else:
        wait(receive(joined, 1))
        wait(receive(joined, 0))
    return "ended"


def test_pairs_have_queues_of_their_own_unless_the_group_is_bound(tmp_path: Path) -> None:
    (tmp_path / "bound").mkdir()
    assert strictly(tmp_path, 3, behind_another_peer, UNBOUND) == ["ended"] * 3
    hung = strictly(tmp_path / "bound", 3, behind_another_peer, BOUND_HANGS)
    assert all("ranks wait for each other for 2 s" in text for text in hung if text != "ended")
    assert any("rank 0 | group 0 [all]: send float32[1] to 2" in text for text in hung)
    assert any("rank 2 | group 0 [all]: recv float32[1] from 1" in text for text in hung)


def test_communicators_that_are_made_in_a_circle_hang(tmp_path: Path) -> None:
    def work(joined: Joined) -> Any:
        rank = joined.group.rank()
        sent, received = send(joined, (rank + 1) % 3), receive(joined, (rank + 2) % 3)
        wait(sent, received)
        return "ended"

    for text in strictly(tmp_path, 3, work, UNBOUND_HANGS):
        assert "rank 0 | waits for the other ranks of [0:1]" in text
        assert "rank 2 | waits for the other ranks of [0:2]" in text


def a_collective_between(joined: Joined) -> Any:
    """Rank 0 sends before an all-reduce, and rank 1 receives behind it."""
    rank, value = joined.group.rank(), one(1.0)
    wait(send(joined, 1) if rank == 0 else receive(joined, 0))
    sent = send(joined, 1) if rank == 0 else None
    wait(joined.group.allreduce([value], dist.AllreduceOptions()))
    wait(receive(joined, 0) if sent is None else sent)
    return value.item()


def test_collectives_are_in_the_queue_of_a_bound_group(tmp_path: Path) -> None:
    (tmp_path / "bound").mkdir()
    assert strictly(tmp_path, 2, a_collective_between, UNBOUND) == [2.0, 2.0]
    for text in strictly(tmp_path / "bound", 2, a_collective_between, BOUND_HANGS):
        assert "rank 0 | group 0 [all]: send float32[1] to 1" in text
        assert "rank 1 | group 0 [all]: allreduce float32[1]" in text


def test_tensors_of_the_host_are_refused(tmp_path: Path) -> None:
    def work(joined: Joined) -> Any:
        value = one(1.0)
        dist.all_reduce(value)
        with pytest.raises(HostTensor, match=r"allreduce: no backend for host tensors \(float64\[1\]\)"):
            dist.all_reduce(value.double())
        with pytest.raises(HostTensor):
            dist.all_gather_object([None, None], "text")
        gathered = [one(), one()]
        dist.all_gather(gathered, value)
        dist.broadcast(value, 1)
        return value.item(), [g.item() for g in gathered]

    on_device = Strict(on_device=lambda tensor: tensor.dtype is torch.float32)
    assert strictly(tmp_path, 2, work, on_device) == [(2.0, [2.0, 2.0])] * 2
