"""Weights or their optimizer on the host, and a GPU: same gradients, same memory as was promised.

    pytest tests/device                   # on the simulated device, and on CUDA where torch sees it

The same tests run on the CPU with a counted budget in tests/parity/test_offload_parity.py.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerators import WHILE_IT_WORKS, everywhere, width_on
from torch import nn

import outsize
from outsize.ir.hardware.devices import MIB, figure_of
from outsize.ir.plan import Plan
from outsize.policies.weights import HOSTED, Weights
from outsize.run.moves.host import HostMoves

LAYERS, SAMPLES = 24, 64


def build(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(width, width), nn.GELU())))


def batch(width: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.Generator().manual_seed(1)
    return tuple(torch.randn(SAMPLES, width, generator=found).to(device) for _ in range(2))  # pyright: ignore[reportReturnType]


def planned(width: int, weights: Weights = "host") -> Plan:
    x, y = batch(width)
    return outsize.plan(
        build(width), (x,), loss_fn=F.mse_loss, target=y, cluster="1x12GB", weights=weights, microbatches=4
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


@pytest.mark.parametrize("weights", HOSTED)
@pytest.mark.sample("host-activations")
def test_the_plan_and_the_helpers_here(weights: Weights) -> None:
    """On any machine: the plan runs, on the CPU where there is no GPU."""
    x, y = batch(128)
    plan = planned(128, weights)
    assert plan.streams
    engine = outsize.parallelize(build(128), (x,), plan=plan, loss_fn=F.mse_loss, target=y, optimizer=adamw)
    first = float(engine.step(x, target=y).loss)
    assert float(engine.step(x, target=y).loss) < first


@pytest.mark.parametrize("device", everywhere(orders=("seed1",)))
@pytest.mark.parametrize("weights", HOSTED)
def test_gradients_are_those_of_the_model_on_the_device(weights: Weights, device: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    width = width_on(device, 1024)
    x, y = batch(width, device)
    plain = build(width).to(device)
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.mse_loss(plain(a), b) / 4).backward()
    engine = outsize.parallelize(
        build(width), (x,), plan=planned(width, weights), loss_fn=F.mse_loss, target=y
    )
    engine.step(x, target=y, update=False)
    pairs = zip(engine.model.named_parameters(), plain.parameters(), strict=True)
    wrong = [n for (n, ours), p in pairs if not torch.equal(ours.grad.to(device), p.grad)]  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    torch.use_deterministic_algorithms(False)
    assert wrong == []


@pytest.mark.parametrize("device", everywhere(orders=("lazy",)))
@pytest.mark.parametrize("weights", HOSTED)
def test_weights_that_come_as_casts(weights: Weights, device: str) -> None:
    """A thread of the host casts them, once a step, while others are copied: the plain loop's bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    width, kind = width_on(device, 256), torch.device(device).type
    x, y = batch(width, device)
    plain, model = build(width).to(device), build(width)
    engine = outsize.parallelize(model, (x,), plan=planned(width, weights), loss_fn=F.mse_loss, target=y)
    for _ in range(2):
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            with torch.autocast(kind, torch.bfloat16):
                loss = F.mse_loss(plain(a), b)
            (loss / 4).backward()
        with torch.autocast(kind, torch.bfloat16):
            engine.step(x, target=y, update=False)
        for ours, theirs in zip(engine.model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad.to(device), theirs.grad)
            ours.data.mul_(1.5)  # It does not count as a change of the tensor.
            theirs.data.mul_(1.5)
        plain.zero_grad()
        engine.model.zero_grad()
    torch.use_deterministic_algorithms(False)
    moves = engine.crew.moves
    assert isinstance(moves, HostMoves)
    assert any(True for _ in moves.residency._casts()), "some came so"  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("device", everywhere(orders=("lazy",)))
def test_steps_in_a_thread_are_those_at_the_end(device: str) -> None:
    """The optimizer on the host steps while the device works, or after an update=False: the same bits."""
    width = width_on(device, 1024)
    x, y = batch(width, device)
    engines = [
        outsize.parallelize(
            build(width), (x,), plan=planned(width), loss_fn=F.mse_loss, target=y, optimizer=adamw
        )
        for _ in range(2)
    ]
    for _ in range(3):
        engines[0].step(x, target=y)
        engines[1].step(x, target=y, update=False)
        engines[1].update()
    pairs = zip(*(engine.model.parameters() for engine in engines), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("device", ["cpu", *everywhere(orders=("lazy",))])
@pytest.mark.sample("sim-lazy", "cuda")
def test_steps_that_are_taken_back(device: str) -> None:
    """All norms are over the limit, and of these bits nothing is left of the steps that were tried."""
    width = width_on(device, 1024)
    x, y = batch(width, device)
    engines = [
        outsize.parallelize(
            build(width),
            (x,),
            plan=planned(width),
            loss_fn=F.mse_loss,
            target=y,
            optimizer=adamw,
            clip_norm=outsize.Clip(1e-3, clipping=how),
        )
        for how in ("speculative", "exact")
    ]
    for _ in range(2):
        norms = [engine.step(x, target=y).grad_norm for engine in engines]
        assert float(norms[0] or 0.0) == float(norms[1] or 0.0) > 1e-3
    pairs = zip(*(engine.model.parameters() for engine in engines), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert "2 of 2 speculative steps were taken back" in str(engines[0].report())


@pytest.mark.parametrize("device", everywhere(orders=WHILE_IT_WORKS))
@pytest.mark.parametrize(("weights", "share"), [("host", 1.0), ("host-optimizer", 2.0)])
@pytest.mark.sample("host-optimizer")
def test_a_model_larger_than_what_is_allowed(weights: Weights, share: float, device: str) -> None:
    """16 bytes a parameter are 400 MB on a GPU, which holds less than a quarter, or less than half, and what
    cuBLAS takes.
    """
    width = width_on(device, 1024, share=2)
    x, y = batch(width, device)
    gc.collect()
    torch.accelerator.synchronize()
    others_bytes = torch.accelerator.memory_allocated()  # of earlier tests in this process
    given: dict[str, Any] = {"plan": planned(width, weights), "loss_fn": F.mse_loss, "target": y}
    engine = outsize.parallelize(build(width), (x,), optimizer=adamw, **given)
    engine.step(x, target=y)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    engine.step(x, target=y)
    size = sum(p.nbytes for p in engine.model.parameters())
    matmul_bytes = round(figure_of("cublas_workspace_mib", "h200") * MIB) if device == "cuda" else 0
    assert all(p.device.type == "cpu" and p.is_pinned() for p in engine.model.parameters())
    own_bytes = torch.accelerator.max_memory_allocated() - others_bytes
    assert own_bytes < share * size + matmul_bytes
