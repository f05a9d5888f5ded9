"""Weights of a plan for a GPU: read from a file onto it tensor by tensor, gathered and saved from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerators import everywhere, width_on
from safetensors.torch import load_file, save_file
from torch import nn

import outsize

LAYERS = 8


def build(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


@pytest.mark.parametrize("device", everywhere())
def test_weights_go_straight_to_the_device_and_come_back_the_same(tmp_path: Path, device: str) -> None:
    torch.manual_seed(0)
    width = width_on(device, 2048)
    plain = build(width)
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = build(width)
    x, y = (torch.randn(8, width, device=device) for _ in range(2))
    plan = outsize.plan(model, (x,), loss_fn=F.mse_loss, target=y, cluster="2xh200", stages=2, microbatches=2)
    size = sum(p.nbytes for p in plain.parameters())
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    engine = outsize.parallelize(model, (x,), plan=plan, loss_fn=F.mse_loss, target=y, weights=tmp_path)
    assert {p.device.type for p in model.parameters()} == {device}
    assert torch.accelerator.max_memory_allocated() - before <= size + width * width * 4
    losses = [F.mse_loss(plain.to(device)(a), b) / 2 for a, b in zip(x.split(4), y.split(4), strict=True)]
    assert torch.equal(engine.step(x, target=y, update=False).loss, losses[0] + losses[1])
    engine.full_state_dict(to=tmp_path / "saved", shard_bytes=size // 3)
    files = (tmp_path / "saved").glob("*.safetensors")
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    found = engine.full_state_dict()
    assert list(found) == list(plain.state_dict())
    for name, tensor in plain.cpu().state_dict().items():
        assert found[name].device.type == "cpu"
        assert torch.equal(found[name], tensor)
        assert torch.equal(saved[name], tensor)
