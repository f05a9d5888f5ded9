"""One rank of four: steps of each schedule, in turns (A B A B); rank 0 writes one JSON.

Rank 0 measures the units of a real network and makes the plans; the layers of all ranks wait as long.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "memory"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from devices import Passes, by_block, network, profile_of
from meter import Meter, metered  # pyright: ignore[reportMissingImports]

import outsize
from outsize.capture.models.imports import import_torchvision, import_transformers
from outsize.ir.cluster import make_cluster
from outsize.ir.plan import Plan
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import agreed, make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "auto")
TIGHT = "auto, memory of 1f1b"
RANKS, COUNT = 4, 4


def gpt2() -> tuple[nn.Module, dict[str, Tensor], Any]:
    """A GPT-2 of eight blocks: equal layers between an embedding and a head."""
    hf = import_transformers()
    config = hf.GPT2Config(n_layer=8, n_embd=512, n_head=8, vocab_size=2048, n_positions=128)
    config.use_cache = False
    ids = torch.arange(256).reshape(2, 128) % 2048
    return hf.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}, None


def resnet50() -> tuple[nn.Module, dict[str, Tensor], Any]:
    """Sixteen uneven blocks."""
    images, target = torch.randn(2, 3, 96, 96), torch.arange(2)
    return import_torchvision().models.resnet50().train(), {"x": images}, target


# With how many bytes are saved for each byte of gradients that waits (saved_bytes / waiting_bytes of their
# graphs: 4.06 and 1.95).
NETWORKS = {"GPT-2, 8 blocks": (gpt2, 4), "ResNet-50": (resnet50, 2)}


def measured(name: str, least_s: float) -> list[Passes]:
    """The layers of a network with their waits."""
    torch.manual_seed(0)
    model, inputs, target = NETWORKS[name][0]()
    given: dict[str, Any] = {} if target is None else {"loss_fn": F.cross_entropy, "target": target}
    found = outsize.measure(model, (), inputs, sizes=[2], **given)
    return by_block(found.profiles[0], least_s, 2 * RANKS)


class Chosen(NamedTuple):
    """What rank 0 has found: the layers' waits, and a plan for each schedule."""

    layers: list[Passes]
    saved: int
    plans: dict[str, Plan]

    def build(self, width: int, *, waits: bool = True) -> nn.Module:
        """The network of stand-ins."""
        layers = self.layers if waits else [Passes(0.0, 0.0, 0.0)] * len(self.layers)
        return network(layers, width, self.saved)


def choose(name: str, options: argparse.Namespace) -> Chosen:
    """The planner's own cuts for each schedule."""
    chosen = Chosen(measured(name, options.least_ms / 1e3), NETWORKS[name][1], {})
    model, (x, y) = chosen.build(options.width, waits=False), batch_of(options)
    part = slice(0, options.rows)
    graph = outsize.capture(model, (x[part],), {}, loss_fn=F.mse_loss, target=y[part])
    profiles = profile_of(graph, chosen.layers, chosen.saved)
    asked = {"microbatches": COUNT, "measured": profiles, "loss_fn": F.mse_loss, "target": y}
    asked |= {"optimizer": "sgd"}
    for how in SCHEDULES:
        chosen.plans[how] = outsize.plan(model, (x,), schedule=how, cluster=f"{RANKS}xcpu", **asked)
    figures = chosen.plans["1f1b"].expected
    assert figures is not None
    room = make_cluster("4xcpu", "cpu", 1, RANKS, max(stage.p95_bytes for stage in figures.stages))
    chosen.plans[TIGHT] = outsize.plan(model, (x,), schedule="auto", cluster=room, **asked)
    return chosen


def batch_of(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [rows x microbatches, width]."""
    draw = torch.Generator().manual_seed(1)
    shape = (options.rows * COUNT, options.width)
    return torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)


@final
class Case:
    """An engine, and the seconds of its steps."""

    def __init__(self, plan: Plan, model: nn.Module, options: argparse.Namespace) -> None:
        self.plan, self._batch = plan, batch_of(options)
        x, y = self._batch
        self._engine = outsize.parallelize(model, (x,), plan=plan, loss_fn=F.mse_loss, target=y)
        self.laps_s: list[float] = []

    def step(self) -> None:
        """Without an optimizer; gradients from nothing."""
        for parameter in self._engine.model.parameters():
            parameter.grad = None
        x, y = self._batch
        self._engine.step(x, target=y, update=False)

    def lap(self) -> None:
        """One step between two barriers."""
        dist.barrier()
        start = time.perf_counter()
        self.step()
        dist.barrier()
        self.laps_s.append(time.perf_counter() - start)

    def row(self, name: str) -> dict[str, Any]:
        """As JSON."""
        figures = self.plan.expected
        assert figures is not None
        return {
            "schedule": name,
            "ranks": self.plan.ranks,
            "predicted_s": figures.step_s,
            "laps_s": self.laps_s,
            "splits": name.startswith("zero") or any("I" in row for row in self.plan.actions),
        }


def held_bytes(plan: Plan, model: nn.Module, options: argparse.Namespace) -> dict[str, list[int]]:
    """By rank, beside weights and batch: what a step really holds at its peak, and what the account says.

    All ranks in this process, each tensor by whose action made it (benchmarks/memory/meter.py).
    """
    x, y = batch_of(options)
    engine, meter = make_engine(model, plan, None, EngineOptions(loss_fn=F.mse_loss)), Meter(RANKS)
    with metered(meter):
        engine.step(x, target=y, update=False)
        for weight in model.parameters():
            weight.grad = None
        with meter:
            for name, stage in engine._ownership.placement.home.items():
                meter.hold(plan.ranks[stage], [model.get_parameter(name)])
            meter.share([x, y])
            before = list(meter.live_bytes)
            engine.step(x, target=y, update=False)
    assert plan.expected is not None
    account = [-x.nbytes - y.nbytes] * RANKS
    for rank, stage in zip(plan.ranks, plan.expected.stages, strict=True):
        account[rank] += stage.activations_bytes + stage.gradients_bytes + stage.boundary_bytes
    return {"held_bytes": [a - b for a, b in zip(meter.peaks, before, strict=True)], "account_bytes": account}


def compared(name: str, world: World, options: argparse.Namespace) -> dict[str, Any]:
    """All schedules of one network."""
    chosen: Any = agreed(world.group, lambda: choose(name, options))  # pyright: ignore[reportArgumentType]
    cases = {how: Case(plan, chosen.build(options.width), options) for how, plan in chosen.plans.items()}
    for case in cases.values():
        case.step()
    for _ in range(options.rounds):
        for case in cases.values():
            case.lap()
    rows = [
        case.row(how) | held_bytes(case.plan, chosen.build(options.width, waits=False), options)
        for how, case in cases.items()
    ]
    passes = [[each * 1e3 for each in (p.forward_s, p.input_s, p.weight_s)] for p in chosen.layers]
    return {"layers_ms": passes, "schedules": rows}


def main() -> None:
    """All networks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--least-ms", type=float, default=10.0, help="of an eighth of the forward")
    parser.add_argument("--rows", type=int, default=2048, help="of a microbatch")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    options = parser.parse_args()
    world = join()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    torch.set_num_threads(1)
    found = {name: compared(name, world, options) for name in options.networks}
    if world.rank == 0:
        options.out.write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main()
