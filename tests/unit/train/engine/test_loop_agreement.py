"""What ranks find out about each other's loops, from what each of them tells."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outsize.errors import WorldMismatch
from outsize.train.engine.loop_agreement import LoopAgreement, insist_on_one_rate, insist_on_one_scale


@pytest.mark.parametrize(
    ("scales", "is_alike"),
    [
        ([(0.5, 4), (0.25, 4)], False),
        ([(1.0, 4), (0.25, 4)], False),
        ([(0.5, 4), (0.5, 4)], True),
        ([(0.5, 4), (None, 4)], True),  # each gradient by a factor of its own, as clipping by value
        ([(0.5, 4), (None, 0)], True),  # a rank without gradients
        ([(0.5, 1), (0.25, 1)], True),  # one gradient alone, as clipping weight by weight
    ],
)
def test_factors(scales: list[tuple[float | None, int]], is_alike: bool) -> None:
    if is_alike:
        insist_on_one_scale(scales, 2)
        return
    with pytest.raises(WorldMismatch, match=r"another factor before step 2, .*Next: engine.clip_grad_norm"):
        insist_on_one_scale(scales, 2)


def test_rates_are_compared_where_groups_began_alike() -> None:
    insist_on_one_rate([([0.1], [0.05]), ([0.1], [0.05])], 1)
    insist_on_one_rate([([0.1], [0.05]), ([0.2], [0.2]), ([0.1, 0.1], [0.1, 0.1])], 1)
    insist_on_one_rate([([0.1], [0.05]), ([], [])], 1)
    insist_on_one_rate([([0.1], [0.05]), ([0.1], [None])], 1)  # one that a step has written
    with pytest.raises(WorldMismatch, match=r"rank 0 has 0.05, rank 1 has 0.1\. Next: call scheduler.step"):
        insist_on_one_rate([([0.1], [0.05]), ([0.1], [0.1])], 1)


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_a_factor_is_that_of_all_gradients(sets_to_none: bool) -> None:
    weights = [nn.Parameter(torch.ones(n)) for n in (2, 3)]
    optimizer, loop = torch.optim.SGD(weights, lr=0.1), LoopAgreement(None)
    for factors, found in (((0.5, 0.5), 0.5), ((0.5, 0.25), None)):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        loop.look(weights)
        for weight, factor in zip(weights, factors, strict=True):
            weight.grad.mul_(factor)  # pyright: ignore[reportOptionalMemberAccess]
        optimizer.step()
        optimizer.zero_grad(set_to_none=sets_to_none)
        loop.before_step()
        assert loop.factor() == (pytest.approx(found) if sets_to_none and found else None)
