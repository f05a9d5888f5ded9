"""Law 4: microbatches are weighted by what their means were taken over."""

from __future__ import annotations

import copy
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from parity_runs import fresh
from torch import Tensor, nn
from zoo import tokens

from outsize.capture.recording.fallbacks import record
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_weights import Counting, LossShares

LENGTHS = (16, 3, 9, 1, 12, 5, 2, 16)


def ragged() -> Batch:
    """Eight sequences of uneven lengths, padding marked by -100 in the labels."""
    ids = tokens(len(LENGTHS))
    past = torch.arange(ids.shape[1]) >= torch.tensor(LENGTHS)[:, None]
    return Batch((), {"input_ids": ids, "labels": ids.masked_fill(past, -100)})


def shares_of(
    model: nn.Module, batch: Batch, microbatches: int, loss_fn: Any = None, counting: Counting = "auto"
) -> list[float]:
    parts = batch.split(microbatches)
    tape = record(model, parts[0].args, parts[0].kwargs, loss_fn, parts[0].target)
    return LossShares(tape, model, counting).of(parts)


def weighted(
    model: nn.Module, batch: Batch, shares: list[float], loss_fn: Any = None
) -> tuple[Tensor, Tensor]:
    """Loss over the microbatches and the gradient of the first parameter."""
    model = copy.deepcopy(model)
    total = torch.zeros(())
    for part, share in zip(batch.split(len(shares)), shares, strict=True):
        output = model(*part.args, **part.kwargs)
        loss = loss_fn(output, *part.target) if loss_fn else output.loss
        (loss * share).backward()
        total = total + loss.detach() * share
    grad = next(iter(model.parameters())).grad
    assert grad is not None
    return total, grad


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_token_weights_give_the_full_batchs_loss_and_sample_weights_do_not(name: str) -> None:
    model, batch = fresh(name), ragged()
    full_loss, full_grad = weighted(model, batch, [1.0])
    counted = weighted(model, batch, shares_of(model, batch, 4))
    torch.testing.assert_close(counted[0], full_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(counted[1], full_grad, rtol=1e-6, atol=1e-6 * float(full_grad.abs().max()))
    by_samples = shares_of(model, batch, 4, counting="samples")
    assert by_samples == [0.25] * 4
    wrong = weighted(model, batch, by_samples)
    assert abs(wrong[0] - full_loss) > 1e-4 * full_loss


def test_the_counts_are_of_shifted_labels() -> None:
    """A causal model predicts the next token: a sequence of n tokens has n - 1 targets."""
    shares = shares_of(fresh("gpt2"), ragged(), 8)
    counts = [length - 1 for length in LENGTHS]
    assert shares == [c / sum(counts) for c in counts]


@final
class Pixels(nn.Module):
    """One class score per pixel, and an auxiliary head like torchvision's segmentation models."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.aux = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"out": self.head(image), "aux": self.aux(image)}


def segmentation(output: dict[str, Tensor], target: Tensor) -> Tensor:
    main = F.cross_entropy(output["out"], target, ignore_index=255)
    return main + 0.4 * F.cross_entropy(output["aux"], target, ignore_index=255)


def disagreeing(output: dict[str, Tensor], target: Tensor) -> Tensor:
    main = F.cross_entropy(output["out"], target, ignore_index=255)
    return main + 0.4 * F.cross_entropy(output["aux"], target.clamp(max=3))


def label_maps() -> Tensor:
    """Four maps, more and more of them unlabelled."""
    draw = torch.Generator().manual_seed(0)
    target = torch.randint(0, 4, (4, 6, 6), generator=draw)
    for number in range(4):
        target[number, : 1 + number] = 255
    return target


def images() -> Batch:
    return Batch((torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1)),), {}, (label_maps(),))


def test_segmentation_counts_labelled_pixels_of_both_heads() -> None:
    model, batch = Pixels(), images()
    shares = shares_of(model, batch, 4, segmentation)
    assert shares == [labelled / 84 for labelled in (30, 24, 18, 12)]
    full, found = weighted(model, batch, [1.0], segmentation), weighted(model, batch, shares, segmentation)
    torch.testing.assert_close(found[0], full[0], rtol=1e-6, atol=0)


def test_denominators_that_disagree_fall_back_to_samples() -> None:
    assert shares_of(Pixels(), images(), 4, disagreeing) == [0.25] * 4


def test_losses_that_take_no_mean_of_targets_count_samples() -> None:
    def summed(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["out"], target, ignore_index=255, reduction="sum")

    def of_activations(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["out"], output["aux"].argmax(1))

    for loss_fn in (summed, of_activations):
        assert shares_of(Pixels(), images(), 4, loss_fn) == [0.25] * 4, loss_fn


def test_a_batch_in_which_nothing_counts_falls_back_to_samples() -> None:
    batch = images()
    empty = Batch(batch.args, {}, (torch.full_like(batch.target[0], 255),))
    assert shares_of(Pixels(), empty, 2, segmentation) == [0.5, 0.5]
