"""Stages recorded as graphs of their device have the plain loop's bits, and say why where they are not.

The plain loop shares no code with them: microbatches of one model on the same device, one after the other.
Where a model draws, an engine without graphs is the judge; test_one_device.py judges its masks.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerators import everywhere
from torch import Tensor, nn

import outsize
from outsize.run.device_graphs.graphed_stage import NotRecorded

MICROBATCHES, SAMPLES, STEPS = 4, 8, 5
EVERYWHERE = everywhere("cuda:0", "sim:0", orders=("lazy",))


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]


class Skips(nn.Module):
    """Blocks with a skip over several of them, a tied weight, a norm that writes buffers, and no dropout."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(drop), nn.Linear(16, 8))
            for _ in range(3)
        )
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        skip = h
        for block in self.blocks:
            h = h + block(h)
        return self.last(h + skip)


def model_of(make: Callable[[], nn.Module], device: str) -> nn.Module:
    torch.manual_seed(0)
    return make().to(device)


def batches(device: str, samples: int = SAMPLES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(samples, 8, generator=generator) for _ in range(2 * STEPS)]
    return [(a.to(device), b.to(device)) for a, b in zip(rows[::2], rows[1::2], strict=True)]


def engine_of(model: nn.Module, x: Tensor, y: Tensor, *, graphs: Any = True, **how: Any) -> outsize.Engine:
    how = {"stages": 3, "microbatches": MICROBATCHES, "schedule": "1f1b", **how}
    run = {key: how.pop(key) for key in ("optimizer", "clip_norm", "scaler", "compiled") if key in how}
    run.setdefault("optimizer", lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    case: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y}
    plan = outsize.plan(model, (x,), cluster=f"{how['stages']}xcpu", **case, **how)
    return outsize.parallelize(
        model, (x,), plan=plan, compiled=outsize.Compile(device_graphs=graphs), **run, **case
    )


def trained(model: nn.Module, device: str, **how: Any) -> tuple[list[Tensor], outsize.Engine]:
    """Losses, parameters and buffers after some steps."""
    data = batches(device)
    engine = engine_of(model, *data[0], **how)
    losses = [engine.step(x, target=y).loss for x, y in data]
    return [*losses, *(p.detach().clone() for p in model.state_dict().values())], engine


def plain(model: nn.Module, device: str) -> list[Tensor]:
    """The same by a loop over microbatches."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[Tensor]()
    for x, y in batches(device):
        total = torch.zeros((), device=device)
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = F.mse_loss(model(part), target)
            loss.backward(torch.full_like(loss, 1 / MICROBATCHES))
            total = total + loss.detach() * (1 / MICROBATCHES)
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in model.state_dict().values())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def insist_on_graphs(engine: outsize.Engine, at_least: int) -> None:
    use = engine.device_graphs
    assert use is not None
    assert not any(stage.reason for stage in use.stages), use
    assert sum(stage.graphs for stage in use.stages) >= at_least, use
    assert all(stage.size_bytes > 0 for stage in use.stages), use


@pytest.mark.parametrize("device", EVERYWHERE)
@pytest.mark.parametrize(
    ("how", "graphs"),
    [
        ({"stages": 1}, 2),  # One microbatch in flight.
        ({}, 2 * (3 + 2 + 1)),
        ({"schedule": "gpipe"}, 2 * 3 * MICROBATCHES),
        ({"schedule": "zero-bubble"}, 12),
        ({"recompute": "full"}, 12),
    ],
)
@pytest.mark.sample("how0", "how2", "how4")
def test_graphs_have_the_bits_of_the_plain_loop(how: Any, graphs: int, device: str) -> None:
    found, engine = trained(model_of(Skips, device), device, **how)
    insist_on_graphs(engine, graphs)
    assert same(found, plain(model_of(Skips, device), device))


@pytest.mark.parametrize("device", EVERYWHERE)
@pytest.mark.parametrize(
    "how", [{}, pytest.param({"recompute": "full"}, marks=pytest.mark.full), {"stages": 1}]
)
@pytest.mark.sample("how2")
def test_masks_of_dropout_are_those_without_graphs(how: Any, device: str) -> None:
    def make() -> nn.Module:
        return Skips(drop=0.3)

    found, engine = trained(model_of(make, device), device, **how)
    insist_on_graphs(engine, 2)
    assert same(found, trained(model_of(make, device), device, graphs=False, **how)[0])


@pytest.mark.parametrize("device", EVERYWHERE)
def test_gradients_accumulate_over_steps_and_hooks_see_each(device: str) -> None:
    def gradients(graphs: bool) -> tuple[list[Tensor], int]:
        model, data, seen = model_of(Skips, device), batches(device), list[Tensor]()
        engine = engine_of(model, *data[0], graphs=graphs)
        weight = model.get_parameter("first.weight")
        hook = weight.register_post_accumulate_grad_hook(seen.append)
        for x, y in data:
            engine.step(x, target=y, update=False)
        hook.remove()
        return [p.grad for p in model.parameters() if p.grad is not None], len(seen)

    found, expected = gradients(True), gradients(False)
    assert found[1] == expected[1] > 0
    assert same(found[0], expected[0])


@pytest.mark.parametrize("device", EVERYWHERE)
def test_a_kept_gradient_is_not_written_by_a_later_step(device: str) -> None:
    model, data = model_of(Skips, device), batches(device)
    engine = engine_of(model, *data[0])
    for x, y in data[:-1]:
        engine.step(x, target=y, update=False)
    kept = [p.grad for p in model.parameters() if p.grad is not None]
    values = [g.clone() for g in kept]
    model.zero_grad(set_to_none=True)
    engine.step(*data[-1][:1], target=data[-1][1], update=False)
    assert same(kept, values)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_clipping_a_short_batch_and_evaluation_between_steps(device: str) -> None:
    def run(graphs: bool) -> list[Tensor]:
        model, data = model_of(lambda: Skips(0.1), device), batches(device)
        engine = engine_of(model, *data[0], graphs=graphs, clip_norm=0.5)
        results = list[Any]()
        for number, (x, y) in enumerate(data):
            part = slice(0, 6 if number == STEPS - 1 else SAMPLES)  # The last one has another shape.
            results += [engine.step(x[part], target=y[part]).loss]
            results += [engine.evaluate(x, target=y).loss]
        return [*results, *(p.detach().clone() for p in model.parameters())]

    assert same(run(True), run(False))


@pytest.mark.parametrize("device", EVERYWHERE)
def test_replaced_weights_are_recorded_anew(device: str) -> None:
    def run(graphs: bool) -> list[Tensor]:
        model, data = model_of(Skips, device), batches(device)
        engine = engine_of(model, *data[0], graphs=graphs, optimizer=None)
        results = list[Tensor]()
        for number, (x, y) in enumerate([*data, *data]):
            if number == STEPS - 1:
                other = {k: v.clone().mul_(2) for k, v in model.state_dict().items()}
                model.load_state_dict(other, assign=True)
            results.append(engine.step(x, target=y, update=False).loss)
        return [*results, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert same(run(True), run(False))


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().abs().max().item() > 0)


class ReadsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (2.0 if gradients[0].abs().sum().item() >= 0 else 1.0)


class WaitsInBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ReadsBack.apply(x)


class DrawsInPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() + torch.rand_like(x)


@pytest.mark.parametrize("device", EVERYWHERE)
@pytest.mark.parametrize("odd", [Reads, WaitsInBackward, DrawsInPython])
def test_a_stage_that_cannot_be_recorded_runs_as_it_is(odd: type[nn.Module], device: str) -> None:
    def make() -> nn.Module:
        first = nn.Linear(8, 8), nn.BatchNorm1d(8), odd()
        return nn.Sequential(*first, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    with pytest.warns(NotRecorded, match="runs without device graphs"):
        found, engine = trained(model_of(make, device), device, stages=2)
    use = engine.device_graphs
    assert use is not None
    assert any(stage.reason for stage in use.stages)
    assert any(stage.graphs and not stage.reason for stage in use.stages)
    assert same(found, trained(model_of(make, device), device, stages=2, graphs=False)[0])


def test_a_host_has_no_graphs_and_auto_says_so() -> None:
    model, (x, y) = model_of(Skips, "cpu"), batches("cpu")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = engine_of(model, x, y, graphs="auto")
    assert str(engine.device_graphs) == "no, the host computes"
