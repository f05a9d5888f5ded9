"""A device without streams and float64, as Apple's, and one whose driver says that it has no float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import outsize
from outsize.device import accelerators
from outsize.device.accelerators import AcceleratorType, lacks, widest_float
from outsize.program.tree import leaves

pytestmark = pytest.mark.sim
COUNT = 4


class NoDouble(TorchDispatchMode):
    """Refuses tensors in float64 on the simulated device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "sim" and leaf.dtype == torch.float64:
                raise TypeError(f"{func}: this device has no float64")
        return out


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The simulated device with Apple's row in the table, which refuses what Apple's devices lack."""
    lacking = accelerators.KNOWN["mps"].lacks
    monkeypatch.setitem(accelerators.KNOWN, "sim", AcceleratorType("sim", "Simulated", lacking))

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("this device has no streams")

    monkeypatch.setattr(torch, "Stream", refused)
    with NoDouble():
        yield


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    return nn.Sequential(*layers)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=draw), torch.randint(4, (16,), generator=draw)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def plain() -> list[Tensor]:
    """Losses of the plain loop on the device, whose gradients are clipped."""
    whole, losses = model().to("sim:0"), list[Tensor]()
    optimizer = adam(whole.parameters())
    for step in range(3):
        parts = [t.to("sim:0").chunk(COUNT) for t in batch(step)]
        shares = [F.cross_entropy(whole(x), y) / COUNT for x, y in zip(*parts, strict=True)]
        for share in shares:
            share.backward()
        losses.append(torch.stack([share.detach() for share in shares]).sum().cpu())
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("places", "how"),
    [
        (["sim:0"], {"weights": "host"}),
        (["sim:0"], {"recompute": "offload"}),
        (["sim:0", "cpu"], {"stages": 2}),
        (["cpu", "sim:0"], {"stages": 2}),
        (["sim:0", "sim:0"], {"stages": 2}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else str(*value.values()),
)
@pytest.mark.usefixtures("apple")
@pytest.mark.sample("sim:0-host", "sim:0-offload", "sim:0-sim:0")
def test_a_device_without_streams_and_float64_trains(places: Sequence[str], how: dict[str, Any]) -> None:
    x, y = batch(0)
    given: dict[str, Any] = {"loss_fn": F.cross_entropy, "target": y}
    if "stages" not in how:
        how = {"plan": outsize.plan(model(), (x,), cluster="1x12GB", microbatches=COUNT, **how, **given)}
    else:
        how = {**how, "microbatches": COUNT}
    engine = outsize.parallelize(
        model(), (x,), devices=list(places), optimizer=adam, clip_norm=1.0, **how, **given
    )
    losses = list[Tensor]()
    for step in range(3):
        x, y = batch(step)
        losses.append(engine.step(x, target=y).loss.cpu())
        x.fill_(torch.nan)
    assert torch.allclose(torch.stack(losses), torch.stack(plain()), rtol=1e-5)
    assert engine.timeline().duration_s > 0
    assert engine.evaluate(*batch(0)[:1], target=batch(0)[1]).loss is not None


def test_a_device_that_says_so_has_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of Intel's devices have it and some do not, so their type alone does not tell."""
    device, module = torch.device("sim:0"), torch.get_device_module("sim")
    accelerators._has_float64.cache_clear()
    assert widest_float(device) == torch.float64
    accelerators._has_float64.cache_clear()
    monkeypatch.setattr(module, "get_device_properties", lambda _: SimpleNamespace(has_fp64=False))
    assert lacks(device, "float64")
    assert widest_float(device) == torch.float32
    assert widest_float(torch.device("cpu")) == torch.float64
    accelerators._has_float64.cache_clear()
