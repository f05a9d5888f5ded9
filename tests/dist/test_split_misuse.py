"""What one rank of a split model does and the others do not is named in words and ends the run in seconds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import outsize
from outsize.errors import BadOption, RankFailed, RunHung, WorldMismatch
from outsize.train.split.module import SplitModule
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave
from split.cases import Example, case

pytestmark = pytest.mark.dist
MODEL = case("mlp")
Work = Callable[[SplitModule, Example, int], None]


def on_two_ranks(work: Work, **how: Any) -> None:
    """Each rank trains a step as it should, and then does its work. The options are those of the split."""
    how = how or {"stages": 2}

    def rank() -> None:
        world, example = join(), MODEL.example(0)
        watch = outsize.Watch(hang_timeout=2.0)
        model = outsize.split(MODEL.net(), example.args, microbatches=4, callbacks=[watch], **how)
        F.cross_entropy(model(*example.args), example.target).backward()
        work(model, example, world.rank)
        leave(world)

    run_in_forks(2, rank)


def test_a_rank_that_skips_a_backward_is_named() -> None:
    def work(model: SplitModule, example: Example, rank: int) -> None:
        loss = F.cross_entropy(model(*example.args), example.target)
        if rank == 0:
            loss.backward()
        model(*example.args)

    with pytest.raises(RunHung, match=r"(?s)forward.*backward|backward.*forward"):
        on_two_ranks(work)


def test_a_rank_that_skips_a_call_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def work(model: SplitModule, example: Example, rank: int) -> None:
        if rank == 0:
            F.cross_entropy(model(*example.args), example.target).backward()
        torch.distributed.barrier()

    with pytest.raises(RunHung, match="barrier"):
        on_two_ranks(work)
    assert "RunHung" not in capfd.readouterr().err, "who has forked the ranks raises it"


def test_a_rank_with_another_batch_is_named() -> None:
    def work(model: SplitModule, example: Example, rank: int) -> None:
        model(example.args[0] + rank)

    with pytest.raises(WorldMismatch, match="batch"):
        on_two_ranks(work)


def test_ranks_that_disagree_about_a_gradient_are_named() -> None:
    def work(model: SplitModule, example: Example, rank: int) -> None:
        next(model.parameters()).requires_grad_(rank == 0)
        model(*example.args)

    with pytest.raises(WorldMismatch, match="gets a gradient on one rank"):
        on_two_ranks(work, axes={"dp_replicate": 2})


def test_a_rank_whose_loss_fails_alone_is_the_first_that_failed(capfd: pytest.CaptureFixture[str]) -> None:
    def work(model: SplitModule, example: Example, rank: int) -> None:
        loss = F.cross_entropy(model(*example.args), example.target)
        if rank == 1:
            raise ArithmeticError("of the user")
        loss.backward()

    with pytest.raises(RankFailed, match="rank 1 of 2 failed first"):
        on_two_ranks(work)
    assert "ArithmeticError: of the user" in capfd.readouterr().err


def test_a_copy_of_one_ranks_part_is_refused() -> None:
    def work(model: SplitModule, example: Example, rank: int) -> None:
        copy.deepcopy(model)

    with pytest.raises(BadOption, match="cannot be copied"):
        on_two_ranks(work)
