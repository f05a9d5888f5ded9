"""Checkpoints over real ranks: every layout writes the same bits that it has read, and trains on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("parity", "unit"))

from forked import on_ranks
from layouts_worker import made
from parity_runs import SEED, Combination, captured, planned
from recorded_once import recorded_once
from zoo import case

from outsize.errors import BadCheckpoint, BadOption, ModelMismatch, RankFailed
from outsize.ir.plan import Axes, Plan
from outsize.run.checkpoint.read import CheckpointReader
from outsize.schedules.refine import by_blocks
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore::outsize.train.checkpoint.loop.attached.ResumeNote"),
]
NAME, MICROBATCHES = "gpt2", 4
SEVERAL = {
    "pp 2, dp_shard 2": Axes(pp=2, dp_shard=2),
    "dp_shard 2, tp 2": Axes(dp_shard=2, tp=2),
    "dp_replicate 2, dp_shard 2": Axes(dp_replicate=2, dp_shard=2),
    "pp 2, tp 2": Axes(pp=2, tp=2),
    "dp_shard 4, ZeRO-1": Axes(dp_shard=4),
}
RARE = ("dp_shard 2, tp 2",)  # with --all: tp and shards are each beside pp, too


def plan_of(axes: Axes, **changes: Any) -> Plan:
    plan = planned(Combination(NAME, MICROBATCHES, axes.pp, "1f1b"))
    changes |= {"axes": axes, "microbatches": MICROBATCHES // axes.replicas}
    if axes.dp_shard > 1:
        changes = {"weights": "sharded", **changes}
    plan = plan.model_copy(update=changes)
    return by_blocks(plan, captured(NAME, MICROBATCHES).graph) if plan.shards else plan


def engine_of(plan: Plan, group: dist.ProcessGroup | None, make: Any = torch.optim.AdamW) -> Engine:
    model, batch = made(NAME, torch.float32)
    options = EngineOptions(
        loss_fn=case(NAME).loss, optimizer=lambda parameters: make(parameters, lr=1e-3), seed=SEED
    )
    engine = make_engine(model, plan, group, options)
    engine.prepare(engine._split.dims.of(batch))
    return engine


def steps(engine: Engine, count: int) -> list[float]:
    _, batch = made(NAME, torch.float32)
    return [
        float(engine.step(*batch.args, target=batch.target or None, **batch.kwargs).loss)
        for _ in range(count)
    ]


def other_tensors(one: Path, other: Path) -> list[str]:
    """What two checkpoints do not have alike; generators are of ranks."""
    first, second = CheckpointReader(one), CheckpointReader(other)
    names = [name for name in {*first.names(), *second.names()} if not name.startswith("random/")]
    return [n for n in names if not (n in second.names() and torch.equal(first.read(n), second.read(n)))]


@pytest.fixture(autouse=True)
def _recorded_once() -> Iterator[None]:
    with recorded_once():
        yield


def chain(root: Path, layouts: dict[str, Axes], group: dist.ProcessGroup) -> dict[str, Any]:
    """Trains under the first layout; each other one reads what the one before it has written."""
    found: dict[str, Any] = {"losses": {}, "wrong": {}}
    folder = root / "begin"
    for name, axes in layouts.items():
        weights = {"weights": "resident"} if "ZeRO-1" in name else {}
        engine = engine_of(plan_of(axes, **weights), group)
        if not found["losses"]:
            found["losses"]["begin"] = steps(engine, 2)
            first = folder = engine.save(root / "begin")
        else:
            assert engine.state.resume(folder) == engine.steps == 2
            folder = engine.save(root / name, wait=False)
            engine.state.finish_saving()
            found["wrong"][name] = other_tensors(first, folder)
            if "tp 2" in name or "ZeRO" in name:
                found["losses"][name] = steps(engine, 2)
    return found


def test_every_layout_of_four_ranks_and_back_to_one(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    everything = pytestconfig.getoption("--all")
    layouts = {name: axes for name, axes in SEVERAL.items() if everything or name not in RARE}
    alone = engine_of(planned(Combination(NAME, MICROBATCHES, 2, "1f1b")), None)
    losses = steps(alone, 4)
    ranks = on_ranks(tmp_path, 4, lambda group: chain(tmp_path, layouts, group))
    for found in ranks:
        assert found["wrong"] == {name: [] for name in [*layouts][1:]}
        assert found["losses"]["begin"] == pytest.approx(losses[:2], rel=1e-6)
        for name, late in found["losses"].items():
            assert name == "begin" or late == pytest.approx(losses[2:], rel=1e-6), name
    for weights in ("resident", "host")[not everything :]:
        plan = planned(Combination(NAME, MICROBATCHES, 1, "gpipe")).model_copy(update={"weights": weights})
        again = engine_of(plan, None)
        assert again.state.resume(tmp_path / "dp_shard 4, ZeRO-1") == 2
        assert not other_tensors(tmp_path / "begin", again.save(tmp_path / weights))
        assert steps(again, 2) == pytest.approx(losses[2:], rel=1e-6)


class Noted(nn.LayerNorm):
    """A layer with a state of its own, which each rank has for all layers and knows for its own alone."""

    noted: Any = None

    def get_extra_state(self) -> Any:
        return self.noted

    def set_extra_state(self, state: Any) -> None:
        self.noted = state


def noted(root: Path, group: dist.ProcessGroup) -> dict[str, list[int]]:
    """What each layer has noted, as it is after going on."""
    engine = engine_of(plan_of(Axes(pp=2)), group)
    layers = {name: m for name, m in engine.model.named_modules() if isinstance(m, nn.LayerNorm)}
    for layer in layers.values():
        layer.__class__ = Noted
        layer.noted = [group.rank(), layer.weight.numel()]
    folder = engine.save(root / "noted")
    for layer in layers.values():
        layer.noted = None
    engine.state.resume(folder)
    return {name: layer.noted for name, layer in layers.items()}


class RowMeans(torch.optim.SGD):
    """Keeps the mean of each row to be looked at: its steps need no whole weight, but this is of a part."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["row means"] = weight.detach().mean(-1)
        return super().step(closure)


def refusals(root: Path, group: dist.ProcessGroup) -> dict[str, Any]:
    """What cannot be saved, or read, is an error of all ranks, and no folder is left."""
    engine = engine_of(plan_of(Axes(tp=2)), group, RowMeans)
    steps(engine, 1)
    said = {"row means": refusal(lambda: engine.save(root / "none"))}
    engine = engine_of(plan_of(Axes(pp=2)), group)
    steps(engine, 1)
    if group.rank() == 1:
        own = next(p for _, p in engine.weights.named_parameters())
        own.grad = torch.ones_like(own)
    said["gradients"] = refusal(lambda: engine.save(root / "none"))
    engine.optimizer.zero_grad()
    divided = engine.save(root / "whole")
    name, module = next((n, m) for n, m in engine.model.named_modules() if isinstance(m, nn.LayerNorm))
    module.register_buffer("more", torch.zeros(2))
    said["model"] = refusal(lambda: engine.state.resume(divided)).replace(name, "NAME")
    engine = engine_of(plan_of(Axes(pp=2)), group)
    if group.rank() == 0:
        file = next(divided.glob("model-00001*"))
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)
    dist.barrier(group)
    said["damaged"] = refusal(lambda: engine.state.resume(divided))
    said |= {"noted": str(noted(root, group))}
    return said | {"left": str((root / "none").exists() and list((root / "none").iterdir()))}


def refusal(act: Any) -> str:
    try:
        act()
    except (BadOption, ModelMismatch, RankFailed, BadCheckpoint) as error:
        return str(error)
    return "nothing was refused"


def test_what_one_rank_cannot_do_is_an_error_of_all(tmp_path: Path) -> None:
    both = on_ranks(tmp_path, 2, lambda group: refusals(tmp_path, group))
    assert both[0] == both[1]
    said = both[0]
    assert "follows from this rank's part of the weight" in said["row means"]
    assert "gradients are accumulated" in said["gradients"]
    assert "weights differ: NAME.more none saved, [2] here" in said["model"]
    assert "is damaged" in said["damaged"]
    assert said["left"] == "False"
    assert "[0, " in said["noted"], "of the layers that rank 0 runs"
    assert "[1, " in said["noted"], "and rank 1"
