"""Weights on the host of which all calls read autocast's copy: that copy alone comes to the device, with the
bits of the plain loop, and half of the bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_cast_weights import (
    MODELS,
    SIZE,
    autocast,
    batch,
    engine_for,
    insist_on_equal,
    insist_on_parity,
    made,
    plain_step,
)
from test_offload_parity import residency_of
from torch import Tensor, nn

import outsize
from outsize.errors import InvalidSchedule
from outsize.policies.weights import HOSTED, weight_policy
from outsize.run.host.flat_buffer import HostCast
from outsize.run.stage.cast_weights import WeightAsCast

pytestmark = pytest.mark.usefixtures("shared_recordings")
ON_HOST: dict[str, Any] = {"on_host": "host", "stages": 2, "recompute": "full"}


def cast_names(engine: outsize.Engine) -> set[str]:
    """The weights of which the host has made casts."""
    blocks = residency_of(engine)._blocks  # pyright: ignore[reportPrivateUsage]
    return {
        name for block in blocks if any(c.values is not None for c in block.casts()) for name in block.masters
    }


@pytest.mark.parametrize("weights", HOSTED)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample("plain", "tied-host", "repeated-host", "reentrant-host", "frozen-host")
def test_bits_of_the_plain_loop(name: str, weights: str) -> None:
    """Steps, and an evaluation between them; nothing is cast on the device but what is not known to be."""
    how = {"on_host": weights, "recompute": "full", "stages": 1 if name == "repeated" else 2}
    counts = insist_on_parity(name, **how)
    if name in ("plain", "frozen"):
        assert set(counts.values()) == {0}, "the host copies them, and no call casts them"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 8])
def test_stages_that_come_and_go(recompute: str, microbatches: int) -> None:
    how = {"stages": 4, "cluster": "4xcpu", "recompute": recompute}
    counts = insist_on_parity("plain", microbatches, on_host="host", **how)
    assert set(counts.values()) == {0}


def test_a_region_without_its_cache() -> None:
    """Autocast then casts at each use, whose gradients are added up in float32: so do these."""
    for name in ("plain", "repeated"):
        insist_on_parity(name, region=partial(autocast, cache_enabled=False), on_host="host", stages=1)


def test_which_weights_come_as_casts() -> None:
    """Not a norm's, which stays in float32, and not one that a table reads as it is."""
    for name, others in (("plain", "norms"), ("tied", "table")):
        model, (x, y) = made(name), batch()
        engine = engine_for(model, x, y, 4, **ON_HOST)
        with autocast():
            engine.step(x, target=y, update=False)
        everything = {name for name, _ in model.named_parameters()}
        assert cast_names(engine) == {n for n in everything if "norms" not in n and others not in n}


def test_half_of_the_bytes() -> None:
    """Of layers without a bias, whose buffers on the device are those of casts alone."""
    found = list[int]()
    for region in (autocast, torch.enable_grad):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        x = y = torch.randn(4, 64)
        engine = engine_for(model, x, y, 2, on_host="host", stages=4, cluster="4xcpu", recompute="full")
        with region():
            engine.step(x, target=y, update=False)
        found.append(residency_of(engine).device_bytes)
    assert found == [2 * 64 * 64 * 2, 2 * 64 * 64 * 4]


def test_one_model_in_several_precisions() -> None:
    """Steps under autocast to two types and without it: each has the weights that its calls read."""
    model, (x, y) = made("plain"), batch()
    plain, engine = copy.deepcopy(model), engine_for(model, x, y, 4, **ON_HOST)
    regions: list[Callable[[], Any]] = [autocast, torch.enable_grad, autocast, torch.enable_grad]
    for region in regions:
        with region():
            loss = engine.step(x, target=y, update=False).loss
        assert torch.equal(loss, plain_step(plain, x, y, 4, region))
        insist_on_equal(model, plain)
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.data.mul_(1.5)  # It does not count as a change of the tensor.


def test_casts_of_the_step_before_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with casts that stay it finds another loss."""
    monkeypatch.setattr(HostCast, "end", lambda _: None)
    with pytest.raises(AssertionError):
        test_one_model_in_several_precisions()


def test_the_weight_itself_is_not_there() -> None:
    master = nn.Parameter(torch.ones(2, 3))
    weight = WeightAsCast(master, torch.ones(2, 3, dtype=torch.bfloat16))
    assert (weight.shape, weight.dtype, weight.is_leaf) == (master.shape, torch.float32, True)
    with pytest.raises(InvalidSchedule, match="its cast alone is on the device"):
        F.linear(torch.ones(1, 3), weight)
    F.linear(torch.ones(1, 3, dtype=torch.bfloat16), weight.cast()).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(2, 3))
    assert weight.grad.dtype is torch.float32


class Guarded(nn.Module):
    """A layer whose weight a hand-written norm reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.layer.weight.square().sum(-1).rsqrt()
        return self.last(self.layer(x) * scale)


def test_a_weight_that_is_read_in_both_precisions() -> None:
    MODELS["guarded"] = Guarded
    try:
        for weights in HOSTED:
            recompute = weight_policy(weights).activations or "none"
            insist_on_parity("guarded", on_host=weights, stages=2, recompute=recompute)
    finally:
        del MODELS["guarded"]
