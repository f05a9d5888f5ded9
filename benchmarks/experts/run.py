"""What does dividing experts over two ranks send, how evenly, how fast and how exactly?

python benchmarks/experts/run.py [STEPS]     against FSDP over two ranks and a plain loop in one process

A small Mixtral has two choices, so its tokens are gathered by two ranks; a GPT-OSS with one is dispatched.
Each process has one thread, over gloo, and ranks have 4 of the 8 samples. The layouts take turns, a step of
each and again, so that a busy machine is as busy for all. Bytes are those of the collectives of experts.
Errors are those of the first step's gradients against the same model in float64, relative to a tensor's
largest element: over two ranks, and of a plain loop in float32 over the same microbatches.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave

transformers: Final = import_transformers()
SIZES: Final = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 8,
    "experts_implementation": "eager",
    "pad_token_id": 0,
}
KINDS: Final = {"mixtral": ("Mixtral", 2), "gpt-oss": ("GptOss", 1)}
LAYOUTS: Final[dict[str, dict[str, int]]] = {"ep 2": {"ep": 2}, "dp_shard 2": {"dp_shard": 2}}
SAMPLES, TOKENS, RANKS = 8, 128, 2


def made(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model with random weights, and its batch."""
    name, choices = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, num_experts_per_tok=choices)
    ids = torch.randint(3, SIZES["vocab_size"], (SAMPLES, TOKENS))  # type: ignore[call-overload]
    return getattr(transformers, f"{name}ForCausalLM")(config).train(), {"input_ids": ids, "labels": ids}


def plain_gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of a loop over the microbatches of the two ranks."""
    for part in zip(*(value.chunk(RANKS) for value in batch.values()), strict=True):
        (model(**dict(zip(batch, part, strict=True))).loss / RANKS).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain_step_s(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    """The seconds of a step of one process."""
    start_s = time.perf_counter()
    plain_gradients(model, batch)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start_s


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest distance of a tensor, relative to its largest element; those that are zero but for rounding
    do not count.
    """
    top = max(float(value.abs().max()) for value in exact.values())
    real = {name: value for name, value in exact.items() if float(value.abs().max()) > 1e-7 * top}
    return max(
        float((found[name].double() - value).abs().max() / value.abs().max())
        for name, value in real.items()
        if name in found
    )


def work(folder: Path, steps: int) -> None:
    """Runs every model in every layout; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    world, rows = join(), list[dict[str, Any]]()
    for kind in KINDS:
        rows.append(compared(kind, steps, first=world.rank == 0))
    if world.rank == 0:
        (folder / "measured").write_text(json.dumps(rows))
    leave(world)


def compared(kind: str, steps: int, *, first: bool) -> dict[str, Any]:
    """The seconds, bytes, balance and errors of a model in every layout."""
    model, batch = made(kind)
    engines = {name: parallel(copy.deepcopy(model), batch, axes) for name, axes in LAYOUTS.items()}
    row: dict[str, Any] = {"model": kind, "choices": KINDS[kind][1]}
    found = {name: gradients(engine, batch) for name, engine in engines.items()}
    seconds = {name: list[float]() for name in (*engines, "plain")}
    balance = list[float]()
    calls: Any = engines["ep 2"]._tensor.expert_calls  # type: ignore[union-attr]
    before = dict(calls.sent)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(alone.parameters())
    for _ in range(steps):
        for name, engine in engines.items():
            torch.distributed.barrier()
            start_s = time.perf_counter()
            result = engine.step(**batch)
            seconds[name].append(time.perf_counter() - start_s)
            balance += [] if result.expert_imbalance is None else [result.expert_imbalance]
        torch.distributed.barrier()
        if first:
            seconds["plain"].append(plain_step_s(alone, optimizer, batch))
    row["sent_bytes_a_step"] = {k: (n - before.get(k, 0)) // steps for k, n in calls.sent.items()}
    row["imbalance"] = {"mean": statistics.mean(balance), "most": max(balance)}
    if first:
        exact = plain_gradients(copy.deepcopy(model).double(), batch)
        errors = {"plain": error(plain_gradients(copy.deepcopy(model), batch), exact)}
        row["error_against_float64"] = errors | {name: error(grads, exact) for name, grads in found.items()}
        row["step_s"] = {name: statistics.median(each) for name, each in seconds.items()}
    return row


def parallel(model: nn.Module, batch: dict[str, Any], axes: dict[str, int]) -> outsize.Engine:
    """An engine over both ranks."""
    return outsize.parallelize(
        model, (), batch, optimizer=torch.optim.AdamW, microbatches=1, stages=1, axes=axes
    )


def gradients(engine: outsize.Engine, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients of a first step, whole, on every rank; they are dropped then."""
    engine.step(update=False, **batch)
    own = [(name, p) for name, p in engine.weights.named_parameters() if p.grad is not None]
    found = {name: engine.weights.whole(name, p.grad).clone() for name, p in own if p.grad is not None}
    for _, parameter in own:
        parameter.grad = None
    return found


def main() -> None:
    """Measures, prints the figures and writes them to a file of results."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as place:
        run_in_forks(RANKS, lambda: work(Path(place), steps))
        rows = json.loads((Path(place) / "measured").read_text())
    text = json.dumps(
        {
            "steps": steps,
            "load": os.getloadavg()[0],
            "tokens_a_rank": SAMPLES * TOKENS // RANKS,
            "rows": rows,
        },
        indent=1,
    )
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    day = time.strftime("%Y-%m-%d")
    (results / f"{day}_{platform.machine()}-{sys.platform}.json").write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
