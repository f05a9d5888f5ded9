"""Activations on the host and a GPU that has two microbatches of them: same gradients, less memory.

    pytest tests/gpu                      # skips, with the reason, where torch sees no CUDA device

The same tests run on the CPU in tests/parity/test_activation_offload.py, orders of copies on fake streams in
tests/unit/run/moves/test_moves_activations.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outsize
from outsize.ir.plan import Recompute
from outsize.train.engine.engine import Engine

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
WIDTH, LAYERS, SAMPLES, MICROBATCHES = 1024, 12, 8192, 8


def engine_of(recompute: Recompute) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU()))).cuda()
    x, y = batch()
    how = {"microbatches": MICROBATCHES, "stages": 1, "schedule": "gpipe", "recompute": recompute}
    plan = outsize.plan(model, (x,), loss_fn=F.mse_loss, target=y, cluster="1x12GB", **how)  # pyright: ignore[reportArgumentType]
    return outsize.parallelize(model, (x,), plan=plan, loss_fn=F.mse_loss, target=y, devices=["cuda:0"])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, WIDTH, generator=found).cuda() for _ in range(2))
    return x, y


@pytest.mark.gpu
@CUDA
def test_the_same_gradients_with_less_memory() -> None:
    """What stays is counted in microbatches: of eight two, and a half for what is between."""
    (x, y), peaks, gradients = batch(), list[int](), list[list[torch.Tensor]]()
    for recompute in ("none", "offload"):
        engine = engine_of(recompute)
        engine.step(x, target=y, update=False)
        engine.module.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.step(x, target=y, update=False)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        gradients.append([p.grad.cpu() for p in engine.module.parameters() if p.grad is not None])
        del engine
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    each = SAMPLES // MICROBATCHES * WIDTH * 4 * 2 * LAYERS
    assert peaks[0] - peaks[1] > (MICROBATCHES - 2.5) * each
