"""Replicas on several devices of one process: the numbers of the plain loop over the same microbatches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity_runs import batch_of, fresh
from torch import Tensor, nn
from zoo import case

import outsize
from outsize.capture.recording.fallbacks import record
from outsize.errors import BadOption, WorldMismatch
from outsize.ir.plan import Plan
from outsize.run.stage.rng import seeder
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_weights import LossShares
from outsize.train.check.reference import reference_step
from outsize.train.context.options import RankOptions
from outsize.train.crew.devices import places_for
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.usefixtures("shared_recordings")

SEED, CLIP, PARTS = 5, 0.5, 4
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def in_precision(batch: Batch, dtype: torch.dtype) -> Batch:
    return batch.mapped(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t)


def plain(name: str, batch: Batch, model: nn.Module, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and norms of the loop in one place; each update is of two accumulated steps."""
    parts, optimizer = batch.split(PARTS), sgd(model.parameters())
    tape = record(model, parts[0].args, parts[0].kwargs, case(name).loss, parts[0].target)
    losses, norms = [], []
    for step in range(2 * steps):
        shares = [share / 2 for share in LossShares(tape, model).of(parts)]
        seeds = [seeder(SEED, step, mb) for mb in range(PARTS)]
        loss = reference_step(model, tape, parts, shares, seeds, case(name).loss).loss
        assert loss is not None
        losses.append(2 * loss)
        if step % 2:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def distance(found: Tensor, expected: Tensor) -> float:
    gap = (found.detach().double() - expected.detach().double()).abs().max()
    return float(gap / expected.detach().double().abs().max().clamp(min=1e-3))


@pytest.mark.parametrize("stages", [1, 2], ids=["dp2", "pp2-dp2"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "narrow_resnet18"])
@pytest.mark.sample("llama-pp2-dp2", "gpt2-dp2", "narrow_resnet18-dp2")
def test_the_numbers_of_the_plain_loop(name: str, stages: int) -> None:
    """With dropout, clipping and accumulation; GPT-2's weights are tied, ResNet has statistics."""
    dtype = torch.float64 if stages == 2 and name != "narrow_resnet18" else torch.float32
    batch, model = in_precision(batch_of(case(name)), dtype), fresh(name, dropout=True).to(dtype)
    alone = copy.deepcopy(model)
    how: dict[str, Any] = {"stages": stages, "axes": {"dp_replicate": 2}, "microbatches": PARTS // 2}
    how |= {"optimizer": sgd, "clip_norm": CLIP, "loss_fn": case(name).loss}
    ranks = outsize.Ranks(["cpu"] * 2 * stages, seed=SEED)
    engine = outsize.parallelize(model, batch.args, batch.kwargs, target=batch.target, devices=ranks, **how)
    assert engine.crew.local_replicas == 2
    losses, norms = list[Tensor](), list[Tensor]()
    # A ResNet on images of few pixels makes of a rounding in fp32 1e-4 in its second update.
    updates = 1 if name == "narrow_resnet18" else 2
    for step in range(2 * updates):
        found = engine.step(
            *batch.args, target=batch.target, update=bool(step % 2), loss_scale=0.5, **batch.kwargs
        )
        losses.append(found.loss)
        norms += [] if found.grad_norm is None else [found.grad_norm]
    most = 1e-6 if dtype == torch.float32 else 1e-10
    expected = plain(name, batch, alone, updates)
    for ours, theirs in zip((losses, norms), expected, strict=True):
        assert all(distance(a, b) <= most for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    theirs = dict(alone.named_parameters())
    wrong = {n: d for n, p in model.named_parameters() if not (d := distance(p, theirs[n])) <= most}
    assert not wrong, wrong


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Linear(6, 6)
    )


def lines() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def split(model: nn.Module, **options: Any) -> Engine:
    how = {
        "devices": ["cpu", "cpu"],
        "axes": {"dp_replicate": 2},
        "microbatches": 2,
        "optimizer": sgd,
        **options,
    }
    return outsize.parallelize(model, (X,), target=Y, loss_fn=F.mse_loss, **how)


def in_turns(model: nn.Module) -> Engine:
    """The same plan through one pipeline, which is bit-equal to the plain loop (tests/parity)."""
    plan = split(copy.deepcopy(model)).plan
    how: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": sgd, "devices": ["cpu"]}
    engine = outsize.parallelize(model, (X,), target=Y, plan=plan, **how)
    assert engine.crew.local_replicas == 1
    return engine


def test_statistics_are_those_of_the_first_replica() -> None:
    model, expected = mlp(), mlp()
    split(model).step(X, target=Y)
    with torch.no_grad():
        for part in X.split(2)[:2]:
            expected(part)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), expected.buffers(), strict=True))


def test_what_the_user_changes_between_steps_is_followed() -> None:
    """Modes, a frozen layer, values, another head; twins of all states share their tensors."""
    engines = [split(mlp()), in_turns(mlp())]
    losses: list[list[Tensor]] = [[], []]
    for found, engine in zip(losses, engines, strict=True):
        model: Any = engine.model
        model[1].momentum = 0.0  # whose statistics count is by design another matter
        found.append(engine.step(X, target=Y).loss)
        model[1].eval()
        model[2].p = 0.5
        found.append(engine.step(X, target=Y).loss)
        model[3].requires_grad_(False)
        with torch.no_grad():
            model[3].weight.mul_(0.5)
        found.append(engine.step(X, target=Y).loss)
        assert model[3].weight.grad is None
        found.append(engine.evaluate(X, target=Y).loss or X)
        torch.manual_seed(3)
        model[4] = nn.Linear(6, 6)
        engine.step(X, target=Y, update=False)
        found.append(model[4].weight.grad)
    assert all(distance(a, b) < 1e-6 for a, b in zip(*losses, strict=True)), losses


def test_outputs_come_in_order_and_batches_have_any_size() -> None:
    engine, plain, model = split(lines()), in_turns(lines()), lines()
    for size in (1, 3, 7, 8, 12):
        x, y = X.repeat(2, 1)[:size], Y.repeat(2, 1)[:size]
        outputs = engine.evaluate(x).outputs or ()
        with torch.no_grad():
            assert torch.allclose(torch.cat(list(outputs)), model(x))
        ours, theirs = (e.step(x, target=y, update=False).loss for e in (engine, plain))
        assert distance(ours, theirs) < 1e-6
    for mine, other in zip(engine.model.parameters(), plain.model.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert distance(mine.grad, other.grad) < 1e-6


def test_gradients_that_some_replicas_lack_and_a_failed_step() -> None:
    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.rest = nn.Embedding(11, 6, sparse=True), nn.Linear(6, 6)
            self.unused = nn.Linear(2, 2)

        def forward(self, index: Tensor) -> Tensor:
            return self.rest(self.rows(index))

    torch.manual_seed(0)
    model, index = Rare(), torch.arange(8)
    alone = copy.deepcopy(model)
    engine = outsize.parallelize(
        model,
        (index,),
        target=Y,
        loss_fn=F.mse_loss,
        devices=["cpu", "cpu"],
        microbatches=2,
        axes={"dp_replicate": 2},
    )
    with pytest.raises(IndexError):
        engine.step(index + 5, target=Y, update=False)
    model.zero_grad()
    for _ in range(2):
        engine.step(index, target=Y, update=False)
        F.mse_loss(alone(index), Y).backward()
    assert model.unused.weight.grad is None
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None and ours.grad is not None:
            assert ours.grad.layout is theirs.grad.layout
            assert distance(ours.grad.to_dense(), theirs.grad.to_dense()) < 1e-6


def planned(cluster: str, **options: Any) -> Plan:
    return outsize.plan(mlp(), (X,), target=Y, loss_fn=F.mse_loss, microbatches=2, cluster=cluster, **options)


def test_where_replicas_go() -> None:
    plan = planned("4xcpu", stages=2, axes={"dp_replicate": 2})
    assert places_for(plan, ("cpu",) * 4) == ("cpu",) * 4
    assert places_for(plan, ("cpu",) * 2) == ("cpu",) * 2, "in turns"
    with pytest.raises(WorldMismatch, match="the plan needs 4 devices, devices names 2"):
        places_for(plan, ("cuda:0", "cpu"))
    named = planned("cpu,cpu,cpu,cpu", stages=2, axes={"dp_replicate": 2})
    assert places_for(named, None) == ("cpu",) * 4


def test_deferred_statistics_want_processes() -> None:
    plan = planned("2xcpu", axes={"dp_replicate": 2}).model_copy(update={"bn": "deferred"})
    with pytest.raises(BadOption, match="statistics and activations; bn 'deferred'"):
        make_engine(mlp(), plan, None, ranks=RankOptions(places=("cpu", "cpu")))
