"""What is timed: outsize's engine by a plan, the forum's advice, and torch.distributed.pipelining."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from itertools import accumulate
from typing import cast

import torch
import torch.distributed as dist
from cases import Case
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import outsize
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.train.world.join import join
from outsize.train.world.world import World

Lap = Callable[[], None]
System = tuple[nn.Module, Lap]


def engine_system(case: Case, plan: Plan) -> System:
    """Forward and backward of outsize's engine on a copy of the model."""
    model = copy.deepcopy(case.model)
    engine = outsize.parallelize(model, case.args, case.kwargs, plan=plan, **case.example)

    def lap() -> None:
        engine.step(*case.args, target=case.target, update=False, **case.kwargs)

    return model, lap


def plan_of(case: Case, graph: ModelGraph, place: int, schedule: str, microbatches: int) -> Plan:
    """The units cut in two before number `place`."""
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster="2xcpu",
        axes=Axes(pp=2),
        batch_size=case.samples,
        microbatches=microbatches,
        schedule=cast("ScheduleName", schedule),
        stages=stages_from_bounds(graph, (0, place, len(graph.units)), ("cpu:0", "cpu:1")),
    )


def equal_parameters(graph: ModelGraph) -> int:
    """The cut at which both halves own as nearly the same number of parameters as they can."""
    owned = [sum(p.numel for p in graph.owned_parameters(i, i)) for i in range(len(graph.units))]
    total, below = sum(owned), list(accumulate(owned, initial=0))
    return min(range(1, len(owned)), key=lambda place: abs(2 * below[place] - total))


def forum_systems(case: Case, counts: list[int]) -> dict[str, System]:
    """The advice, pipelined as well as its cut allows, and as it is usually run."""
    graph = outsize.capture(case.model, case.args, case.kwargs, **case.example)
    place = equal_parameters(graph)
    found = {f"forum 1f1b {m}": engine_system(case, plan_of(case, graph, place, "1f1b", m)) for m in counts}
    return {**found, "forum naive": engine_system(case, plan_of(case, graph, place, "naive", 1))}


def tutorial_half(model: nn.Module, rank: int) -> nn.Module:
    """conv1 to layer2, and layer3 to fc, as the tutorial has it."""
    first, last = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2"), ("layer3", "layer4", "avgpool")
    if rank == 0:
        return nn.Sequential(*(model.get_submodule(name) for name in first))
    return nn.Sequential(*map(model.get_submodule, last), nn.Flatten(1), model.get_submodule("fc"))


def torch_system(case: Case, microbatches: int, rank: int) -> System:
    """1F1B of torch.distributed.pipelining."""
    half = tutorial_half(copy.deepcopy(case.model), rank)
    part = case.args[0][: case.samples // microbatches]
    with torch.no_grad():
        middle = torch.zeros_like(tutorial_half(copy.deepcopy(case.model), 0)(part))
    given, made = (
        (part, middle.requires_grad_())
        if rank == 0
        else (middle.requires_grad_(), part.new_zeros(len(part), 1000))
    )
    stage = PipelineStage(half, rank, 2, torch.device("cpu"), input_args=(given,), output_args=(made,))
    pipe = Schedule1F1B(stage, n_microbatches=microbatches, loss_fn=case.loss_fn)

    def lap() -> None:
        if rank == 0:
            pipe.step(case.args[0])
        else:
            losses: list[Tensor] = []
            pipe.step(target=case.target, losses=losses)

    return half, lap


def timed(system: System) -> float:
    """Seconds of one lap, from a barrier to a barrier."""
    model, lap = system
    for p in model.parameters():
        p.grad = None
    dist.barrier()
    start = time.perf_counter()
    lap()
    dist.barrier()
    return time.perf_counter() - start


def joined() -> World:
    """This rank, on a core of its own."""
    world = join()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[world.rank]})
    torch.set_num_threads(1)
    return world


def in_turns(systems: dict[str, System], rounds: int) -> dict[str, list[float]]:
    """Seconds of the laps of each; one before them warms up."""
    for system in systems.values():
        timed(system)
    laps: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, system in systems.items():
            laps[name].append(timed(system))
    return laps
