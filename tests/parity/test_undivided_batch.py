"""`check` says where the microbatches together have another loss than the batch in one piece.

An engine warns where it cannot derive their weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.train.batch.loss_weights import UnknownShares

Loss = Callable[[Tensor, Tensor], Tensor]
SAMPLES, CLASSES = 8, 4


@final
class Projection(nn.Module):
    """Embeddings of samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
    labels[:3] = -100
    return torch.randn(SAMPLES, 6, generator=draw), labels


def contrastive(output: Tensor, labels: Tensor) -> Tensor:
    similarity = output @ output.T / 0.1
    return F.cross_entropy(similarity, torch.arange(len(output)).roll(1))


def dice(output: Tensor, labels: Tensor) -> Tensor:
    chosen, truth = output.sigmoid()[:, 0], (labels > 1).float()
    return 1 - 2 * (chosen * truth).sum() / (chosen.sum() + truth.sum())


def triplet(output: Tensor, labels: Tensor) -> Tensor:
    distances = torch.cdist(output, output)
    return (distances.max(1).values - distances.mean(1)).mean()


def two_counts(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels) + output.pow(2).mean()


def tokens(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels)


def class_weights(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels, torch.tensor([0.1, 4.0, 1.0, 2.0]))


@final
class Layers(nn.Module):
    """The mean over a stack of two layers: its dim 0 holds no samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.first(x), self.second(x).tanh()]).mean(0)


def over_the_mask(output: Tensor, labels: Tensor) -> Tensor:
    """NaN for a microbatch without labels that count, by 0 / 0."""
    mask = (labels != -100).float()
    return (output.square().mean(1) * mask).sum() / mask.sum()


def over_the_mask_and_all(output: Tensor, labels: Tensor) -> Tensor:
    return over_the_mask(output, labels) + output.pow(2).mean()


MEANS = [tokens, class_weights, over_the_mask, two_counts, over_the_mask_and_all]


@pytest.mark.parametrize("make", [Projection, Layers])
@pytest.mark.parametrize("loss", MEANS, ids=lambda loss: loss.__name__)
def test_the_gradients_are_those_of_the_batch_in_one_piece(make: Callable[[], nn.Module], loss: Loss) -> None:
    x, labels = batch()  # The first of four microbatches has no label that counts.
    whole = make()
    loss(whole(x), labels).backward()
    engine = outsize.parallelize(
        make(), (x,), target=labels, loss_fn=loss, optimizer=torch.optim.SGD, stages=2, microbatches=4
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(x, target=labels, update=False)
    for name, parameter in engine.weights.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, msg=name)


def notes_of(loss: Loss, microbatches: int = 4, *, steps: int = 1) -> list[str]:
    x, labels = batch()
    verdict = outsize.check(
        Projection(), (x,), target=labels, loss_fn=loss, stages=2, microbatches=microbatches, steps=steps
    )
    assert verdict.bit_equal
    return [note for note in verdict.notes if "in one piece" in note]


@pytest.mark.parametrize("loss", [contrastive, dice, triplet], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_loss_over_the_whole_batch_is_noted_with_both_numbers(loss: Loss, steps: int) -> None:
    (note,) = notes_of(loss, steps=steps)
    x, labels = batch()
    with torch.no_grad():
        assert f"in one piece is {float(loss(Projection()(x), labels)):.7g}" in note
    assert "microbatches=1" in note


@pytest.mark.parametrize("loss", MEANS, ids=lambda loss: loss.__name__)
def test_a_loss_that_weights_make_whole_is_not_noted(loss: Loss) -> None:
    assert notes_of(loss) == []


def test_one_microbatch_is_the_undivided_batch() -> None:
    assert notes_of(contrastive, microbatches=1) == []


def with_a_slip(outputs: Tensor, labels: Tensor) -> Tensor:
    """Looks up what is not there, for as few samples as the loss is tried with."""
    return F.cross_entropy(outputs, labels) * (1.0 if len(labels) > 1 else {"one": 1.0}["two"])


def without_small_batches(outputs: Tensor, labels: Tensor) -> Tensor:
    if len(labels) < 2:
        raise ValueError("dice wants two samples")
    return dice(outputs, labels)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (with_a_slip, "raised KeyError: 'two'; its tape decided"),
        (without_small_batches, "dice wants two"),
        (dice, "test_undivided_batch.py"),
        (contrastive, "test_undivided_batch.py.*outsize.split"),
        (triplet, "cdist"),
    ],
)
def test_an_engine_warns_once_where_it_cannot_derive_weights(loss: Loss, says: str) -> None:
    x, labels = batch()
    engine = outsize.parallelize(
        Projection(), (x,), target=labels, loss_fn=loss, optimizer=torch.optim.SGD, stages=2, microbatches=4
    )
    with pytest.warns(UnknownShares, match=says):
        engine.step(x, target=labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(x, target=labels)


def test_an_engine_does_not_warn_where_weights_are_right() -> None:
    x, labels = batch()
    engine = outsize.parallelize(
        Projection(), (x,), target=labels, loss_fn=tokens, optimizer=torch.optim.SGD, stages=2, microbatches=4
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(x, target=labels)
