"""One pinned rank of two: the same model trained along each axis, memory of each alone, then time in turns.

Rank 0 writes one JSON: seconds of every step, bytes that each rank had in use at the peak, losses.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.measure.memory import MemoryWatch, reader
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

BATCH, TOKENS, WORDS, MICROBATCHES = 16, 64, 2048, 8
CPU = torch.device("cpu")
# What is asked of the planner; microbatches are those of each replica, of two samples everywhere.
AXES: dict[str, dict[str, Any]] = {
    "pp 2": {"stages": 2, "microbatches": MICROBATCHES},
    "dp_replicate 2": {"axes": {"dp_replicate": 2}, "stages": 1, "microbatches": MICROBATCHES // 2},
    "dp_shard 2": {"axes": {"dp_shard": 2}, "stages": 1, "microbatches": MICROBATCHES // 2},
    "dp_shard 2, states": {
        "axes": {"dp_shard": 2},
        "stages": 1,
        "microbatches": MICROBATCHES // 2,
        "weights": "resident",
    },
    "tp 2": {"axes": {"tp": 2}, "stages": 1, "microbatches": MICROBATCHES, "sequence_parallel": False},
    "tp 2, sequence": {
        "axes": {"tp": 2},
        "stages": 1,
        "microbatches": MICROBATCHES,
        "sequence_parallel": True,
    },
}
# Weights on the host: of one device, which rank 0 is, and of two in turns.
ON_HOST: dict[str, tuple[str, dict[str, Any]]] = {
    "host-optimizer": ("1x12GB", {"weights": "host-optimizer"}),
    "host": ("1x12GB", {"weights": "host"}),
    "host-activations": ("1x12GB", {"weights": "host-activations"}),
    "pp 2, host": ("2x12GB", {"weights": "host", "stages": 2}),
}
Step = Callable[[], Tensor]
Build = Callable[[], Step]


def model() -> nn.Module:
    """A Llama of 6.4 million parameters."""
    hf = import_transformers()
    config = hf.LlamaConfig(
        num_hidden_layers=8, hidden_size=256, intermediate_size=704, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=WORDS, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config).train()


def batch() -> dict[str, Tensor]:
    """Token ids as inputs and labels, [BATCH, TOKENS]."""
    ids = torch.randint(0, WORDS, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Two states for each parameter."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def plain(world: World) -> Step:
    """One process: the loop that everything is compared with; the other rank rests."""
    if world.rank:
        return lambda: torch.zeros(())
    alone, inputs = model(), batch()
    steps = optimizer(alone.parameters())

    def step() -> Tensor:
        total = torch.zeros(())
        for part in range(MICROBATCHES):
            rows = slice(part * BATCH // MICROBATCHES, (part + 1) * BATCH // MICROBATCHES)
            loss = alone(**{name: tensor[rows] for name, tensor in inputs.items()}).loss / MICROBATCHES
            loss.backward()
            total += loss.detach()
        steps.step()
        steps.zero_grad()
        return total

    return step


def along(axes: dict[str, Any]) -> Step:
    """outsize's engine, every rank with the whole batch."""
    whole, inputs = model(), batch()
    request = outsize.Request(cluster="2xcpu", batch_size=BATCH, schedule="1f1b", **axes)
    plan = outsize.plan(whole, (), inputs, request=request)
    engine = outsize.parallelize(whole, (), inputs, plan=plan, optimizer=optimizer)
    return lambda: engine.step(**inputs).loss


def from_host(whole: nn.Module, name: str) -> outsize.Plan:
    """Layer by layer, each stage computed anew in its backward; a device is part of this machine's memory."""
    cluster, wishes = ON_HOST[name]
    asked = {"batch_size": BATCH, "microbatches": MICROBATCHES, "schedule": "gpipe", "recompute": "full"}
    return outsize.plan(whole, (), batch(), request=outsize.Request(cluster=cluster, **asked, **wishes))


def streaming(world: World, name: str) -> Step:
    """outsize's engine; with one device the other rank rests."""
    whole, inputs = model(), batch()
    plan = from_host(whole, name)
    if world.rank >= plan.axes.world_size:
        return lambda: torch.zeros(())
    group = world.group if plan.axes.world_size > 1 else None
    engine: Any = make_engine(whole, plan, group, EngineOptions(optimizer=optimizer))
    return lambda: engine.step(**inputs).loss


def device_bytes(plan: outsize.Plan) -> int:
    """What the fullest device holds by the plan: here it has no memory of its own that could be counted."""
    assert plan.expected is not None
    chosen = [degree.peak_bytes for degree in plan.expected.degrees if degree.weights == plan.weights]
    return chosen[0] if chosen else max(stage.peak_bytes for stage in plan.expected.stages)


def peak_bytes(build: Build, counted: Callable[[], int]) -> int:
    """More than before, at the peak of a step after the first two, which make states and buffers."""
    gc.collect()
    before = counted()
    step = build()
    for _ in range(2):
        step()
    gc.collect()
    with MemoryWatch(CPU) as watch:
        step()
    return max(taken for _, taken in watch.readings) - before


def laps(builds: dict[str, Build], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """All of them alive, a step of each in turn."""
    steps = {name: build() for name, build in builds.items()}
    losses = {name: step().item() for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    return {name: found[1:] for name, found in times.items()}, losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    world = join()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[world.rank]})
    torch.set_num_threads(1)
    builds: dict[str, Build] = {"one process": partial(plain, world)}
    builds |= {name: partial(along, axes) for name, axes in AXES.items()}
    builds |= {name: partial(streaming, world, name) for name in ON_HOST}
    counted = reader(CPU)
    peak_bytes(builds["one process"], counted)  # what the process itself needs for a first step
    own = {name: peak_bytes(build, counted) for name, build in builds.items()}
    of_ranks: list[Any] = [None] * world.world_size
    dist.all_gather_object(of_ranks, own)
    times_s, losses = laps(builds, asked.rounds)
    if world.rank == 0:
        peaks = {name: [found[name] for found in of_ranks] for name in builds}
        peaks |= {name: [device_bytes(from_host(model(), name))] for name in ON_HOST}
        asked.out.write_text(json.dumps({"times_s": times_s, "peak_bytes": peaks, "losses": losses}))
    leave(world)


if __name__ == "__main__":
    main()
