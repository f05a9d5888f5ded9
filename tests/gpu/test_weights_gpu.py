"""Weights of a plan for a GPU: read from a file onto it tensor by tensor, gathered and saved from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import outsize

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
WIDTH, LAYERS = 2048, 8


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@pytest.mark.gpu
@CUDA
def test_weights_go_straight_to_the_gpu_and_come_back_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = build()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = build()
    x, y = torch.randn(8, WIDTH, device="cuda"), torch.randn(8, WIDTH, device="cuda")
    plan = outsize.plan(model, (x,), loss_fn=F.mse_loss, target=y, cluster="2xh200", stages=2, microbatches=2)
    size = sum(p.nbytes for p in plain.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = outsize.parallelize(model, (x,), plan=plan, loss_fn=F.mse_loss, target=y, weights=tmp_path)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert torch.cuda.max_memory_allocated() - before <= size + WIDTH * WIDTH * 4
    losses = [F.mse_loss(plain.cuda()(a), b) / 2 for a, b in zip(x.split(4), y.split(4), strict=True)]
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
