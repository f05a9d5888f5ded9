"""Question: how long is a step whose microbatches have lengths that none had before, against the plain loop?

python benchmarks/varlen/new_lengths.py              one process of two stages, one thread, about two minutes

A is the plain loop over the same microbatches, B the split model in one process; they step in turns, A B A B,
and no length comes twice. The first three steps stand apart: recordings, and the one in which lengths are
followed, are in them. Beside it: B over lengths that it has met, which says what new ones cost.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import outsize

TARGET = 1.3
MICROBATCHES, SAMPLES, FIRST_STEPS = 4, 2, 3


def model_of(layers: int, width: int) -> Any:
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def batch_of(length: int) -> Any:
    """Two padded sequences."""
    ids = torch.randint(3, 1000, (SAMPLES, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[1, length - length // 4 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return outsize.microbatch(input_ids=ids, attention_mask=mask, labels=labels)


def plain_step(model: Any, optimizer: torch.optim.Optimizer, parts: list[Any]) -> None:
    """The loop that a user would write; its losses are means of microbatches, which takes as long."""
    for part in parts:
        (model(**part.kwargs).loss / len(parts)).backward()
    optimizer.step()
    optimizer.zero_grad()


def measured(layers: int, width: int, steps: int) -> dict[str, Any]:
    """Seconds of each step, by arm."""
    plain = model_of(layers, width)
    split = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    example = batch_of(64)
    engine = outsize.parallelize(
        split, (), {name: tensor.repeat(4, 1) for name, tensor in example.kwargs.items()}, stages=2,
        microbatches=MICROBATCHES, cluster="2xcpu", optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
    )  # fmt: skip
    order = torch.randperm(steps * MICROBATCHES, generator=torch.Generator().manual_seed(1)) + 48
    lengths = order.view(steps, MICROBATCHES).tolist()
    seconds: dict[str, list[float]] = {"plain": [], "split, new lengths": [], "split, known lengths": []}
    for row in lengths:
        parts = [batch_of(n) for n in row]
        for arm, times in seconds.items():
            begin = time.perf_counter()
            if arm == "plain":
                plain_step(plain, optimizer, parts)
            else:
                engine.step(parts)
            times.append(time.perf_counter() - begin)
    return {"layers": layers, "width": width, "lengths": lengths, "times_s": seconds}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Ratios step by step, behind the first three steps and in them."""
    times = found["times_s"]

    def ratios(arm: str, steps: slice) -> dict[str, float]:
        pairs = zip(times[arm][steps], times["plain"][steps], strict=True)
        values = sorted(a / b for a, b in pairs)
        return {"median": median(values), "least": values[0], "most": values[-1]}

    behind = slice(FIRST_STEPS, None)
    return {
        "new_over_plain": ratios("split, new lengths", behind),
        "known_over_plain": ratios("split, known lengths", behind),
        "first_steps_s": times["split, new lengths"][:FIRST_STEPS],
        "plain_step_s": median(times["plain"]),
        "target": TARGET,
    }


def main() -> None:
    """Measures, prints and writes the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "results" / "new_lengths.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    models = {f"{n} x {w}": measured(n, w, asked.steps) for n, w in ((4, 256), (16, 256))}
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "load": os.getloadavg()[0],
        "summary": {name: summary(found) for name, found in models.items()},
        "models": models,
    }
    asked.into.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
