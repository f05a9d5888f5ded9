"""One rank of two: what a training loop does besides steps, each compared with the plain loop.

`features_worker.py FOLDER` runs every function named `check_...` and leaves FOLDER/rank<r>.json: the name of
each check with "ok" or its traceback. All ranks run all checks in the same order.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MethodType
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_runs import BATCH_SIZE, SEED, Combination, batch_of, captured, fresh, planned
from zoo import case

import outsize
from outsize.errors import WorldMismatch
from outsize.run.stage.batchnorm import DeferredStatistics
from outsize.run.stage.rng import seeder
from outsize.run.transport.process_group import ProcessTransport
from outsize.run.transport.same_host import SameHostTransport
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_weights import LossShares
from outsize.train.check.reference import reference_step
from outsize.train.context.options import EngineOptions, MakeOptimizer
from outsize.train.crew.crew import ProcessCrew
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@final
class Pair:
    """One zoo model twice: split over the ranks, and plain in this process."""

    def __init__(
        self,
        world: World,
        name: str,
        optimizer: MakeOptimizer = adamw,
        microbatches: int = 3,
        changes: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        found = case(name)
        self.wanted = Combination(name, microbatches, world.world_size, "1f1b")
        self.loss_fn, self.batch = found.loss, batch_of(found)
        self.parts = self.batch.split(microbatches)
        self.engine: Engine = make_engine(
            fresh(name),
            planned(self.wanted).model_copy(update=changes or {}),
            world.group,
            EngineOptions(loss_fn=found.loss, optimizer=optimizer, seed=SEED, **options),
        )
        self.plain = fresh(name)
        self.optimizer = optimizer(self.plain.parameters())
        self.steps = 0

    def step(self, **options: Any) -> Any:
        """A step of the engine."""
        return self.engine.step(*self.batch.args, target=self.batch.target or None, **options, **self.kwargs)

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.batch.kwargs

    def accumulate(self, scale: float = 1.0) -> Tensor:
        """The plain loop's forward and backward; the loss of the batch."""
        tape = captured(self.wanted.model, self.wanted.microbatches).tape
        shares = LossShares(tape, self.plain).of(self.parts)
        seeds = [seeder(SEED, self.steps, mb) for mb in range(len(self.parts))]
        self.steps += 1
        weights = [s * scale for s in shares]
        loss = reference_step(self.plain, tape, self.parts, weights, seeds, self.loss_fn).loss
        assert loss is not None
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def insist_on_equal_parameters(self) -> None:
        expected = dict(self.plain.named_parameters())
        wrong = [n for n, p in self.engine.weights.named_parameters() if not torch.equal(p, expected[n])]
        assert wrong == []

    def insist_on_equal_buffers(self) -> None:
        expected = dict(self.plain.named_buffers())
        here = {n: b for n, b in self.engine.model.named_buffers() if not b.is_meta}
        assert len(here) < len(expected) or not expected
        assert [n for n, b in here.items() if not torch.equal(b, expected[n])] == []


def check_evaluate_gives_the_eager_outputs_and_changes_nothing(world: World) -> None:
    for name in ("unet", "gpt2"):
        pair = Pair(world, name)
        pair.step(update=False)
        first = next(iter(pair.engine.model.children()))
        first.eval()  # a frozen part stays in eval mode
        grads = {n: p.grad.clone() for n, p in pair.engine.weights.named_parameters() if p.grad is not None}
        assert grads
        buffers = {n: b.clone() for n, b in pair.engine.model.named_buffers() if not b.is_meta}
        flags = [m.training for m in pair.engine.model.modules()]
        random = torch.get_rng_state()
        result = pair.engine.evaluate(*pair.batch.args, target=pair.batch.target or None, **pair.kwargs)
        assert torch.equal(random, torch.get_rng_state())
        assert flags == [m.training for m in pair.engine.model.modules()]
        assert len(set(flags)) == 2
        after = dict(pair.engine.model.named_buffers())
        assert all(torch.equal(b, after[n]) for n, b in buffers.items())
        for n, p in pair.engine.weights.named_parameters():
            assert p.grad is not None
            assert torch.equal(p.grad, grads[n])
        _insist_on_eager_outputs(world, pair, result)


def _insist_on_eager_outputs(world: World, pair: Pair, result: Any) -> None:
    pair.accumulate()  # the plain model's BatchNorm statistics see the same batch
    if world.rank < world.world_size - 1:
        assert result.outputs is None
        return
    pair.plain.eval()
    for part, found in zip(pair.parts, result.outputs, strict=True):
        with torch.no_grad():
            expected = pair.plain(*part.args, **part.kwargs)
        if isinstance(expected, Tensor):
            assert torch.equal(expected, found)
        else:
            assert type(expected) is type(found)
            assert torch.equal(expected.logits, found.logits)
            assert torch.equal(expected.loss, found.loss)


def check_evaluate_as_the_first_call_and_then_training(world: World) -> None:
    pair = Pair(world, "unet")
    first = pair.engine.evaluate(*pair.batch.args, target=pair.batch.target or None)
    assert (first.outputs is None) is (world.rank == 0)
    for _ in range(2):
        assert torch.equal(pair.step().loss, pair.accumulate())
        pair.update()
    pair.insist_on_equal_parameters()


def check_clipping_is_bit_equal(world: World) -> None:
    for name in ("gpt2", "mlp"):
        pair = Pair(world, name, clip_norm=0.05)
        for _ in range(3):
            result = pair.step()
            pair.accumulate()
            norm = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
            assert norm > 0.05, "nothing was clipped"
            assert torch.equal(result.grad_norm, norm)
            pair.update()
        pair.insist_on_equal_parameters()


def check_accumulation_over_two_steps(world: World) -> None:
    pair = Pair(world, "llama")
    for _ in range(2):
        for update in (False, True):
            pair.step(update=update, loss_scale=0.5)
            pair.accumulate(scale=0.5)
        pair.update()
    pair.insist_on_equal_parameters()


def check_an_ordinary_scheduler(world: World) -> None:
    pair = Pair(world, "bert", sgd)
    pair.engine.prepare(pair.batch)
    assert pair.engine.optimizer is not None
    both = [pair.engine.optimizer, pair.optimizer]
    ours, theirs = (torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.1) for o in both)
    for _ in range(4):
        pair.step()
        ours.step()
        pair.accumulate()
        pair.update()
        theirs.step()
    assert ours.get_last_lr() == theirs.get_last_lr() != [0.5]
    pair.insist_on_equal_parameters()


def check_every_rank_has_an_optimizer(world: World) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 3)

    def looped(model: nn.Module, scaler: GradScaler | None = None) -> Engine:
        engine = outsize.parallelize(
            model,
            (x,),
            target=y,
            stages=2,
            microbatches=4,
            loss_fn=outsize.Loss(F.mse_loss, scaler=scaler),
            optimizer=sgd,
        )
        assert engine.optimizer is not None
        rates = torch.optim.lr_scheduler.StepLR(engine.optimizer, step_size=1, gamma=0.1)
        before = {n: p.detach().clone() for n, p in engine.weights.named_parameters()}
        for _ in range(2):
            engine.step(x, target=y)
            rates.step()
        assert rates.get_last_lr() == pytest.approx([0.005])
        assert not any(torch.equal(p, before[n]) for n, p in engine.weights.named_parameters())
        return engine

    both = looped(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
    assert dict(both.named_parameters())
    alone = looped(nn.Linear(6, 3), GradScaler("cpu", init_scale=8.0))
    assert bool(dict(alone.named_parameters())) is (world.rank == 0)


def check_tied_weights_have_one_optimizer_state(world: World) -> None:
    pair = Pair(world, "gpt2")
    pair.step()
    assert pair.engine.optimizer is not None
    states = torch.tensor(len(pair.engine.optimizer.state))
    dist.all_reduce(states, group=world.group)
    assert int(states) == len(list(pair.plain.parameters()))
    tied = "transformer.wte.weight"
    assert (tied in dict(pair.engine.weights.named_parameters())) is (world.rank == 0)
    model: Any = pair.engine.model
    assert model.lm_head.weight is model.transformer.wte.weight


def check_a_plan_for_another_world_is_refused(world: World) -> None:
    plan = planned(Combination("toy", 3, 3, "1f1b"))
    with pytest.raises(WorldMismatch, match=r"needs 3 processes, this run has 2.*--nproc-per-node 3"):
        make_engine(fresh("toy"), plan, world.group)


def check_receive_buffers_follow_the_depth_and_not_the_microbatches(world: World) -> None:
    made: dict[int, int] = {}
    for microbatches in (4, 16):
        found = case("mlp")
        plan = planned(Combination("mlp", 4, 2, "1f1b"))
        plan = plan.model_copy(update={"microbatches": microbatches, "batch_size": 32})
        engine = make_engine(fresh("mlp"), plan, world.group, EngineOptions(loss_fn=found.loss))
        batch = batch_of(found, 32)
        for _ in range(3):
            engine.step(*batch.args, target=batch.target)
            engine.evaluate(*batch.args, target=batch.target)
        made[microbatches] = transport_of(engine).buffers_made
    # The first rank receives gradients and losses, the second activations, in steps and in evaluations.
    assert 0 < max(made.values()) <= 4, made


def transport_of(engine: Engine) -> SameHostTransport:
    assert isinstance(engine.crew, ProcessCrew)
    assert isinstance(engine.crew._transport, SameHostTransport)
    return engine.crew._transport


def check_ranks_that_share_no_memory_use_the_group(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outsize.device.futex.AVAILABLE", world.rank == 0)
        pair = Pair(world, "gpt2")
    assert isinstance(pair.engine.crew, ProcessCrew)
    assert isinstance(pair.engine.crew._transport, ProcessTransport)
    for _ in range(2):
        result, loss = pair.step(), pair.accumulate()
        assert torch.equal(result.loss, loss)
        pair.update()
    pair.insist_on_equal_parameters()


def check_an_overflow_on_one_rank_skips_the_step_on_all(world: World) -> None:
    scaler = GradScaler("cpu", init_scale=1024.0)
    pair = Pair(world, "toy", sgd, scaler=scaler)
    args, target = pair.batch.args, pair.batch.target
    pair.engine.prepare(pair.batch)
    before = {n: p.detach().clone() for n, p in pair.engine.weights.named_parameters()}
    for bad in range(world.world_size):
        pair.engine.step(*args, target=target, update=False)
        if world.rank == bad:
            first = next(p for _, p in pair.engine.weights.named_parameters())
            assert first.grad is not None
            first.grad.view(-1)[0] = torch.inf
        pair.engine.update()
        assert all(torch.equal(p, before[n]) for n, p in pair.engine.weights.named_parameters()), bad
        assert scaler.get_scale() == 1024.0 / 2 ** (bad + 1)
    pair.engine.step(*args, target=target)
    assert not all(torch.equal(p, before[n]) for n, p in pair.engine.weights.named_parameters())


def check_recompute_is_bit_equal(world: World) -> None:
    for name in ("gpt2", "unet"):
        pair = Pair(world, name, changes={"recompute": "full"})
        for _ in range(2):
            pair.step()
            pair.accumulate()
            pair.update()
        pair.insist_on_equal_parameters()
        pair.insist_on_equal_buffers()


def check_deferred_statistics_are_bit_equal(world: World) -> None:
    pair = Pair(world, "unet", changes={"bn": "deferred"})
    statistics = DeferredStatistics(pair.plain)
    for _ in range(2):
        pair.step()
        with statistics.collecting():
            pair.accumulate()
        pair.update()
    pair.insist_on_equal_parameters()
    pair.insist_on_equal_buffers()


def check_sync_batchnorm_does_not_wait_for_other_stages(world: World) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = [m for _ in range(3) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())]
        return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers))

    x, plain = torch.randn(12, 8, generator=torch.Generator().manual_seed(1)), make()
    for module in plain.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.forward = MethodType(nn.BatchNorm1d.forward, module)
    engine = outsize.parallelize(make(), (x,), stages=2, microbatches=3, loss_fn=F.mse_loss, target=x)
    engine.step(x, target=x, update=False)
    for part in x.split(4):
        (F.mse_loss(plain(part), part) * (4 / 12)).backward()
    expected = dict(plain.named_parameters())
    for name, p in engine.weights.named_parameters():
        other = expected[name].grad
        assert p.grad is not None, name
        assert other is not None, name
        assert torch.equal(p.grad, other), name


def check_batches_of_any_size_are_bit_equal(world: World) -> None:
    pair = Pair(world, "mlp")
    found = case("mlp")
    for size in (13, 5, 1, 12):
        batch = batch_of(found, size)
        parts = batch.split(pair.engine.plan.microbatches_of(size))
        pair.engine.step(*batch.args, target=batch.target)
        for part in parts:
            (found.loss_of(pair.plain(*part.args), part.target[0]) * (part.size / size)).backward()
        pair.update()
    pair.insist_on_equal_parameters()


def check_the_users_generator_is_untouched(world: World) -> None:
    pair = Pair(world, "mlp")
    torch.manual_seed(100 + world.rank)
    before = torch.get_rng_state()
    pair.step()
    assert torch.equal(before, torch.get_rng_state())


def check_another_batch_shape_runs_under_the_same_plan(world: World) -> None:
    pair = Pair(world, "gpt2")
    pair.step()
    pair.accumulate()
    pair.update()
    short = Batch((), {k: v[:6, :9].contiguous() for k, v in pair.kwargs.items()})
    model = pair.plain
    losses = []
    parts = short.split(pair.engine.plan.microbatches_of(6))
    for part in parts:
        loss = model(**part.kwargs).loss
        (loss * (1 / 2)).backward()
        losses.append(loss.detach() * (1 / 2))
    result = pair.engine.step(**short.kwargs)
    assert torch.equal(result.loss, losses[0] + losses[1])
    pair.update()
    pair.insist_on_equal_parameters()
    assert BATCH_SIZE != 6


def check_ten_batch_sizes_run_and_the_oldest_programs_are_dropped(world: World) -> None:
    found = case("mlp")
    plan = planned(Combination("mlp", 3, 2, "1f1b"))
    engine = make_engine(fresh("mlp"), plan, world.group, EngineOptions(loss_fn=found.loss, captures=6))
    plain = fresh("mlp")
    for size in (*range(3, 33, 3), 3):
        batch = batch_of(found, size)
        total: Tensor | None = None
        for part in batch.split(plan.microbatches_of(size)):
            loss = found.loss_of(plain(*part.args), part.target[0]).detach() * (part.size / size)
            total = loss if total is None else total + loss
        result = engine.step(*batch.args, target=batch.target, update=False)
        assert total is not None
        assert torch.equal(result.loss, total)
    assert isinstance(engine.crew, ProcessCrew)
    assert len(engine.crew._built) == 6
    assert transport_of(engine).buffers_made <= 4 * 6


Check = Callable[[World], None]
CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): found for name, found in list(globals().items()) if name.startswith("check_")
}


def outcome(check: Check, world: World) -> str:
    try:
        check(world)
    except Exception:
        return traceback.format_exc()
    return "ok"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = join()
    found: dict[str, str] = {}
    for name, check in CHECKS.items():
        found[name] = outcome(check, world)
        (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
        dist.barrier(group=world.group)
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
