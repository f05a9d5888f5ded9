"""`outputs="last"`: outputs stay with the last stage, others get zeros, every weight gets the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption
from outsize.train.split.module import SplitModule
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave
from split.cases import case

pytestmark = pytest.mark.dist
Work = Callable[[Any, int], None]


class _WithLoss(nn.Module):
    """Returns a number and what it was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.net(x)
        return F.cross_entropy(logits, y), logits


def on_ranks(count: int, work: Work) -> None:
    """Runs the work on each rank of a world."""

    def rank() -> None:
        world = join()
        torch.set_num_threads(1)
        work(world, world.rank)
        leave(world)

    run_in_forks(count, rank)


def trained(model: SplitModule, steps: int) -> list[Tensor]:
    """Trains and returns this rank's gradients and weights."""
    mlp, optimizer, seen = case("mlp"), torch.optim.AdamW(model.parameters()), list[Tensor]()
    for step in range(steps):
        example = mlp.example(step)
        mlp.loss(model(*example.args), example).backward()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def test_replicas_have_the_bits_of_a_model_whose_ranks_all_have_outputs() -> None:
    mlp = case("mlp")

    def work(world: Any, rank: int) -> None:
        how: dict[str, Any] = {"stages": 2, "microbatches": 2, "axes": {"dp_replicate": 2}}
        every, last = (
            outsize.split(mlp.net(), mlp.example(0).args, outputs=outputs, **how)
            for outputs in ("all", "last")
        )
        assert every.has_outputs
        pairs = list(zip(trained(every, 3), trained(last, 3), strict=True))
        assert pairs
        assert all(torch.equal(one, other) for one, other in pairs)
        with torch.no_grad():
            whole, own = every(*mlp.example(3).args), last(*mlp.example(3).args)
        assert torch.equal(own, whole if last.has_outputs else torch.zeros_like(whole))
        told: list[Any] = [None] * 4
        torch.distributed.all_gather_object(told, last.has_outputs)
        assert sum(told) == 2

    on_ranks(4, work)


def test_a_rank_without_outputs_gets_zeros_without_memory_and_numbers_that_hold() -> None:
    x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))

    def work(world: Any, rank: int) -> None:
        torch.manual_seed(0)
        model = outsize.split(_WithLoss(), (x, y), stages=2, microbatches=4, outputs="last")
        loss, logits = model(x, y)
        assert model.has_outputs == (rank == 1)
        assert logits.shape == (8, 4)
        assert logits.requires_grad
        assert logits.untyped_storage().nbytes() == (8 * 4 * 4 if rank else 4)
        assert bool(logits.any()) == bool(rank)
        told: list[Any] = [None, None]
        torch.distributed.all_gather_object(told, float(loss))
        assert told[0] == told[1] > 0
        (
            logits.sum() + loss
        ).backward()  # what a rank makes of zeros may be anything, as long as it is made of them

    on_ranks(2, work)


def test_one_process_has_its_outputs_and_another_word_is_refused() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(8, 4)
    model = outsize.split(net, (x,), stages=2, microbatches=2, outputs="last")
    assert model.has_outputs
    assert model(x).any()
    wrong: Any = "first"
    with pytest.raises(BadOption, match="outputs='first' is unknown"):
        outsize.split(net, (x,), outputs=wrong)
