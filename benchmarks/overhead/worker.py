"""One pinned rank: tiny stages of outsize and of torch.distributed.pipelining, bare compute, the wire.

Rank 0 writes one JSON: per system the seconds of every lap, on the slower rank where ranks differ.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import outsize
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.train.world.join import join
from outsize.train.world.world import leave

WIDTH, ROWS, LAYERS = 64, 8, 4
Lap = Callable[[], None]


def build() -> nn.Sequential:
    """Linear layers of one width, every one with a Tanh."""
    torch.manual_seed(0)
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def batch_of(microbatches: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [rows x microbatches, width]."""
    draw = torch.Generator().manual_seed(1)
    shape = (ROWS * microbatches, WIDTH)
    return torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)


def engine_of(schedule: str, microbatches: int, stages: int, processes: int) -> tuple[outsize.Engine, Lap]:
    """An engine over equal parts of the layers, and one of its steps."""
    model, (x, y) = build(), batch_of(microbatches)
    graph = outsize.capture(model, (x[:ROWS],), {}, loss_fn=F.mse_loss, target=y[:ROWS])
    names = [unit.name for unit in graph.units]
    per = 2 * LAYERS // stages
    bounds = (0, *(names.index(str(per * s)) for s in range(1, stages)), len(names))
    plan = Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{processes}xcpu" if processes > 1 else f"{stages}xcpu",
        axes=Axes(pp=stages),
        batch_size=len(x),
        microbatches=microbatches,
        schedule=cast("ScheduleName", schedule),
        stages=stages_from_bounds(graph, bounds, tuple(f"cpu:{s}" for s in range(stages))),
    )
    engine = outsize.parallelize(model, (x,), {}, plan=plan, loss_fn=F.mse_loss, target=y)

    def lap() -> None:
        engine.step(x, target=y, update=False)

    return engine, lap


def torch_lap(schedule: str, microbatches: int, rank: int) -> tuple[nn.Module, Lap]:
    """The same step of torch.distributed.pipelining on hand-cut halves."""
    model, (x, y) = build(), batch_of(microbatches)
    half = nn.Sequential(*list(model)[LAYERS * rank : LAYERS * (rank + 1)])
    given, made = (torch.zeros(ROWS, WIDTH, requires_grad=grad) for grad in (rank > 0, rank == 0))
    stage = PipelineStage(half, rank, 2, torch.device("cpu"), input_args=(given,), output_args=(made,))
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    pipe = kind(stage, n_microbatches=microbatches, loss_fn=F.mse_loss)

    def lap() -> None:
        if rank == 0:
            pipe.step(x)
        else:
            pipe.step(target=y, losses=[])

    return half, lap


def bare_lap(microbatches: int, rank: int) -> tuple[nn.Module, Lap]:
    """This rank's own compute, by hand."""
    model, (x, y) = build(), batch_of(microbatches)
    half = nn.Sequential(*list(model)[LAYERS * rank : LAYERS * (rank + 1)])
    gradient = torch.randn(ROWS, WIDTH)
    parts = list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))
    if rank:
        parts = [(a.clone().requires_grad_(), b) for a, b in parts]

    def lap() -> None:
        for a, b in parts:
            out = half(a)
            if rank:
                (F.mse_loss(out, b) / microbatches).backward()
            else:
                out.backward(gradient)

    return half, lap


def wire_lap(microbatches: int, rank: int) -> tuple[nn.Module, Lap]:
    """A boundary there and back for each microbatch."""
    out, back, peer = torch.zeros(ROWS * WIDTH), torch.zeros(ROWS * WIDTH), 1 - rank

    def send() -> None:
        work = dist.isend(out, peer)  # noqa: TID251 - the raw call is what is measured
        assert work is not None
        work.wait()

    def receive() -> None:
        work = dist.irecv(back, peer)  # noqa: TID251
        assert work is not None
        work.wait()

    def lap() -> None:
        for _ in range(microbatches):
            for act in (send, receive) if rank == 0 else (receive, send):
                act()

    return nn.Identity(), lap


def plain_lap(microbatches: int) -> tuple[nn.Module, Lap]:
    """The plain loop of one process."""
    model, (x, y) = build(), batch_of(microbatches)

    def lap() -> None:
        for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            (F.mse_loss(model(a), b) / microbatches).backward()

    return model, lap


def timed(lap: Lap, model: nn.Module, count: int, *, together: bool) -> list[float]:
    """Seconds of `count` laps; `together` between two barriers."""
    laps = []
    for _ in range(count):
        for p in model.parameters():
            p.grad = None
        if together:
            dist.barrier()
        start = time.perf_counter()
        lap()
        if together:
            dist.barrier()
        laps.append(time.perf_counter() - start)
    return laps


def systems(microbatches: int, rank: int, world_size: int) -> dict[str, tuple[nn.Module, Lap]]:
    """All that take turns."""
    if world_size == 1:
        found = {"plain": plain_lap(microbatches)}
        for stages in (2, 4):
            engine, lap = engine_of("1f1b", microbatches, stages, 1)
            found[f"outsize {stages} stages"] = (engine.model, lap)
        return found
    found = {"bare": bare_lap(microbatches, rank), "wire": wire_lap(microbatches, rank)}
    for schedule in ("gpipe", "1f1b"):
        engine, lap = engine_of(schedule, microbatches, 2, 2)
        found[f"outsize {schedule}"] = (engine.model, lap)
        found[f"torch {schedule}"] = torch_lap(schedule, microbatches, rank)
    return found


def slower(laps: list[float]) -> list[float]:
    """Lap by lap the seconds of the slower rank."""
    wire = torch.tensor(laps, dtype=torch.float64)
    dist.all_reduce(wire, op=dist.ReduceOp.MAX)
    return wire.tolist()


def main() -> None:
    """Rounds of all systems."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    world = join()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    torch.set_num_threads(1)
    together = world.world_size > 1
    found = systems(options.microbatches, world.rank, world.world_size)
    for model, lap in found.values():
        timed(lap, model, 5, together=together)
    result: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(options.rounds):
        for name, (model, lap) in found.items():
            # Bare compute needs no barrier within the lap; both ranks compute at once all the same.
            result[name] += timed(lap, model, options.laps, together=together and name != "bare")
            if together:
                dist.barrier()
    if together:
        result = {name: slower(laps) for name, laps in result.items()}
    if world.rank == 0:
        options.out.write_text(json.dumps(result))
    leave(world)


if __name__ == "__main__":
    main()
