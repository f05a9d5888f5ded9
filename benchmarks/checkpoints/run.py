"""By how much do saves beside the steps delay them? `python benchmarks/checkpoints/run.py` prints a table."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

import outsize

ROUNDS, STEPS, WIDTH, LAYERS = 8, 10, 1024, 8
ROWS = 256, 2048  # of a step that is copied


def main() -> None:
    """Saves after every ten steps and compares the seconds of a save with those of the steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    x = torch.randn(256, WIDTH)
    engine = outsize.parallelize(
        model,
        (x,),
        target=x,
        loss_fn=F.mse_loss,
        stages=2,
        microbatches=4,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )
    folder = tempfile.mkdtemp(prefix="outsize-checkpoints-")
    beside, waiting = [_round(engine, folder, wait=wait) for wait in (False, True)]
    shutil.rmtree(folder)
    copies = [_copies(engine, rows) for rows in ROWS]
    print("10 steps, then a save      median  most, of the steps' seconds")
    print(f"save(wait=False)           {statistics.median(beside):6.1%}  {max(beside):.1%}")
    print(f"save()                     {statistics.median(waiting):6.1%}  {max(waiting):.1%}")
    print("a step, then a copy in memory, of the step's CPU seconds")
    for rows, shares in zip(ROWS, copies, strict=True):
        print(f"{rows:6} rows                {statistics.median(shares):6.1%}  {max(shares):.1%}")


def _round(engine: outsize.Engine, folder: str, *, wait: bool) -> list[float]:
    """Returns the seconds of each save as a share of the steps before it; the first round warms up."""
    x, shares = torch.randn(256, WIDTH), list[float]()
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        for _ in range(STEPS):
            engine.step(x, target=x)
        between = time.perf_counter()
        engine.save(folder, keep=1, wait=wait)
        shares.append((time.perf_counter() - between) / (between - start))
    engine.finish_saving()
    return shares[1:]


def _copies(engine: outsize.Engine, rows: int) -> list[float]:
    """Returns the CPU seconds of each copy in memory as a share of those of the step before it."""
    x, shares = torch.randn(rows, WIDTH), list[float]()
    with tempfile.TemporaryDirectory(prefix="outsize-checkpoints-", dir="/dev/shm") as folder:
        for _ in range(ROUNDS + 1):
            start = time.process_time()
            engine.step(x, target=x)
            between = time.process_time()
            engine.save(folder, keep=1)
            shares.append((time.process_time() - between) / (between - start))
    return shares[1:]


if __name__ == "__main__":
    main()
