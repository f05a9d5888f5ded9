"""Weights that two replicas share: what is whole when, what is sent, and odd models."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_bytes import collective_bytes
from forked import on_ranks
from safetensors.torch import save_file
from splits import captured
from torch import Tensor, nn

import outsize
from outsize.ir.plan import Axes, Plan
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.sharded import UnshardedBytes, largest_adjacent_blocks
from outsize.policies.weights import Weights
from outsize.run.moves.fsdp import ShardedWeights
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.run.weights.safetensors import WeightFiles
from outsize.schedules.refine import by_blocks
from outsize.train.batch.batch import Batch
from outsize.train.context.options import EngineOptions
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.usefixtures("shared_recordings")

RANKS, MICROBATCHES, STEPS = 2, 4, 3


def mean_square(out: Tensor, target: Tensor) -> Tensor:
    return ((out - target) ** 2).mean()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


class Residual(nn.Module):
    """A block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def blocks(width: int = 16) -> nn.Module:
    return nn.Sequential(*(Residual(width) for _ in range(8)))


class Passed(nn.Module):
    """Four blocks; the weights of the third are for batches that begin above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        some = bool(x[0, 0] > 0)
        for number, (linear, act) in enumerate(self.layers):  # pyright: ignore[reportGeneralTypeIssues]
            x = act(linear(x) if some or number != 2 else x)
        return x


class Odd(nn.Module):
    """Weights in a list too, a scalar, an expert that sees some samples, frozen, unused, of 3 rows, bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.scale = nn.LSTM(6, 8, batch_first=True), nn.Parameter(torch.tensor(1.3))
        self.some, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen, self.head, self.spare = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(3, 3)
        self.narrow = nn.Linear(8, 8).bfloat16()
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(self.lstm(x)[0].mean(1)) * self.scale
        y = y + self.narrow(y.bfloat16()).float() + 0.0 * self.never(y).detach()
        if x[0, 0, 0] > 0:
            y = y + self.some(y)
        return self.head(y)

    def generate(self, x: Tensor) -> Tensor:
        return torch.cat([self(x), self(-x)])


def shared(model: nn.Module, x: Tensor, target: Tensor, weights: Weights = "sharded", **wishes: Any) -> Plan:
    """One stage, in blocks, of weights that two replicas share."""
    given = {"loss_fn": mean_square, "target": target, "microbatches": MICROBATCHES, **wishes}
    plan = outsize.plan(model, (x,), cluster="1xcpu", **given)
    update = {"axes": Axes(dp_shard=RANKS), "weights": weights, "microbatches": MICROBATCHES // RANKS}
    graph = captured(model, x[: len(x) // MICROBATCHES], loss_fn=mean_square, target=(target[: len(x) // 4],))
    return by_blocks(plan.model_copy(update=update), graph.graph)


MARKS = ("head.weight", "scale")


def engine_of(model: nn.Module, plan: Plan, group: dist.ProcessGroup, **options: Any) -> Engine:
    model = model if next(model.parameters()).is_meta else copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        parameter.no_decay = name in MARKS  # pyright: ignore[reportAttributeAccessIssue]
    return make_engine(model, plan, group, EngineOptions(loss_fn=mean_square, optimizer=sgd, **options))


def trained_alone(model: nn.Module, x: Tensor, target: Tensor, clip: float | None = None) -> dict[str, Any]:
    mine = copy.deepcopy(model)
    optimizer = sgd(mine.parameters())
    for _ in range(STEPS):
        for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (mean_square(mine(part), wanted) / MICROBATCHES).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(mine.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return mine.state_dict()


def whole_bytes(engine: Engine) -> int:
    """Of gathered weights that have memory now, those on their way too."""
    moves = engine.crew.moves
    assert isinstance(moves, ShardedWeights)
    pieces = [p for own in moves._stages.values() for group in own for p in group._pieces]
    held = [out for piece in pieces for p in piece.fsdp_params for out in p.all_gather_outputs]
    coming = (piece._all_gather_result for piece in pieces)
    on_their_way = [result.all_gather_output.nbytes for result in coming if result is not None]
    return sum(out.untyped_storage().size() for out in held) + sum(on_their_way)


def graded_bytes(engine: Engine) -> int:
    """Of gradients of whole weights, those on their way too."""
    moves = engine.crew.moves
    assert isinstance(moves, ShardedWeights)
    pieces = [p for own in moves._stages.values() for group in own for p in group._pieces]
    held = [p._unsharded_param.grad for piece in pieces for p in piece.fsdp_params]
    on_their_way = [s.reduce_scatter_input.nbytes for s in pieces[0].comm_ctx.reduce_scatter_states]
    return sum(grad.untyped_storage().size() for grad in held if grad is not None) + sum(on_their_way)


def counting(sent: Counter[str], kind: str, call: Callable[..., Any], whole: int) -> Callable[..., Any]:
    """The collective, which also adds up bytes of the whole tensors, its operand of this number."""

    def counted(*args: Any) -> Any:
        sent[kind] += args[1 + whole].nbytes
        return call(*args)

    return counted


def measured(model: nn.Module, plan: Plan, batch: tuple[Tensor, Tensor], group: Any) -> dict[str, Any]:
    engine, sent, peak, graded = engine_of(model, plan, group), Counter[str](), [0], [0]

    def look(*_: Any) -> None:
        peak.append(whole_bytes(engine))
        graded.append(graded_bytes(engine))

    engine.step(batch[0], target=batch[1])
    with pytest.MonkeyPatch.context() as patch:
        gather, scatter = RankCollectives.begin_all_gather, RankCollectives.reduce_scatter
        patch.setattr(RankCollectives, "begin_all_gather", counting(sent, "all_gather", gather, 0))
        patch.setattr(RankCollectives, "reduce_scatter", counting(sent, "reduce_scatter", scatter, 1))
        for module in engine.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(look)
                module.register_full_backward_hook(look)
        engine.step(batch[0], target=batch[1])
    own = [p for _, p in engine.weights.named_parameters()]
    held = sum(p.to_local().untyped_storage().size() for p in own)  # pyright: ignore
    found = {"peak": max(peak), "graded": max(graded), "left": whole_bytes(engine)}
    return {**found, "held": held, "sent": dict(sent)}


def test_two_blocks_are_whole_at_a_time_and_the_account_bounds_what_is_sent(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = blocks(), (torch.randn(8, 16), torch.randn(8, 16))
    plan = shared(model, *batch)
    assert len(plan.stages) == 8
    whole = sum(p.numel() * 4 for p in model.parameters())
    graph = captured(model, batch[0], loss_fn=mean_square, target=(batch[1],)).graph
    account = UnshardedBytes.of(graph, optimizer_bytes("sgd"), ())
    per_replica = MICROBATCHES // RANKS
    for found in on_ranks(tmp_path, RANKS, lambda group: measured(model, plan, batch, group)):
        assert (
            found["peak"] == 2 * whole // 8 == largest_adjacent_blocks(account.weights, account.block)[0, -1]
        )
        assert found["left"] == 0
        assert (
            found["graded"]
            == 2 * whole // 8
            == largest_adjacent_blocks(account.gradients, account.block)[0, -1]
        )
        assert found["held"] == whole // RANKS
        assert found["held"] + found["peak"] < whole
        assert found["sent"]["reduce_scatter"] == per_replica * whole
        # The planner's account: twice for a microbatch. A block that turns round is not gathered again.
        turns = 2 * per_replica - 1
        assert found["sent"]["all_gather"] == 2 * per_replica * whole - turns * whole // 8
        assert collective_bytes("all_gather", found["sent"]["all_gather"], RANKS) <= per_replica * whole


def test_once_a_step_all_is_whole_and_both_accounts_are_met(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = blocks(), (torch.randn(8, 16), torch.randn(8, 16))
    plan = shared(model, *batch, weights="resident")
    given = {"loss_fn": mean_square, "target": batch[1], "microbatches": MICROBATCHES // RANKS}
    asked = {"cluster": "2xcpu", "axes": {"dp_shard": RANKS}, "weights": "resident", "optimizer": "sgd"}
    expected = outsize.plan(model, batch[:1], **given, **asked).expected  # pyright: ignore[reportArgumentType]
    assert expected is not None
    (account,) = expected.stages
    for found in on_ranks(tmp_path, RANKS, lambda group: measured(model, plan, batch, group)):
        assert found["peak"] == account.weights_bytes == sum(p.numel() * 4 for p in model.parameters())
        assert found["graded"] == account.gradients_bytes
        assert found["held"] == account.optimizer_bytes, "its part of the weights: SGD has no states"
        assert found["left"] == 0
        assert found["sent"] == dict.fromkeys(("all_gather", "reduce_scatter"), found["peak"])
        sent = sum(collective_bytes(kind, size, RANKS) for kind, size in found["sent"].items())
        assert sent == collective_bytes("all_reduce", account.gradients_bytes, RANKS)


def odd_work(model: nn.Module, plan: Plan, batch: tuple[Tensor, Tensor], group: Any) -> dict[str, Any]:
    engine = engine_of(model, plan, group, clip_norm=0.5)
    for _ in range(STEPS):
        engine.step(batch[0], target=batch[1])
    plain = [n for n, p in engine.weights.named_parameters() if type(p) is nn.Parameter]
    generated = engine.generate(batch[0][:3])
    # Another signature, and evaluation, are recorded while the weights are in parts.
    loss = engine.evaluate(batch[0][:3], target=batch[1][:3]).loss
    marked = [n for n, p in engine.weights.named_parameters() if getattr(p, "no_decay", False)]
    found = {"whole": plain, "generated": generated, "loss": loss, "marked": marked}
    return {"state": engine.weights.full_state_dict(), **found}


@pytest.mark.parametrize(
    ("recompute", "weights"), [("none", "sharded"), ("full", "sharded"), ("full", "resident")]
)
@pytest.mark.sample("none-sharded", "full-resident")
def test_odd_models_get_the_numbers_of_one_process(tmp_path: Path, recompute: str, weights: Weights) -> None:
    torch.manual_seed(0)
    model, batch = Odd(), (torch.randn(8, 5, 6).abs(), torch.randn(8, 3))
    batch[0][4:6, 0, 0] = -1.0  # the expert sees nothing of one microbatch of the second replica
    plan = shared(model, *batch, weights, recompute=recompute)
    first, second = on_ranks(tmp_path, RANKS, lambda group: odd_work(model, plan, batch, group))
    expected = trained_alone(model, *batch, clip=0.5)
    assert second["state"] == {}
    assert list(first["state"]) == list(expected)
    for name, value in expected.items():  # a sum in bf16 rounds by its order, and others follow it
        close = {"rtol": 1e-2, "atol": 1e-4} if value.dtype == torch.bfloat16 else {"rtol": 0, "atol": 5e-5}
        torch.testing.assert_close(first["state"][name], value, **close)
    assert "scale" in first["whole"]
    assert sorted(first["marked"]) == sorted(MARKS)
    assert "lstm.weight_ih_l0" not in first["whole"]
    assert torch.equal(first["generated"], second["generated"])
    assert torch.equal(first["loss"], second["loss"])
    alone = Odd()
    alone.load_state_dict(first["state"])
    assert torch.equal(first["generated"], alone.generate(batch[0][:3]).detach())
    wanted = mean_square(alone(batch[0][:3]), batch[1][:3]).detach()
    torch.testing.assert_close(first["loss"], wanted)


def trained(model: nn.Module, plan: Plan, batch: tuple[Tensor, Tensor], group: Any) -> dict[str, Any]:
    engine = engine_of(model, plan, group)
    for _ in range(STEPS):
        engine.step(batch[0], target=batch[1])
    return engine.weights.full_state_dict()


def test_a_block_that_one_replica_passes_by_is_gathered_there_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Passed(), (torch.randn(8, 16).abs(), torch.randn(8, 16))
    batch[0][4:, 0] = -1.0  # all of the second replica's
    plan = shared(model, *batch)
    assert len(plan.stages) == 4
    first, _ = on_ranks(tmp_path, RANKS, lambda group: trained(model, plan, batch, group))
    for name, value in trained_alone(model, *batch).items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-5)


def scaled(model: nn.Module, plan: Plan, batch: tuple[Tensor, Tensor], group: Any) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    engine, scales = engine_of(model, plan, group, scaler=scaler), []
    for step in range(3):
        target = batch[1].clone()
        if step == 1:
            target[-1] = torch.inf  # a sample of the second replica
        engine.step(batch[0], target=target)
        scales.append(scaler.get_scale())
    weights = [p.full_tensor() for _, p in engine.weights.named_parameters()]  # pyright: ignore
    assert all(bool(w.isfinite().all()) for w in weights)
    return scales


def test_an_overflow_on_one_replica_is_everyones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = blocks(), (torch.randn(8, 16), torch.randn(8, 16))
    plan = shared(model, *batch)
    found = on_ranks(tmp_path, RANKS, lambda group: scaled(model, plan, batch, group))
    assert found == [[8.0, 4.0, 4.0]] * RANKS


def loaded(model: nn.Module, plan: Plan, batch: tuple[Tensor, Tensor], folder: Path, group: Any) -> Any:
    with torch.device("meta"):
        empty = blocks()
    peaks, filled = [0], Ownership._fill

    def fill(self: Ownership, wanted: Any, notes: Any) -> None:
        filled(self, wanted, notes)
        tables = [p for module in empty.modules() for p in module._parameters.values()]
        held = (p.to_local() if hasattr(p, "to_local") else p for p in tables if p is not None)  # pyright: ignore
        peaks.append(sum(p.untyped_storage().size() for p in held if not p.is_meta))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ownership, "_fill", fill)
        engine = engine_of(empty, plan, group, weights=WeightFiles(folder / "model.safetensors"))
        engine.prepare(Batch((batch[0],), {}, (batch[1],)))
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in engine.weights.full_state_dict().items())
    return max(peaks)


def test_weights_are_read_block_by_block(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = blocks(), (torch.randn(8, 16), torch.randn(8, 16))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    plan = shared(model, *batch)
    whole = sum(p.numel() * 4 for p in model.parameters())
    found = on_ranks(tmp_path, RANKS, lambda group: loaded(model, plan, batch, tmp_path, group))
    assert found == [7 * whole // 16 + whole // 8] * RANKS
