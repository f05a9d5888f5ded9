"""One pinned rank: steps of equal stages under several schedules, and bare stages, in turns (A B A B).

Rank 0 writes one JSON: wall and CPU seconds of the steps, of bare stages, and the medians of the spans.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.train.world.join import join
from outsize.train.world.world import leave

BLOCKS = 2
Size = tuple[int, int]  # tokens of a microbatch, width


class Block(nn.Module):
    """x + W2 gelu(W1 norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] -> the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(stages: int, width: int) -> nn.Sequential:
    """Two blocks for each stage."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS * stages)))


def batch_of(microbatches: int, size: Size) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [tokens x microbatches, width]."""
    draw = torch.Generator().manual_seed(1)
    shape = (size[0] * microbatches, size[1])
    return torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)


class Case:
    """An engine with one schedule and one number of microbatches."""

    def __init__(self, schedule: str, microbatches: int, stages: int, size: Size) -> None:
        (tokens, width), (x, y) = size, batch_of(microbatches, size)
        model = build(stages, width)
        self.x, self.y = x, y
        graph = outsize.capture(model, (x[:tokens],), {}, loss_fn=F.mse_loss, target=y[:tokens])
        names = [unit.name for unit in graph.units]
        starts = [f"{BLOCKS * stage}." for stage in range(1, stages)]
        bounds = (0, *(next(i for i, n in enumerate(names) if n.startswith(s)) for s in starts), len(names))
        plan = Plan(
            model=graph.model,
            fingerprint=graph.fingerprint,
            cluster=f"{stages}xcpu",
            axes=Axes(pp=stages),
            batch_size=len(x),
            microbatches=microbatches,
            schedule=cast("ScheduleName", schedule),
            stages=stages_from_bounds(graph, bounds, tuple(f"cpu:{s}" for s in range(stages))),
        )
        self.engine = outsize.parallelize(model, (x,), {}, plan=plan, loss_fn=F.mse_loss, target=y)
        self.times: list[tuple[float, float]] = []  # start, end of this rank's laps
        self.cpu: list[float] = []
        self.spans: dict[str, list[float]] = {}

    def lap(self) -> None:
        """One step after a barrier."""
        for p in self.engine.model.parameters():
            p.grad = None
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        self.engine.step(self.x, target=self.y, update=False)
        self.cpu.append(time.process_time() - cpu)
        self.times.append((start, time.perf_counter()))

    def wall(self) -> list[float]:
        """Of each lap, from the first rank's start to the last one's end: they have one clock."""
        laps = zip(*collected(self.times), strict=True)
        return [max(end for _, end in ranks) - min(start for start, _ in ranks) for ranks in laps]

    def look(self) -> None:
        """Note the timeline of the last step."""
        for span in self.engine.timeline().spans:
            if span.lane == "compute":
                self.spans.setdefault(span.action.rstrip("0123456789"), []).append(span.duration_s)

    def forget(self) -> None:
        """Warming up is over."""
        self.times, self.cpu, self.spans = [], [], {}


class Bare:
    """This rank's stage by hand."""

    def __init__(self, rank: int, stages: int, size: Size) -> None:
        blocks = list(build(stages, size[1]))[BLOCKS * rank : BLOCKS * (rank + 1)]
        self.stage, (self.x, self.y) = nn.Sequential(*blocks), batch_of(1, size)
        self.first, self.last = rank == 0, rank == stages - 1
        self.laps: list[tuple[float, float, float]] = []  # forward, backward, CPU seconds of both

    def lap(self) -> None:
        """Forward and backward of one microbatch."""
        x = self.x if self.first else self.x.clone().requires_grad_()
        cpu, start = time.process_time(), time.perf_counter()
        out = self.stage(x)
        out = F.mse_loss(out, self.y) if self.last else out
        middle = time.perf_counter()
        out.backward(None if self.last else self.y)
        end = time.perf_counter()
        self.laps.append((middle - start, end - middle, time.process_time() - cpu))

    def medians(self) -> list[float]:
        """Of the three."""
        return [statistics.median(column) for column in zip(*self.laps, strict=True)]


def collected(value: Any) -> list[Any]:
    """The value of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def main() -> None:
    """Rounds of all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", required=True)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    world = join()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    torch.set_num_threads(1)
    named = [case.split(":") for case in options.cases.split(",")]
    size = (options.tokens, options.width)
    cases = [Case(schedule, int(m), world.world_size, size) for schedule, m in named]
    bare = Bare(world.rank, world.world_size, size)
    for case in cases:
        case.lap()
        case.forget()
    for _ in range(options.rounds):
        for case in cases:
            case.lap()
            case.lap()
            case.look()
            dist.barrier()
            for _ in range(6):
                bare.lap()
    stages = collected(bare.medians())
    rows = []
    for (schedule, m), case in zip(named, cases, strict=True):
        cpu = [sum(ranks) for ranks in zip(*collected(case.cpu), strict=True)]
        spans = {key: statistics.median(seconds) for key, seconds in case.spans.items()}
        rows.append(
            {
                "schedule": schedule,
                "microbatches": int(m),
                "wall_s": case.wall(),
                "cpu_s": cpu,
                "spans_s": spans,
            }
        )
    if world.rank == 0:
        options.out.write_text(json.dumps({"rows": rows, "stages": stages}))
    leave(world)


if __name__ == "__main__":
    main()
