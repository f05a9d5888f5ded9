"""A request may fix how many stages are on each rank of the pipeline; what cannot be so is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption, NoFeasiblePlan, TooManyStages


def deep(layers: int = 26, width: int = 16) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def energy(y: Tensor) -> Tensor:
    return y.square().mean()


def planned(model: nn.Module, width: int = 16, **asked: Any) -> outsize.Plan:
    request = outsize.Request(batch_size=32, microbatches=8, **asked)
    x = torch.zeros(32, width, device="meta")
    return outsize.plan(model, (x,), request=request, loss_fn=energy)


@pytest.mark.parametrize(("chunks", "stages"), [(1, 2), (2, 4), (3, 6), (6, 12), (12, 24)])
def test_a_rank_has_as_many_stages_as_are_asked_for(chunks: int, stages: int) -> None:
    plan = planned(deep(), cluster="2xh100-80gb", stages=2, chunks=chunks, axes="pp")
    assert (len(plan.stages), plan.axes.pp) == (stages, 2)
    assert (plan.schedule == "interleaved") is (chunks > 1)


@pytest.mark.parametrize("chunks", [1, 5])
def test_meshes_have_as_many_as_well(chunks: int) -> None:
    plan = planned(deep(), cluster="4xh100-80gb", chunks=chunks, axes={"dp_replicate": 2})
    assert (len(plan.stages), plan.axes.pp, plan.axes.dp_replicate) == (2 * chunks, 2, 2)


def test_a_schedule_with_one_stage_on_a_rank_takes_no_more() -> None:
    with pytest.raises(BadOption, match=r"1f1b has one stage on each rank.*schedule='interleaved'"):
        planned(deep(), cluster="2xh100-80gb", stages=2, chunks=2, schedule="1f1b")


def test_more_stages_than_units_are_refused() -> None:
    with pytest.raises(TooManyStages, match="interleaved makes 40 stages on 2 devices"):
        planned(deep(), cluster="2xh100-80gb", stages=2, chunks=20, axes="pp")


def test_chunks_are_for_training() -> None:
    with pytest.raises(BadOption, match="chunks is for schedules that outsize makes for a training step"):
        planned(deep(), cluster="2xh100-80gb", chunks=2, inference=True)


def test_what_does_not_fit_interleaved_is_told_of_one_stage_on_a_rank() -> None:
    """A cluster of more devices than the model has units was an assertion."""
    axes = {"dp_replicate": 4, "others": 1}
    with pytest.raises(NoFeasiblePlan, match=r"needs .* GiB, .* has room for"):
        planned(deep(9, 1 << 17), 1 << 17, cluster="16xh100-80gb", schedule="interleaved", axes=axes)
