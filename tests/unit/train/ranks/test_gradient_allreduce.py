"""Where gradients of replicas are added up, in one process that is a group of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.utils.checkpoint import checkpoint

from outsize.run.transport.groups import RankGroup
from outsize.train.batch.loss_weights import Counted
from outsize.train.ranks.gradient_allreduce import GradientSum, TrainedWeight
from outsize.train.ranks.replicas import ReplicaGroup, own_pieces, pieces_of


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_no_replica_has_stays_none_and_the_rest_keeps_its_layout(group: dist.ProcessGroup) -> None:
    weights = [nn.Parameter(torch.randn(4, 3).t()), nn.Parameter(torch.randn(5)), nn.Parameter(torch.ones(2))]
    weights[0].grad = torch.randn(4, 3).t()
    weights[1].grad = torch.randn(5)
    expected = [None if p.grad is None else p.grad.clone() for p in weights]
    sums = GradientSum(RankGroup(group, group))
    sums.begin({0: [TrainedWeight(p, False) for p in weights[:2]], 2: [TrainedWeight(weights[2], False)]})
    sums.start(0)
    assert sums._left == [0, 2], "stage 2 goes first on every rank"
    sums.start(2)
    sums.finish()
    for parameter, wanted in zip(weights, expected, strict=True):
        assert (parameter.grad is None) == (wanted is None)
        if wanted is not None and parameter.grad is not None:
            assert torch.equal(parameter.grad, wanted)
            assert parameter.grad.stride() == wanted.stride()


def test_buckets_leave_within_the_last_backward(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step on, and what came twice in the first waits for the end."""
    monkeypatch.setattr("outsize.train.ranks.gradient_allreduce.BUCKET_BYTES", 1)
    twice, first, last = (nn.Parameter(torch.randn(3)) for _ in range(3))
    sums, once = GradientSum(RankGroup(group, group)), dict[int, int]()

    def again(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda v: v * twice, x, use_reentrant=True)

    for step in range(2):
        sums.begin({0: [TrainedWeight(parameter, False) for parameter in (twice, first, last)]})
        sums.watch(0, once)
        (again(again(first * 2)) * last).sum().backward()
        left = [bucket.parameters for bucket in sums._in_flight]
        assert left == ([] if step == 0 else [[last], [first]])
        sums.start(0)
        assert len(sums._in_flight) == 3
        sums.finish()
        assert first.grad is not None
        assert torch.allclose(first.grad, (step + 1) * 2 * twice.detach() ** 2 * last.detach())
    assert once[id(twice)] == 2
    assert not first._post_accumulate_grad_hooks


def test_a_step_that_fails_leaves_gradients_as_they_were(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, weight = RankGroup(group, group), nn.Parameter(torch.ones(2))
    replicas = ReplicaGroup(ranks, ranks)
    monkeypatch.setattr(replicas.gradients, "_counts", lambda _: False)
    weight.grad = torch.tensor([1.0, 2.0])

    def failing() -> None:
        assert weight.grad is None, "counted on the first replica alone"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), replicas.summing(lambda: {0: [TrainedWeight(weight, False)]}):
        failing()
    assert torch.equal(weight.grad, torch.tensor([1.0, 2.0]))


def test_every_replica_has_as_many_pieces_and_each_part_counts_once() -> None:
    counted = [Counted(2), Counted(2), Counted(1)]
    pieces = [pieces_of(index, 2, counted) for index in range(2)]
    assert [len(own) for own in pieces] == [2, 2]
    assert [p.number for own in pieces for p in own if p.counts] == [0, 1, 2]
    assert sum(p.share for own in pieces for p in own) == pytest.approx(1)
    assert (pieces[1][1].part, pieces[1][1].share, pieces[1][1].counts) == (2, 0.0, False)


def test_own_parts_are_numbered_through_all_replicas() -> None:
    everyones = [[Counted(3), Counted(3)], [Counted(2)]]
    first, second = (own_pieces(index, everyones) for index in range(2))
    assert [(p.part, p.number, p.share) for p in first] == [(0, 0, 3 / 8), (1, 1, 3 / 8)]
    assert [(p.part, p.number, p.share, p.counts) for p in second] == [
        (0, 2, 2 / 8, True),
        (0, 3, 0.0, False),
    ]
