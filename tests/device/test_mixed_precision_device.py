"""Autocast and gradient scaling on devices: bit-equal to the plain loop, wherever the model was built."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerators import everywhere
from torch import Tensor, nn
from zoo import case

import outsize
from outsize.device.accelerators import float16_sums, has_float16_sums
from outsize.errors import BadOption, UnsupportedPlan

MICROBATCHES = 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=draw), torch.randn(8, 8, generator=draw)


def engine_for(model: nn.Module, device: str, x: Tensor, y: Tensor, **how: Any) -> outsize.Engine:
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y}
    plan = outsize.plan(model, (x,), cluster="2xcpu", stages=2, microbatches=MICROBATCHES, **given)
    return outsize.parallelize(model, (x,), plan=plan, devices=[device, device], **given, **how)


def plain_loss(model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient accumulation as a user writes it."""
    total = torch.zeros((), device=x.device)
    for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        with torch.autocast(x.device.type, dtype):
            loss = F.mse_loss(model(a), b)
        (loss / MICROBATCHES).backward()
        total += loss.detach() / MICROBATCHES
    return total


@pytest.mark.parametrize("device", everywhere("cuda:0", "sim:0", orders=("lazy",)))
def test_a_model_that_was_built_on_the_cpu_is_cast_on_the_device(device: str) -> None:
    kind, (x, y) = torch.device(device).type, batch()
    model, plain = network(), network().to(device)
    engine = engine_for(model, device, x, y)
    with torch.autocast(kind, torch.bfloat16):
        loss = engine.step(x, target=y, update=False).loss
    assert torch.equal(loss, plain_loss(plain, x.to(device), y.to(device), torch.bfloat16))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


class Masked(nn.Module):
    """Decides on its input, and makes tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * torch.hann_window(8, device=x.device)
        return self.second(h) if bool((x > 100).any()) else self.second(h * 2)


@pytest.mark.parametrize("device", everywhere("cuda:0", "sim:0", orders=("lazy",)))
def test_decisions_on_inputs_hold_under_autocast(device: str) -> None:
    kind, (x, y) = torch.device(device).type, batch()
    model = Masked()
    plain = copy.deepcopy(model).to(device)
    engine = engine_for(model, device, x, y)
    for inputs in (x, x + 200, x.to(device)):
        with torch.autocast(kind, torch.bfloat16):
            loss = engine.step(inputs, target=y, update=False).loss
        assert torch.equal(loss, plain_loss(plain, inputs.to(device), y.to(device), torch.bfloat16))


@pytest.mark.parametrize("casts", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("device", everywhere("cuda:0", "sim:0", orders=("lazy",)))
def test_an_example_on_the_device_for_a_model_on_the_host(device: str, casts: bool) -> None:
    """The model may be too large for the device, on which the data loader has put the batch already."""
    found, kind = case("resnet18"), torch.device(device).type
    assert found.target is not None
    assert found.loss is not None
    x, y = found.batch(4)[0][0].to(device), found.target(4)
    assert y is not None
    y = y.to(device)
    model, plain = found.build(), found.build().to(device)
    how: dict[str, Any] = {"loss_fn": found.loss, "target": y, "microbatches": 1}
    with torch.autocast(kind, torch.bfloat16, enabled=casts):
        engine = outsize.parallelize(model, (x,), stages=2, devices=[device, device], **how)
        loss = engine.step(x, target=y, update=False).loss
        expected = found.loss(plain(x), y)
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("casting", [("cpu",), ("device",), ("cpu", "device")], ids="_".join)
@pytest.mark.parametrize("device", everywhere("cuda:0", "sim:0", orders=("lazy",)))
def test_devices_of_two_types_are_refused_under_autocast(device: str, casting: tuple[str, ...]) -> None:
    """Where the stages meet, one would send bfloat16 and the other expect float32."""
    kind, (x, y) = torch.device(device).type, batch()
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y}
    engine = outsize.parallelize(network(), (x,), devices=["cpu", device], microbatches=2, **given)
    assert torch.isfinite(engine.step(x, target=y, update=False).loss)
    with contextlib.ExitStack() as stack:
        for name in casting:
            stack.enter_context(torch.autocast(kind if name == "device" else name, torch.bfloat16))
        with pytest.raises(BadOption, match=f"stages on cpu and {kind}.*Next: devices of one type"):
            engine.step(x, target=y, update=False)


@pytest.mark.parametrize("device", everywhere("cuda:0", "sim:0", orders=("lazy",)))
def test_a_plan_of_mixed_precision_wants_devices_of_one_type(device: str) -> None:
    x, y = batch()
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y, "cluster": f"cpu,{device}", "stages": 2}
    assert outsize.plan(network(), (x,), **given).precision == "fp32"
    with pytest.raises(BadOption, match="precision bf16-mixed, cluster cpu"):
        outsize.plan(network(), (x,), precision="bf16-mixed", **given)


@pytest.mark.parametrize("device", everywhere("cuda:0", "sim:0", orders=("lazy",)))
def test_sums_in_float16_are_the_engines_where_the_device_has_them(device: str) -> None:
    """Within a step and an evaluation alone, as a loop that sets torch's switch itself."""
    kind, (x, y), model, plain = torch.device(device).type, batch(), network(), network().to(device)
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y}
    wishes: dict[str, Any] = {"stages": 2, "microbatches": MICROBATCHES, "precision": "fp16-fp16acc"}
    plan = outsize.plan(model, (x,), cluster="2xrtx4090", **wishes, **given)
    if not has_float16_sums(device):
        with pytest.raises(UnsupportedPlan, match="adds products up in float16, and sim:0 does not"):
            outsize.parallelize(model, (x,), plan=plan, devices=[device, device], **given)
        return
    engine = outsize.parallelize(model, (x,), plan=plan, devices=[device, device], **given)
    with torch.autocast(kind, torch.float16):
        loss = engine.step(x, target=y, update=False).loss
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation
    with float16_sums():
        assert torch.equal(loss, plain_loss(plain, x.to(device), y.to(device), torch.float16))
