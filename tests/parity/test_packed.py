"""Inputs whose rows belong to samples, to each another number of them: found, or said by `batch_dims`.

The judge packs each microbatch by itself and shares no code with outsize.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize

SIZES = torch.tensor([[1, 2], [2, 2], [1, 1], [3, 2], [1, 2], [2, 2]])  # height and width of six pictures
COUNTS = SIZES.prod(1).tolist()


class Patches(nn.Module):
    """A vector for each picture from its patches, and one from its text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second = nn.Embedding(9, 4), nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor, patches: Tensor, sizes: Tensor) -> Tensor:
        rows = self.first(patches).tanh().split([int(n) for n in sizes.prod(1)])
        seen = torch.stack([part.mean(0) for part in rows])
        return self.second(seen + self.embed(ids).mean(1))


class Nodes(Patches):
    """The same for graphs: `counts` nodes in each."""

    def forward(self, ids: Tensor, patches: Tensor, sizes: Tensor) -> Tensor:
        owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        seen = torch.zeros(len(sizes), 4).index_add(0, owner, self.first(patches).tanh())
        return self.second(seen + self.embed(ids).mean(1))


def batch(sizes: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 9, (6, 5), generator=draw)
    return (ids, torch.randn(sum(COUNTS), 3, generator=draw), sizes), torch.randn(6, 4, generator=draw)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def plain(model: nn.Module, sizes: Tensor, microbatches: int) -> tuple[Tensor, list[Tensor]]:
    """One step's loss, and the parameters after it."""
    (ids, patches, _), target = batch(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, rows = torch.zeros(()), patches.split(COUNTS)
    for part in torch.arange(6).tensor_split(microbatches):
        packed = torch.cat([rows[sample] for sample in part.tolist()])
        value = loss(model(ids[part], packed, sizes[part]), target[part])
        (value * (len(part) / 6)).backward()
        total = total + value.detach() * (len(part) / 6)
    optimizer.step()
    return total, [p.detach() for p in model.parameters()]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


CASES = [
    (Patches, SIZES, {}),
    (Nodes, SIZES.prod(1), {}),
    (Patches, SIZES, {1: lambda ids, patches, sizes: sizes.prod(1)}),
]


@pytest.mark.parametrize(("make", "sizes", "batch_dims"), CASES, ids=["grid", "counts", "function"])
@pytest.mark.parametrize("microbatches", [3, 6])
def test_packed_rows_follow_their_samples(
    make: Any, sizes: Tensor, batch_dims: Any, microbatches: int
) -> None:
    expected, weights = plain(make(), sizes, microbatches)
    args, target = batch(sizes)
    options = {"batch_dims": batch_dims} if batch_dims else {}
    engine = outsize.parallelize(
        make(),
        args,
        target=target,
        loss_fn=loss,
        optimizer=sgd,
        stages=2,
        microbatches=microbatches,
        **options,
    )
    assert torch.equal(engine.step(*args, target=target).loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(weights, engine.model.parameters(), strict=True))


@pytest.mark.parametrize(
    "how", ["sizes", lambda ids, patches, sizes: sizes.prod(1)], ids=["name", "function"]
)
def test_batch_dims_says_what_counts_the_rows(how: Any) -> None:
    (ids, patches, sizes), target = batch(SIZES)
    verdict = outsize.check(
        Patches(),
        (),
        kwargs={"ids": ids, "patches": patches, "sizes": sizes},
        target=target,
        loss_fn=loss,
        stages=2,
        microbatches=3,
        batch_dims={"patches": how},
    )
    assert verdict.bit_equal


def test_counts_that_are_not_those_of_the_rows_are_refused() -> None:
    args, target = batch(SIZES)
    wrong = {1: lambda ids, patches, sizes: sizes[:, 0]}
    with pytest.raises(
        outsize.OutsizeError, match=f"{sum(COUNTS)} rows; the counts of 6 samples add up to 10"
    ):
        outsize.check(
            Patches(), args, target=target, loss_fn=loss, stages=2, microbatches=3, batch_dims=wrong
        )
    with pytest.raises(outsize.OutsizeError, match="counts rows by 'size', which is no tensor"):
        outsize.check(
            Patches(), args, target=target, loss_fn=loss, stages=2, microbatches=3, batch_dims={1: "size"}
        )
