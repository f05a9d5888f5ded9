"""Weights from the tape make the microbatches' losses and gradients those of the undivided batch.

The oracle is the loss function on the undivided batch; nothing of the analysis is used for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import record
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_trials import LossTrial
from outsize.train.batch.loss_weights import LossShares, unexpected_of

CLASSES, SAMPLES, LENGTH = 5, 8, 6
CLASS_WEIGHTS = torch.tensor([1.0, 0.2, 3.0, 0.5, 2.0])
# Samples have from one to six tokens that count; the first microbatch of four is all padding in PADDED.
LENGTHS = torch.tensor([1, 6, 2, 2, 5, 3, 4, 6])
PADDED = torch.tensor([0, 0, 2, 2, 5, 3, 4, 6])

Loss = Callable[..., Tensor]


@final
class Tokens(nn.Module):
    """Scores of classes for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 7), nn.Linear(7, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


def batch_of(lengths: Tensor) -> Batch:
    """Ids; labels with -100 behind the length; the mask of the tokens that count, as floats."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (SAMPLES, LENGTH), generator=draw)
    mask = torch.arange(LENGTH) < lengths[:, None]
    labels = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=draw).masked_fill(~mask, -100)
    return Batch((ids,), {}, (labels, mask.float()))


def per_token(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")


def smoothed(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, label_smoothing=0.1)


def weighted_classes(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, weight=CLASS_WEIGHTS)


def weighted_and_smoothed(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, weight=CLASS_WEIGHTS, label_smoothing=0.1)


def masked(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (per_token(scores, labels) * mask).sum() / mask.sum()


def masked_with_least_one(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (per_token(scores, labels) * mask).sum() / mask.sum().clamp(min=1)


def masked_with_epsilon(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return 0.5 * (per_token(scores, labels) * mask).sum() / (mask.sum() + 1e-8)


def masked_before_the_sum(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (per_token(scores, labels) * mask / mask.sum()).sum()


def mean_of_the_mask(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (per_token(scores, labels) * mask).mean() / mask.mean()


def sum_over_count(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="sum") / (labels != -100).sum()


def sum_over_a_python_count(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="sum") / int((labels != -100).sum())


def selected(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return per_token(scores, labels)[mask > 0].mean()


def written_out(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    chosen = scores.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None]).squeeze(2)
    return -(chosen * mask).sum() / mask.sum()


def per_sample_then_mean(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return ((per_token(scores, labels) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def two_heads(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return masked(scores, labels, mask) + 0.3 * weighted_by_tokens(scores, labels)


def weighted_by_tokens(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1) * 0.5, labels.flatten())


def sum_over_size(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="sum") / len(scores)


def sum_over_constant(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels, reduction="sum") / 8


def squared(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss(scores.mean(-1), mask)


DERIVED = [
    smoothed,
    weighted_classes,
    weighted_and_smoothed,
    masked,
    masked_with_least_one,
    masked_with_epsilon,
    masked_before_the_sum,
    mean_of_the_mask,
    sum_over_count,
    sum_over_a_python_count,
    selected,
    written_out,
    per_sample_then_mean,
    two_heads,
    sum_over_size,
    sum_over_constant,
    squared,
]


@final
class WithLoss(nn.Module):
    """Computes the loss inside the model."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.tokens, self.loss = Tokens(), loss

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:
        scores = self.tokens(ids)
        return {"loss": self.loss(scores, labels, mask), "scores": scores}


def inside(batch: Batch) -> Batch:
    return Batch((*batch.args, *batch.target), {})


def counters(model: nn.Module, parts: list[Batch], loss_fn: Loss | None) -> list[LossShares]:
    """One for each microbatch, since each may have a tape of its own."""

    def again(part: Batch) -> Any:
        return record(model, part.args, part.kwargs, loss_fn, part.target)

    return [LossShares(again(part), model, trial=LossTrial(loss_fn, part, again)) for part in parts]


def shares_of(model: nn.Module, batch: Batch, loss_fn: Loss | None) -> list[float]:
    parts = batch.split(4)
    each = counters(model, parts, loss_fn)
    assert all(counter.doubt is None for counter in each)
    return each[0].of(parts, each)


def trained(
    model: nn.Module, parts: list[Batch], shares: list[float], loss_fn: Loss | None
) -> tuple[Tensor, Tensor]:
    """The weighted loss and the gradient of all parameters."""
    model, total = copy.deepcopy(model), torch.zeros(())
    for part, share in zip(parts, shares, strict=True):
        output = model(*part.args, **part.kwargs)
        loss = loss_fn(output, *part.target) if loss_fn else output["loss"]
        (loss * share).backward()
        total = total + (loss.detach() * share if share else 0)
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return total, torch.cat(gradients)


def insist_on_whole(model: nn.Module, batch: Batch, loss_fn: Loss | None) -> None:
    shares = shares_of(model, batch, loss_fn)
    loss, gradient = trained(model, batch.split(4), shares, loss_fn)
    whole_loss, whole_gradient = trained(model, [batch], [1.0], loss_fn)
    torch.testing.assert_close(loss, whole_loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", DERIVED, ids=lambda loss: loss.__name__)
def test_a_loss_function_gives_the_loss_of_the_undivided_batch(loss: Loss) -> None:
    insist_on_whole(Tokens(), batch_of(LENGTHS), loss)


@pytest.mark.parametrize("loss", DERIVED, ids=lambda loss: loss.__name__)
def test_a_loss_inside_the_model_gives_the_loss_of_the_undivided_batch(loss: Loss) -> None:
    insist_on_whole(WithLoss(loss), inside(batch_of(LENGTHS)), None)


@pytest.mark.parametrize(
    "loss", [masked_with_least_one, weighted_classes, smoothed, masked_with_epsilon, sum_over_size]
)
def test_a_microbatch_of_padding_alone_has_no_share(loss: Loss) -> None:
    insist_on_whole(Tokens(), batch_of(PADDED), loss)


def focal(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A sum over all tokens by the number of positives (Lin et al. 2017, arXiv:1708.02002)."""
    each = F.binary_cross_entropy_with_logits(scores[..., 0], mask, reduction="none")
    return (each * (scores[..., 0].sigmoid() - mask) ** 2).sum() / mask.sum()


def focal_with_least_one(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    each = F.binary_cross_entropy_with_logits(scores[..., 0], mask, reduction="none")
    return (each * (scores[..., 0].sigmoid() - mask) ** 2).sum() / mask.sum().clamp(min=1)


@pytest.mark.parametrize(
    "lengths", [LENGTHS, PADDED, torch.zeros_like(LENGTHS)], ids=["some", "part", "none"]
)
def test_negatives_beside_a_number_of_positives_count_where_there_are_none(lengths: Tensor) -> None:
    insist_on_whole(Tokens(), batch_of(lengths), focal_with_least_one)


@pytest.mark.parametrize("loss", [focal, focal_with_least_one])
def test_a_first_sample_without_positives_makes_no_sum(loss: Loss) -> None:
    insist_on_whole(Tokens(), batch_of(torch.tensor([0, 6, 2, 2, 5, 3, 4, 6])), loss)


@pytest.mark.parametrize(
    "module",
    [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(CLASS_WEIGHTS), nn.CrossEntropyLoss(label_smoothing=0.2)],
)
def test_a_registered_loss_module_counts_as_its_function_does(module: nn.Module) -> None:
    @final
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.loss = Tokens(), module

        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": self.loss(self.tokens(ids).flatten(0, 1), labels.flatten())}

    batch = batch_of(LENGTHS)
    insist_on_whole(Labelled(), Batch((*batch.args, batch.target[0]), {}), None)


def dice(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    chosen = scores.softmax(-1)[..., 0] * mask
    return 1 - 2 * chosen.sum() / (chosen.pow(2).sum() + mask.sum())


def norm(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return scores.norm()


def by_class(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return scores.sum(0).pow(2).mean()


def by_pseudo_labels(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), scores.detach().argmax(-1))


@pytest.mark.parametrize("loss", [dice, norm, by_class, by_pseudo_labels])
def test_what_cannot_be_derived_is_named(loss: Loss) -> None:
    parts = batch_of(LENGTHS).split(4)
    counter = counters(Tokens(), parts, loss)[0]
    assert counter.doubt is not None
    assert "test_loss_denominators.py" in counter.doubt.where
    assert counter.of(parts) == [0.25] * 4


def test_a_term_that_cannot_be_derived_leaves_the_others_their_weights() -> None:
    def loss(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return masked(scores, labels, mask) + 0.01 * norm(scores, labels, mask)

    parts = batch_of(LENGTHS).split(4)
    counter = counters(Tokens(), parts, loss)[0]
    assert counter.doubt is not None
    assert counter.of(parts) == [n / 29 for n in (7, 4, 8, 10)]


def refusing(error: Exception) -> Loss:
    """A mean whose function raises for one sample, as the trial has it."""

    def loss(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        if len(scores) == 1:
            raise error
        return masked(scores, labels, mask)

    return loss


@pytest.mark.parametrize("error", [ValueError("too few"), KeyError("unknown")])
def test_what_a_trial_of_the_loss_raised_is_kept(error: Exception) -> None:
    batch = batch_of(LENGTHS)
    shares = counters(Tokens(), batch.split(2), refusing(error))
    assert [each.trial_error for each in shares] == [error] * 2
    assert unexpected_of(shares) == (None if isinstance(error, ValueError) else error)


def test_a_device_without_memory_is_no_answer_about_the_loss() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        counters(Tokens(), batch_of(LENGTHS).split(2), refusing(torch.OutOfMemoryError("full")))
