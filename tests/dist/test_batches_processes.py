"""Two processes: batches of objects, slots, dicts with attributes and texts, in stages and replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize

pytestmark = pytest.mark.dist
SAMPLES = 4


class Slotted:
    """Has a tensor in a slot, and one in an object in another slot."""

    __slots__ = ("inner", "x")

    def __init__(self, x: Tensor, inner: Any) -> None:
        self.x, self.inner = x, inner


class Fields(dict[str, Any]):
    """Has a tensor in an attribute beside its items."""

    mask: Tensor


class Reads(nn.Module):
    """Computes with all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, batch: Slotted, fields: Fields, texts: list[str]) -> Tensor:
        lengths = torch.tensor([float(len(text)) for text in texts])
        hidden = self.first(batch.x * fields.mask).tanh() * lengths[:, None]
        return self.last(hidden + batch.inner["bias"] + fields["shift"])


def loss(output: Tensor, target: Slotted) -> Tensor:
    return F.cross_entropy(output, target.x)


def batch() -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(0)
    fields = Fields(shift=torch.randn(SAMPLES, 4, generator=draw))
    fields.mask = torch.rand(SAMPLES, 1, generator=draw)
    inner = {"bias": torch.randn(SAMPLES, 4, generator=draw)}
    return Slotted(torch.randn(SAMPLES, 3, generator=draw), inner), fields, ["a", "dog", "is", "here"]


@pytest.mark.parametrize("layout", ["stages", "replicas"])
def test_each_rank_has_its_samples_of_every_part(layout: str) -> None:
    options: dict[str, Any] = {"loss_fn": loss, "target": Slotted(torch.tensor([0, 1, 1, 0]), None)}
    axes = {"stages": 2} if layout == "stages" else {"stages": 1, "axes": {"dp_replicate": 2}}
    torch.manual_seed(0)
    model = Reads()
    plan = outsize.plan(model, batch(), cluster="2xcpu", microbatches=2, **axes, **options)
    found = outsize.check(model, batch(), plan=plan, processes=True, **options)
    assert found.holds, found
    assert found.processes == 2
    assert found.bit_equal or layout == "replicas"
