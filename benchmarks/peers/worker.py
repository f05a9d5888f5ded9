"""One pinned rank of two: outsize and torch's own parallelism on the same model, a step of each in turn.

    worker.py AXIS MODEL POINT OUT ROUNDS

POINT is a share: the number of samples is the one at which communication takes so much of the peer's step, by
three short measurements, the step without communication at two sizes, and the peer's step. For pipelines and
one process it is the number of microbatches. Rank 0 writes JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import CASES, Case, LlamaHalf, loss_of, next_token_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import outsize
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import leave

Step = Callable[[], None]
WARM = 3
MOST_SAMPLES = 64  # of a rank
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"axes": {"dp_replicate": 2}},
    "shards": {"axes": {"dp_shard": 2}},
    "tensor": {"axes": {"tp": 2}},
}
CLIP_NORM = 1.0
SAMPLES_OF_MICROBATCH = 4
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def made(case: Case) -> nn.Module:
    """The model, of the same weights every time."""
    torch.manual_seed(0)
    return case.make()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Two states for each parameter, in one pass over memory; torch takes no DTensors beside tensors so."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=sys.argv[1] != "tensor", foreach=False)


def loop(model: nn.Module, batch: dict[str, Tensor]) -> Step:
    """What a user writes."""
    optimizer = adamw(model.parameters())

    def step() -> None:
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rows_of(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A rank's half of the samples."""
    return {name: tensor.chunk(2)[rank] for name, tensor in batch.items()}


def peer(axis: str, case: Case, batch: dict[str, Tensor], rank: int) -> Step:
    """torch's DDP, FSDP2 or tensor parallelism, as its documentation has them."""
    model = made(case)
    if axis == "replicas":
        return loop(DistributedDataParallel(model), rows_of(batch, rank))
    mesh = init_device_mesh("cpu", (2,))
    if axis == "shards":
        for block in case.blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return loop(model, rows_of(batch, rank))
    for block in case.blocks(model):
        layers = {name: name.rpartition(".")[2] for name, _ in block.named_modules()}
        styles: dict[str, Any] = {name: ColwiseParallel() for name, last in layers.items() if last in COLUMNS}
        styles |= {name: RowwiseParallel() for name, last in layers.items() if last in ROWS}
        parallelize_module(block, mesh, styles)
    return loop(model, batch)


def ours(axis: str, case: Case, batch: dict[str, Tensor]) -> Step:
    """outsize's engine; every rank has the whole batch."""
    model = made(case)
    samples = len(batch[case.name_of_input])
    request = outsize.Request(cluster="2xcpu", batch_size=samples, stages=1, microbatches=1, **LAYOUTS[axis])
    plan = outsize.plan(model, (), batch, request=request)
    engine = outsize.parallelize(model, (), batch, plan=plan, optimizer=adamw)
    return lambda: engine.step(**batch)


def pipelines(case: Case, batch: dict[str, Tensor], count: int, rank: int) -> dict[str, Step]:
    """outsize's pipeline, planned, and torch's schedules on two halves cut by hand."""
    model = made(case)
    request = outsize.Request(cluster="2xcpu", batch_size=len(batch["labels"]), stages=2, microbatches=count)
    plan = outsize.plan(model, (), batch, request=request)
    engine = outsize.parallelize(model, (), batch, plan=plan, optimizer=adamw)
    steps: dict[str, Step] = {"outsize": lambda: engine.step(**batch)}
    for schedule in (ScheduleGPipe, Schedule1F1B):
        half = LlamaHalf(made(case), first=rank == 0)
        stage = PipelineStage(half, rank, 2, torch.device("cpu"))
        steps[schedule.__name__] = pipelined(
            schedule(stage, count, loss_fn=next_token_loss), half, batch, rank
        )
    return steps | {"computing": stage_alone(LlamaHalf(made(case), first=rank == 0), batch, count, rank)}


def stage_alone(half: LlamaHalf, batch: dict[str, Tensor], count: int, rank: int) -> Step:
    """One half of the layers over all microbatches, without messages and so without a bubble."""
    optimizer = adamw(half.parameters())
    tokens, labels = batch["input_ids"].chunk(count), batch["labels"].chunk(count)
    hidden = torch.randn(*tokens[0].shape, half.layers[0].hidden_size)

    def step() -> None:
        for microbatch in range(count):
            if rank == 0:
                half(tokens[microbatch]).backward(hidden)
            else:
                values = half(hidden.clone().requires_grad_())
                (next_token_loss(values, labels[microbatch]) / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipelined(schedule: Any, half: nn.Module, batch: dict[str, Tensor], rank: int) -> Step:
    """A step of one of torch's schedules."""
    optimizer = adamw(half.parameters())

    def step() -> None:
        if rank == 0:
            schedule.step(batch["input_ids"])
        else:
            schedule.step(target=batch["labels"])
        optimizer.step()
        optimizer.zero_grad()

    return step


def alone(case: Case, batch: dict[str, Tensor], count: int, rank: int) -> dict[str, Step]:
    """One process: the engine and the plain loop over the same microbatches, both with clipping.

    Each has a process of its own, which waits while the other one steps: an engine sets how malloc keeps
    memory, from which a loop beside it would gain as well.
    """
    steps: dict[str, Step] = dict.fromkeys(("outsize", "peer"), lambda: None)
    model = made(case)
    if rank:
        return steps | {"peer": plain_loop(model, batch, count)}
    request = outsize.Request(cluster="1xcpu", batch_size=len(batch["labels"]), microbatches=count)
    plan = outsize.plan(model, (), batch, request=request)
    engine = make_engine(model, plan, None, EngineOptions(optimizer=adamw, clip_norm=CLIP_NORM))
    return steps | {"outsize": lambda: engine.step(**batch)}


def plain_loop(model: nn.Module, batch: dict[str, Tensor], count: int) -> Step:
    """What a user writes for several microbatches a step."""
    optimizer = adamw(model.parameters())

    def step() -> None:
        for part in range(count):
            loss = loss_of(model(**{name: tensor.chunk(count)[part] for name, tensor in batch.items()}))
            (loss / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each in turn, between barriers, behind steps that warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM + rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            if turn >= WARM:
                times[name].append(time.perf_counter() - start)
    return times


def samples_for(axis: str, case: Case, share: float, rank: int) -> int:
    """So many samples in the batch that communication takes this share of the peer's step."""
    small, large = 2, 8

    def alone(samples: int) -> Step:
        return computing(axis, case, case.batch(samples), rank)

    steps = {"small": alone(small), "large": alone(large), "peer": peer(axis, case, case.batch(small), rank)}
    medians = {name: statistics.median(times) for name, times in timed(steps, 3).items()}
    sample_s = max(1e-6, (medians["large"] - medians["small"]) / (large - small))
    fixed_s = max(0.0, medians["small"] - small * sample_s)
    sent_s = max(1e-6, medians["peer"] - medians["small"])
    wanted = (sent_s * (1 - share) / share - fixed_s) / sample_s
    found = [int(max(2, min(2 * MOST_SAMPLES, 2 * round(wanted / 2))))]
    dist.broadcast_object_list(found)
    return found[0]


def computing(axis: str, case: Case, batch: dict[str, Tensor], rank: int) -> Step:
    """A rank's part of the computing without communication: its samples, or for tp half of the products."""
    if axis != "tensor":
        return loop(made(case), rows_of(batch, rank))
    return loop(halved(made(case), case), batch)


def halved(model: nn.Module, case: Case) -> nn.Module:
    """The model with the products that one of two tensor parallel ranks has."""
    for block in case.blocks(model):
        for name, layer in list(block.named_modules()):
            last, parent = name.rpartition(".")[2], block.get_submodule(name.rpartition(".")[0])
            if last in COLUMNS:
                setattr(parent, last, nn.Linear(layer.in_features, layer.out_features // 2, bias=False))
            elif last in ROWS:
                setattr(parent, last, nn.Linear(layer.in_features // 2, layer.out_features, bias=False))
    return model


def wire_s(model: nn.Module) -> float:
    """Seconds to read the other rank's gradients and to add them up: what no replica gets around."""
    grads = [torch.randn(p.shape) for p in model.parameters()]
    others = [torch.randn(p.shape) for p in model.parameters()]
    found = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        torch._foreach_add_(grads, others)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def main() -> None:
    axis, name, point, out, rounds = sys.argv[1:6]
    world = join()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[world.rank]})
    torch.set_num_threads(1)
    case, rank = CASES[name], world.rank
    by_count = {"pipeline": pipelines, "one process": alone}
    if axis in by_count:
        count = round(float(point))
        samples = SAMPLES_OF_MICROBATCH * count
        steps = by_count[axis](case, case.batch(samples), count, rank)
    else:
        samples = samples_for(axis, case, float(point), rank)
        batch = case.batch(samples)
        steps = {
            "outsize": ours(axis, case, batch),
            "peer": peer(axis, case, batch, rank),
            "computing": computing(axis, case, batch, rank),
        }
    times = timed(steps, int(rounds))
    wire = wire_s(made(case)) if axis in ("replicas", "shards") else 0.0
    if world.rank == 0:
        found = {"axis": axis, "model": name, "point": float(point), "samples": samples}
        Path(out).write_text(json.dumps(found | {"times_s": times, "wire_s": wire}))
    leave(world)


if __name__ == "__main__":
    main()
