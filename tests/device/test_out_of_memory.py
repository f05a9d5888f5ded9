"""A device that is full in the middle of a step: the error says where, and the step has not been."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
import simdev
from outsize.ir.formatting import bytes_text

pytestmark = pytest.mark.sim
WIDTH, SAMPLES, MICROBATCHES = 64, 64, 4
PLACES = {"one-device": None, "two-devices": ["sim:0", "sim:1"]}


@pytest.fixture(autouse=True)
def capacities() -> Iterator[None]:
    before = [simdev.capacity(device) for device in range(2)]
    yield
    for device, size in enumerate(before):
        simdev.set_capacity(size, device)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def batch(step: int, times: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(times * SAMPLES, WIDTH, generator=draw) for _ in range(2))
    return x, y


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def engine_on(places: list[str] | None) -> outsize.Engine:
    x, y = batch(0)
    model = build() if places else build().to("sim:0")
    x, y = (x, y) if places else (x.to("sim:0"), y.to("sim:0"))
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y, "optimizer": adamw}
    how = {"cluster": "2xcpu", "stages": 2, "microbatches": MICROBATCHES, "schedule": "gpipe"}
    plan = outsize.plan(model, (x,), loss_fn=F.mse_loss, target=y, **how)  # pyright: ignore[reportArgumentType]
    halves = zip(plan.stages, (("0-5",), ("6-11", "mse_loss")), strict=True)
    stages = tuple(stage.model_copy(update={"units": units}) for stage, units in halves)
    plan = plan.model_copy(update={"stages": stages})
    return outsize.parallelize(model, (x,), plan=plan, devices=places, **given)


def tensors_of(engine: outsize.Engine) -> list[Tensor]:
    """Weights and the optimizer's states."""
    states = engine.optimizer.state.values()  # pyright: ignore[reportOptionalMemberAccess]
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [t.detach().cpu().clone() for t in [*(p for _, p in engine.weights.named_parameters()), *kept]]


def held() -> list[int]:
    for device in range(2):
        torch.accelerator.synchronize(device)
    return [torch.accelerator.memory_allocated(device) for device in range(2)]


def plain(steps: list[int]) -> list[Tensor]:
    """Losses of the plain loop on one device."""
    model, losses = build().to("sim:0"), list[Tensor]()
    optimizer = adamw(model.parameters())
    for step in steps:
        x, y = (t.to("sim:0") for t in batch(step))
        parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
        shares = [F.mse_loss(model(part), wanted) * (1 / MICROBATCHES) for part, wanted in parts]
        for share in shares:
            share.backward()
        total = torch.zeros((), device="sim:0")
        for share in shares:
            total = total + share.detach()
        losses.append(total.cpu())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("room", [0.35, 0.8])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.sample("one-device-0.35", "two-devices-0.8")
def test_a_step_without_memory_has_not_been(places: str, room: float) -> None:
    """Steps 1 and 2 succeed; between them one whose batch is larger fails: early, and in the backward."""
    engine, home = engine_on(PLACES[places]), "cpu" if PLACES[places] else "sim:0"
    (x, y), big = [t.to(home) for t in batch(1)], [t.to(home) for t in batch(7, times=16)]
    losses = [engine.step(x, target=y).loss.cpu()]
    before, kept = tensors_of(engine), held()
    torch.accelerator.empty_cache()
    needed = 16 * SAMPLES * WIDTH * 4 * 12 // (2 if PLACES[places] else 1)
    for device, size in enumerate(kept):
        simdev.set_capacity(size + int(room * needed), device)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        engine.step(big[0], target=big[1])
    notes = "\n".join(caught.value.__notes__)
    del caught
    assert "no memory for" in notes
    assert "bytes" in notes
    assert "Next:" in notes
    filled = [line for line in notes.splitlines() if " holds weights " in line]
    assert len(filled) == (2 if PLACES[places] else 1)
    parameters = sum(p.nbytes for _, p in engine.weights.named_parameters()) / len(filled) / 1024
    for line in filled:
        holds, expects = (
            text.split(", ")[:4] for text in line.split(" holds ")[1].split("; the plan expected ")
        )
        weights, _, states = holds[:3]
        assert weights == f"weights {bytes_text(1024 * parameters)}"
        assert states == f"optimizer states {bytes_text(1024 * 2 * parameters)}"
        assert len(expects) == 4
        assert f"of a batch of {SAMPLES} samples; this one has {16 * SAMPLES}" in line
    assert all(p.grad is None for _, p in engine.weights.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, tensors_of(engine), strict=True))
    assert all(now <= known for now, known in zip(held(), kept, strict=True))
    for device in range(2):
        simdev.set_capacity(1 << 30, device)
    x, y = (t.to(home) for t in batch(2))
    losses.append(engine.step(x, target=y).loss.cpu())
    assert losses == plain([1, 2])


# -- a plan for less memory --------------------------------------------------------------------------------

ROWS, BROAD = 8192, 256


def broad(folder: Path) -> outsize.Engine:
    """One device: 8 MiB between two layers, so that most of its memory is activations."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(BROAD, BROAD), nn.GELU()))).to("sim:0")
    x, y = (t.to("sim:0") for t in broad_batch(0))
    return outsize.parallelize(
        model,
        (x,),
        target=y,
        loss_fn=F.mse_loss,
        optimizer=adamw,
        cluster="1x12GB",
        resume=folder,
        plan=outsize.Request(exact=True),
        devices=outsize.Ranks(on_oom="replan"),
    )


def broad_batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, BROAD, generator=draw) for _ in range(2))
    return x, y


@pytest.mark.filterwarnings("ignore::outsize.train.checkpoint.loop.attached.ResumeNote")
def test_the_next_start_goes_on_with_a_plan_that_holds_less(tmp_path: Path) -> None:
    first = broad(tmp_path)
    assert first.plan.microbatches == 1
    x, y = (t.to("sim:0") for t in broad_batch(1))
    first.step(x, target=y)
    first.save(tmp_path)
    torch.accelerator.empty_cache()
    room = torch.accelerator.memory_allocated(0) + 8 * ROWS * BROAD * 4
    simdev.set_capacity(room, 0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        first.step(x, target=y)
    assert "the next start plans again, for at most" in "\n".join(caught.value.__notes__)
    losses, starts = list[Tensor](), 0
    del first, caught
    while not losses:
        starts += 1
        again = broad(tmp_path)
        with contextlib.suppress(torch.OutOfMemoryError):
            losses.append(again.step(x, target=y).loss.cpu())
        assert again.steps == (2 if losses else 1)
    assert starts <= 4
    assert again.plan.microbatches > 1
    assert losses[0].isfinite()
