"""What planning has recorded is what runs: each rank records a program once, and only a valid one is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from torch import Tensor, nn

import outsize
from outsize.capture.guards.check import ReadGuards
from outsize.capture.recording.fallbacks import TapeOptions, record
from outsize.train.batch.batch import Batch
from outsize.train.measure import training_case
from outsize.train.variants import variant
from outsize.train.variants.known_tapes import KnownTape, KnownTapes


class Scaled(nn.Module):
    """Layers, a number that the user may change, and a decision on values of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale, self.limit = 0.5, 100.0

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > self.limit):
            x = -x
        for layer in self.layers:
            x = layer(x * self.scale).tanh()
        return x


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=draw), torch.randn(8, 6, generator=draw)


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who has recorded, in order."""
    recorded: list[str] = []

    def patched(module: Any, name: str) -> None:
        own = module.record

        def counted(*args: Any, **kwargs: Any) -> Any:
            recorded.append(name)
            return own(*args, **kwargs)

        monkeypatch.setattr(module, "record", counted)

    patched(training_case, "planning")
    patched(variant, "engine")
    return recorded


def trained(model: nn.Module, steps: int = 2, **asked: Any) -> list[Tensor]:
    x, y = batch()
    engine = outsize.parallelize(
        model, (x,), target=y, loss_fn=nn.MSELoss(), stages=2, microbatches=2, cluster="2xcpu",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), **asked,
    )  # fmt: skip
    return [engine.step(x, target=y).loss for _ in range(steps)]


def plain(model: nn.Module, steps: int = 2) -> list[Tensor]:
    x, y = batch()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        total = torch.zeros(())
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = nn.functional.mse_loss(model(a), b)
            (loss * 0.5).backward()
            total = total + loss.detach() * 0.5
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def test_a_run_that_is_planned_records_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = counting(monkeypatch)
    losses = trained(Scaled())
    assert recorded == ["planning"]
    assert all(map(torch.equal, losses, plain(Scaled())))


def test_a_run_with_a_plan_records_for_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch()
    asked: dict[str, Any] = {"target": y, "loss_fn": nn.MSELoss()}
    made = outsize.plan(Scaled(), (x,), stages=2, microbatches=2, cluster="2xcpu", **asked)
    recorded = counting(monkeypatch)
    outsize.parallelize(Scaled(), (x,), plan=made, **asked)
    assert recorded == ["engine"]


def test_a_value_that_changes_in_a_step_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, model = counting(monkeypatch), Scaled()
    x, y = batch()
    engine = outsize.parallelize(
        model, (x,), target=y, loss_fn=nn.MSELoss(), stages=2, microbatches=2, cluster="2xcpu"
    )
    engine.step(x, target=y, update=False)
    model.scale = 0.25
    with pytest.warns(UserWarning, match="scale"):
        changed = engine.step(x, target=y, update=False).loss
    other = Scaled()
    other.scale = 0.25
    assert recorded == ["planning", "engine"]
    assert torch.equal(changed, plain(other, steps=1)[0])


def of_ranks(group: dist.ProcessGroup) -> tuple[list[str], list[Tensor]]:
    with pytest.MonkeyPatch.context() as patches:
        recorded = counting(patches)
        losses = trained(Scaled())
        return recorded, losses


def test_other_ranks_record_while_one_plans(tmp_path: Path) -> None:
    for recorded, losses in on_ranks(tmp_path, 2, of_ranks):
        assert recorded == ["planning"]
        assert all(map(torch.equal, losses, plain(Scaled())))


# -- which tapes are used --------------------------------------------------------------------------------


def known(model: nn.Module, x: Tensor) -> KnownTapes:
    tape = record(model, (x,), {}, options=TapeOptions(live=()))
    return KnownTapes([KnownTape(Batch((x,), {}), tape, ReadGuards(tape.reads, tape.decisions))])


def test_a_tape_is_used_once() -> None:
    model, (x, _) = Scaled(), batch()
    tapes = known(model, x)
    assert tapes.take(Batch((x.clone(),), {}), model) is not None
    assert tapes.take(Batch((x,), {}), model) is None


def test_a_tape_of_another_value_is_not_used() -> None:
    model, (x, _) = Scaled(), batch()
    tapes = known(model, x)
    model.scale = 0.75
    assert tapes.take(Batch((x,), {}), model) is None


def test_a_tape_of_another_decision_is_not_used() -> None:
    model, (x, _) = Scaled(), batch()
    assert known(model, x).take(Batch((x + 100,), {}), model) is None


def test_a_tape_of_other_modes_is_not_used() -> None:
    model, (x, _) = Scaled(), batch()
    tapes = known(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tapes.take(Batch((x,), {}), model) is None


def test_a_tape_of_another_shape_is_not_used_and_dropped_ones_are_gone() -> None:
    model, (x, _) = Scaled(), batch()
    tapes = known(model, x)
    assert tapes.take(Batch((x[:4],), {}), model) is None
    tapes.drop()
    assert tapes.take(Batch((x,), {}), model) is None
