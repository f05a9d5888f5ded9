"""One pinned rank: a length-skewed set, as it is and padded, through one pipeline, in turns (A B C A B C).

Rank 0 writes one JSON: seconds of every step of each arm, tokens, losses, and what capturing took.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.train.world.join import join
from outsize.train.world.world import leave

MOST, BUCKET, SEQUENCES, MICROBATCHES, STEPS = 256, 16, 2, 16, 4
WIDTH, LAYERS, WORDS = 192, 4, 1024
Step = list[list[int]]  # true lengths of the sequences of each microbatch


def lengths() -> list[int]:
    """A skewed set with mean / max = 0.5: most are short or middling, a few long ones set the maximum."""
    draw = torch.Generator().manual_seed(0)
    count = SEQUENCES * MICROBATCHES * STEPS
    raw = torch.randn(count, generator=draw).mul(0.45).exp()
    raw = (raw / raw.max()).pow(0.5)
    power = next(p / 100 for p in range(10, 400) if float(raw.pow(p / 100).mean()) <= 0.5)
    found = (raw.pow(power) * MOST).round().clamp(8, MOST).int().tolist()
    found[0] = MOST
    return found


def steps() -> list[Step]:
    """Neighbours in length share a microbatch; which microbatches make a step is drawn."""
    ordered = sorted(lengths())
    groups = [ordered[n : n + SEQUENCES] for n in range(0, len(ordered), SEQUENCES)]
    shuffled = torch.randperm(len(groups), generator=torch.Generator().manual_seed(1)).tolist()
    return [[groups[n] for n in shuffled[k::STEPS]] for k in range(STEPS)]


def tokens_of(step: Step, k: int) -> list[list[Tensor]]:
    """The sequences themselves: the same in every arm."""
    draw = torch.Generator().manual_seed(100 + k)
    return [[torch.randint(0, WORDS, (n,), generator=draw) for n in group] for group in step]


def padded(sequences: Sequence[Tensor], length: int) -> dict[str, Tensor]:
    """[sequences, length]; what is behind a sequence's end does not count."""
    ids = torch.zeros(len(sequences), length, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = labels[row, : len(sequence)] = sequence
    return {"input_ids": ids, "labels": labels}


def arms(step: Step, k: int) -> dict[str, list[Any]]:
    """The same tokens, each microbatch in its bucket, all as long as the step's longest, all as the set's."""
    data = tokens_of(step, k)
    longest = max(n for group in step for n in group)

    def of(length: Callable[[Sequence[Tensor]], int]) -> list[Any]:
        return [outsize.microbatch(**padded(group, length(group))) for group in data]

    return {
        "as it is": of(lambda group: -(-max(map(len, group)) // BUCKET) * BUCKET),
        "padded to the step's longest": of(lambda group: longest),
        "padded to the set's longest": of(lambda group: MOST),
    }


def model() -> nn.Module:
    transformers: Any = import_transformers()
    torch.manual_seed(0)
    how = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": MOST}
    size = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "vocab_size": WORDS}
    config = transformers.GPT2Config(**size, **how, loss_type="ForCausalLM")
    return transformers.GPT2LMHeadModel(config)


def measure(rounds: int) -> dict[str, Any]:
    everything = [arms(step, k) for k, step in enumerate(steps())]
    example = padded([torch.zeros(MOST // 2, dtype=torch.int64)] * SEQUENCES * MICROBATCHES, MOST // 2)
    engine = outsize.parallelize(
        model(), (), example, cluster="2xcpu", stages=2, microbatches=MICROBATCHES, schedule="1f1b"
    )
    start = time.perf_counter()
    losses: dict[str, list[float]] = {}
    for step in everything:
        for arm, parts in step.items():
            losses.setdefault(arm, []).append(float(engine.step(parts, update=False).loss))
    first_s = time.perf_counter() - start
    times: dict[str, list[float]] = {arm: [] for arm in losses}
    for _ in range(rounds):
        for step in everything:
            for arm, parts in step.items():
                dist.barrier()
                start = time.perf_counter()
                engine.step(parts, update=False)
                dist.barrier()
                times[arm].append(time.perf_counter() - start)
    real = [sum(n for group in step for n in group) for step in steps()]
    made = [sum(part.kwargs["input_ids"].numel() for part in step["as it is"]) for step in everything]
    shapes = {tuple(part.kwargs["input_ids"].shape) for step in everything for part in step["as it is"]}
    found = lengths()
    return {
        "mean_over_max": sum(found) / len(found) / max(found),
        "tokens": real,
        "tokens_in_buckets": made,
        "shapes": len(shapes),
        "first_pass_s": first_s,
        "times_s": times,
        "losses": losses,
        "stages": [stage.units for stage in engine.plan.stages],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    world = join()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    torch.set_num_threads(1)
    found = measure(asked.rounds)
    if world.rank == 0:
        asked.out.write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main()
