"""Runs one process of `outsize bench tutorial`: all systems in one run, alternating (A B A B), between
barriers.

    single device    the plain loop on rank 0
    model parallel   the tutorial's cut; one device at a time
    pipelined        the tutorial's split loop: all forwards, then all backwards, by split size (GPipe)
    outsize          the plan that `outsize.tune` finds

All but the first are run by outsize's engine, so they differ in nothing but the plan.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outsize import api
from outsize.cli.model_input import ModelInput, make_model_input
from outsize.cli.processes.bench_experiment import OURS, SINGLE, SPLIT, TutorialJob, TutorialOutcome
from outsize.cli.processes.job import JobFolder
from outsize.cli.processes.run_worker import serve
from outsize.cli.processes.tune_worker import cluster, device_type, pin, quieten
from outsize.cli.screen import Screen
from outsize.device.accelerators import current_device, synchronize
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.ops.training import parallelize
from outsize.ops.tuning import tune
from outsize.program.tree import map_leaves
from outsize.schedules.families import GPIPE, SEQUENTIAL
from outsize.train.world.world import World

Step = Callable[[], None]


def main(folder: JobFolder) -> None:
    """Runs the folder's job as this rank."""
    job = TutorialJob.model_validate_json(folder.job.read_text(encoding="utf-8"))
    serve(folder, lambda world: tutorial(job, world), as_json=job.as_json, device_type=device_type)


def tutorial(job: TutorialJob, world: World) -> TutorialOutcome:
    """Runs the job on this rank; laps are rank 0's between two barriers."""
    screen = Screen(job.as_json)
    quieten(world)
    pin(world)
    with screen.working(f"building {job.model}"):
        inputs = make_model_input(job.model, job.input, job.batch, seed=job.seed)
    with screen.bar("tuning") as progress:
        tuned = tune(
            *inputs.call, **inputs.loss, cluster=cluster(world), trials=job.trials, progress=progress
        )
    plan = tuned.plan
    steps: dict[str, Step] = {SINGLE: _plain(inputs, world)}
    steps[SPLIT] = _engine(inputs, tutorial_plan(inputs, plan, job.cut, SEQUENTIAL.name, 1))
    for size in job.splits:
        count = job.batch // size
        steps[str(size)] = _engine(inputs, tutorial_plan(inputs, plan, job.cut, GPIPE.name, count))
    steps[OURS] = _engine(inputs, plan)
    with screen.bar("measuring") as progress:
        laps = _in_turns(steps, job.repeats, world, progress)
    return TutorialOutcome(
        job=job,
        devices=tuple(stage.device for stage in plan.stages),
        torch=torch.__version__,
        single_s=laps[SINGLE],
        split_s=laps[SPLIT],
        pipelined_s={size: laps[str(size)] for size in job.splits},
        outsize_s=laps[OURS],
        plan=plan,
    )


def tutorial_plan(inputs: ModelInput, like: Plan, cut: str, schedule: ScheduleName, count: int) -> Plan:
    """Returns the plan that cuts before the first unit of the module `cut`, on the devices of another
    plan.
    """
    graph = api.capture(*inputs.call, **inputs.loss)
    place = next(i for i, unit in enumerate(graph.units) if f"{unit.name}.".startswith(f"{cut}."))
    devices = [stage.device for stage in like.stages[:2]]
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=like.cluster,
        axes=Axes(pp=2),
        batch_size=like.batch_size,
        microbatches=count,
        schedule=schedule,
        stages=stages_from_bounds(graph, (0, place, len(graph.units)), devices),
    )


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _engine(inputs: ModelInput, plan: Plan) -> Step:
    model, args, kwargs = inputs.call
    engine = parallelize(copy.deepcopy(model), args, kwargs, **inputs.loss, plan=plan, optimizer=_sgd)
    target = inputs.objective.target
    return lambda: _ignore(engine.step(*args, target=target, **kwargs))


def _plain(inputs: ModelInput, world: World) -> Step:
    """Returns a step of the unsplit model; other ranks have nothing to do."""
    device = torch.device(device_type())
    model, objective = copy.deepcopy(inputs.model).to(device), inputs.objective
    args, kwargs, target = (
        map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, arguments)
        for arguments in (inputs.args, inputs.kwargs, objective.target)
    )
    optimizer = _sgd(model.parameters())

    def step() -> None:
        output = model(*args, **kwargs)
        loss = objective.loss_fn(output, target) if objective.loss_fn else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step if world.rank == 0 else lambda: None


def _ignore(_: object) -> None:
    """Drops a step's result, which is not needed here."""


def _in_turns(
    steps: dict[str, Step], repeats: int, world: World, progress: Callable[[int, int], None]
) -> dict[str, tuple[float, ...]]:
    """Returns the seconds of each lap by name; the first round warms up and is not counted."""
    laps: dict[str, list[float]] = {name: [] for name in steps}
    for number in range((repeats + 1) * len(steps)):
        name = list(steps)[number % len(steps)]
        dist.barrier(group=world.host)
        start = time.perf_counter()
        steps[name]()
        synchronize(current_device())
        dist.barrier(group=world.host)
        laps[name].append(time.perf_counter() - start)
        progress(number + 1, (repeats + 1) * len(steps))
    return {name: tuple(seconds[1:]) for name, seconds in laps.items()}


if __name__ == "__main__":
    main(JobFolder(path=Path(sys.argv[1])))
