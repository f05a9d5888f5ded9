"""One pinned rank of two: steps of each way to split a late fusion, in turns (A B A B).

Rank 0 times the units alone, chooses the plans, and writes one JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import outsize
from outsize.api import price
from outsize.capture.models.imports import import_torchvision
from outsize.ir.plan import Plan, stages_from_units
from outsize.ir.profile import ProfileSet
from outsize.report.wording import sentence
from outsize.schedules.builders import written
from outsize.schedules.compose import compose
from outsize.schedules.job import Job, StageCost
from outsize.train.engine.factory import agreed
from outsize.train.world.join import join
from outsize.train.world.world import World, leave


@final
class Fusion(nn.Module):
    """Two towers, each with images of its own, and a classifier of what both say."""

    def __init__(self, names: tuple[str, str], hidden: int) -> None:
        super().__init__()
        zoo = import_torchvision().models
        self.a, self.b = (zoo.get_model(name, weights=None) for name in names)
        layers = (
            [nn.Linear(2000, hidden), nn.ReLU(), nn.Linear(hidden, 10)] if hidden else [nn.Linear(2000, 10)]
        )
        self.head = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[n, 3, s, s] twice -> [n, 10]."""
        return self.head(torch.cat([self.a(x), self.b(y)], dim=1))


# Microbatches under which it is seen where the classifier belongs: with one, nothing is gained or lost.
MANY = 4


class Model(NamedTuple):
    """What is trained, and the width of the classifier's hidden layer (0: none)."""

    towers: tuple[str, str]
    hidden: int

    def build(self) -> nn.Module:
        """The same weights on each rank."""
        torch.manual_seed(0)
        return Fusion(self.towers, self.hidden)


MODELS = {
    "two ResNet-50": Model(("resnet50", "resnet50"), 0),
    "ResNet-50, ResNet-34, wide classifier": Model(("resnet50", "resnet34"), 8192),
}


def plans(model: nn.Module, batch: dict[str, Any], profiles: ProfileSet) -> dict[str, Plan]:
    """The ways, each with its prediction; the default plans are the search's own."""
    call = {
        "args": batch["args"],
        "loss_fn": batch["loss_fn"],
        "target": batch["target"],
        "measured": profiles,
    }
    asked = {**call, "cluster": "2xcpu", "exact": True}
    graph = outsize.capture(model, batch["args"], loss_fn=batch["loss_fn"], target=batch["target"])
    cut = next(unit.index for unit in graph.units if unit.name.startswith("b."))
    one = outsize.plan(model, microbatches=1, schedule="naive", **asked)
    runs = [range(cut), range(cut, len(graph.units))]
    found = {"naive": one.model_copy(update={"stages": stages_from_units(graph, runs, ["cpu:0", "cpu:1"])})}
    found["default plan, one microbatch"] = outsize.plan(model, microbatches=1, **asked)
    branches = outsize.plan(model, microbatches=MANY, **asked)
    if len(branches.stages) == 3:
        found |= {f"classifier on rank {r}": _moved(branches, r) for r in (0, 1)}
    found["1f1b"] = outsize.plan(model, schedule="1f1b", **asked)
    found["default plan"] = outsize.plan(model, **asked)
    return {name: price(plan, model, **call)[0] for name, plan in found.items()}


def _moved(plan: Plan, rank: int) -> Plan:
    """The plan of two towers and a classifier, with that on this rank, under the best schedule for it."""
    assert plan.expected is not None
    costs = tuple(StageCost(figures.forward_s, figures.backward_s) for figures in plan.expected.stages)
    ranks = (*plan.ranks[:2], rank)
    forward = {(tower, 2): 1e-4 for tower in (0, 1)}
    backward = {(2, tower): 1e-4 for tower in (0, 1)}
    best = compose(Job(ranks, plan.microbatches, costs, forward, backward, (0, 0, 0), (0, 0)))[0]
    classifier = plan.stages[2].model_copy(update={"device": f"cpu:{rank}"})
    return plan.model_copy(
        update={"actions": written(best.schedule), "stages": (*plan.stages[:2], classifier)}
    )


@final
class Case:
    """An engine and the seconds of its steps."""

    def __init__(self, plan: Plan, model: nn.Module, batch: dict[str, Any]) -> None:
        self.plan, self._batch = plan, batch
        call = {"loss_fn": batch["loss_fn"], "target": batch["target"]}
        self._engine = outsize.parallelize(model, batch["args"], plan=plan, **call)
        self.laps_s: list[float] = []

    def lap(self) -> None:
        """One step between two barriers."""
        for parameter in self._engine.model.parameters():
            parameter.grad = None
        dist.barrier()
        start = time.perf_counter()
        self._engine.step(*self._batch["args"], target=self._batch["target"], update=False)
        dist.barrier()
        self.laps_s.append(time.perf_counter() - start)

    def row(self, name: str) -> dict[str, Any]:
        """As JSON."""
        plan = self.plan
        assert plan.expected is not None
        return {
            "way": name,
            "schedule": plan.schedule,
            "microbatches": plan.microbatches,
            "stages_on_ranks": plan.ranks,
            "predicted_s": plan.expected.step_s,
            "laps_s": self.laps_s,
            "why": sentence(plan.why[0]),
        }


def compared(model: Model, world: World, options: argparse.Namespace) -> dict[str, Any]:
    """All ways of one model."""
    draw = torch.Generator().manual_seed(1)
    shape = (options.batch, 3, options.size, options.size)
    images = tuple(torch.randn(shape, generator=draw) for _ in range(2))
    target = torch.arange(options.batch) % 10
    batch = {"args": images, "loss_fn": nn.functional.cross_entropy, "target": target}

    def choose() -> Any:
        call = {"loss_fn": batch["loss_fn"], "target": target}
        sizes = sorted({1, 2, options.batch // 2, options.batch})
        return plans(model.build(), batch, outsize.measure(model.build(), images, sizes=sizes, **call))

    chosen: Any = agreed(world.group, choose)
    cases = {name: Case(plan, model.build(), batch) for name, plan in chosen.items()}
    for case in cases.values():
        case.lap()
        case.laps_s.clear()
    for _ in range(options.rounds):
        for case in cases.values():
            case.lap()
    return {"ways": [case.row(name) for name, case in cases.items()]}


def main() -> None:
    """All models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=96, help="of an image, in pixels")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    world = join()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    torch.set_num_threads(1)
    found = {name: compared(model, world, options) for name, model in MODELS.items()}
    if world.rank == 0:
        options.out.write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main()
