"""A target of another number of samples than the inputs is refused, wherever a batch comes in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption

SAMPLES, CLASSES = 8, 3


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def inputs(samples: int = SAMPLES) -> Tensor:
    return torch.randn(samples, 6)


def labels(samples: int = SAMPLES) -> Tensor:
    return torch.arange(samples) % CLASSES


@pytest.mark.parametrize("targets", [2, 4, 7, 9, 16])
def test_a_step_refuses_a_target_of_other_samples(targets: int) -> None:
    """Two is the size of a microbatch, whose labels fitted every microbatch."""
    engine = outsize.parallelize(
        model(),
        (inputs(),),
        target=labels(),
        loss_fn=F.cross_entropy,
        optimizer=torch.optim.SGD,
        stages=2,
        microbatches=4,
    )
    with pytest.raises(BadOption, match=rf"the inputs have \[8\], the target \[{targets}\]"):
        engine.step(inputs(), target=labels(targets))


def test_check_refuses_an_example_of_other_samples() -> None:
    with pytest.raises(BadOption, match="a target for each sample"):
        outsize.check(model(), (inputs(6),), target=labels(8), loss_fn=F.cross_entropy, stages=2)


def test_a_target_without_samples_is_shared_where_the_user_says_so() -> None:
    def to_prior(output: Tensor, prior: Tensor) -> Tensor:
        return F.kl_div(output.log_softmax(-1), prior.expand_as(output), reduction="batchmean")

    prior = torch.tensor([0.5, 0.3, 0.2])
    verdict = outsize.check(
        model(), (inputs(),), target=prior, loss_fn=to_prior, batch_dims={"target": None}, stages=2
    )
    assert verdict.bit_equal


def test_a_shared_tensor_beside_the_labels_needs_no_word() -> None:
    def weighted(output: Tensor, target: Tensor, class_weights: Tensor) -> Tensor:
        return F.cross_entropy(output, target, class_weights)

    target = (labels(), torch.tensor([1.0, 2.0, 3.0]))
    assert outsize.check(model(), (inputs(),), target=target, loss_fn=weighted, stages=2).bit_equal
