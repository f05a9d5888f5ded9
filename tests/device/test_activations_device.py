"""Activations on the host and a GPU that has two microbatches of them: same gradients, less memory.

    pytest tests/device                   # on the simulated device, and on CUDA where torch sees it

The same tests run on the CPU in tests/parity/test_activation_offload.py, orders of copies on fake streams in
tests/unit/run/moves/test_moves_activations.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from accelerators import WHILE_IT_WORKS, everywhere, width_on
from torch import nn

import outsize
from outsize.policies.activations import Recompute
from outsize.train.engine.engine import Engine

LAYERS, SAMPLES, MICROBATCHES = 12, 8192, 8


def engine_of(recompute: Recompute, device: str, width: int) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(width, width), nn.GELU()))).to(
        device
    )
    x, y = batch(device, width)
    how = {"microbatches": MICROBATCHES, "stages": 1, "schedule": "gpipe", "recompute": recompute}
    plan = outsize.plan(model, (x,), loss_fn=F.mse_loss, target=y, cluster="1x12GB", **how)  # pyright: ignore[reportArgumentType]
    return outsize.parallelize(model, (x,), plan=plan, loss_fn=F.mse_loss, target=y, devices=[f"{device}:0"])


def batch(device: str, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, width, generator=found).to(device) for _ in range(2))
    return x, y


@pytest.mark.parametrize("device", everywhere(orders=WHILE_IT_WORKS))
def test_the_same_gradients_with_less_memory(device: str) -> None:
    """What stays is counted in microbatches: of eight two, and 0.6 for what is between."""
    width = width_on(device, 1024, share=4)
    (x, y), peaks, gradients = batch(device, width), list[int](), list[list[torch.Tensor]]()
    for recompute in ("none", "offload"):
        engine = engine_of(recompute, device, width)
        engine.step(x, target=y, update=False)
        engine.weights.module.zero_grad()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        engine.step(x, target=y, update=False)
        torch.accelerator.synchronize()
        peaks.append(torch.accelerator.max_memory_allocated() - before)
        gradients.append([p.grad.cpu() for p in engine.weights.module.parameters() if p.grad is not None])
        del engine
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    each = SAMPLES // MICROBATCHES * width * 4 * 2 * LAYERS
    assert peaks[0] - peaks[1] > (MICROBATCHES - 2.6) * each
