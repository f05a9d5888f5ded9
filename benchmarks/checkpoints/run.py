"""By how much do saves beside the steps delay them? `python benchmarks/checkpoints/run.py` prints a table."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import outsize

ROUNDS, STEPS, WIDTH, LAYERS = 8, 10, 1024, 8
COPIED_ROWS, COPIED_ROUNDS, COPIED_STEPS = (256, 1024), 6, 2  # of steps that are copied


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
    copies = [_copies(engine, rows) for rows in COPIED_ROWS]
    print("10 steps, then a save      median  most, of the steps' seconds")
    print(f"save(wait=False)           {statistics.median(beside):6.1%}  {max(beside):.1%}")
    print(f"save()                     {statistics.median(waiting):6.1%}  {max(waiting):.1%}")
    print("a copy in memory after each step, of the steps' CPU seconds without copies")
    for rows, (shares, copy_s) in zip(COPIED_ROWS, copies, strict=True):
        figures = f"{statistics.median(shares):6.1%}  {max(shares):.1%}  {statistics.median(copy_s):.4f} s"
        print(f"{rows:6} rows                {figures} a copy")


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
    engine.state.finish_saving()
    return shares[1:]


def _copies(engine: outsize.Engine, rows: int) -> tuple[list[float], list[float]]:
    """Returns by how much rounds of steps with copies take longer than rounds without, and the CPU seconds of
    a copy; rounds alternate, and the first ones warm up.
    """
    x, shares, copy_s = torch.randn(rows, WIDTH), list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="outsize-checkpoints-", dir="/dev/shm") as memory:
        for _ in range(COPIED_ROUNDS + 1):
            without_s = _steps_s(engine, x, None)
            with_s = _steps_s(engine, x, Path(memory))
            shares.append(with_s / without_s - 1)
            copy_s.append((with_s - without_s) / COPIED_STEPS)
    return shares[1:], copy_s[1:]


def _steps_s(engine: outsize.Engine, x: torch.Tensor, memory: Path | None) -> float:
    """Returns the CPU seconds of some steps, each with a copy where there is a folder for it."""
    start = time.process_time()
    for _ in range(COPIED_STEPS):
        engine.step(x, target=x)
        if memory is not None:
            engine.state._copy(memory)  # as `outsize run --ranks peer_copies=1` lets it do
    return time.process_time() - start


if __name__ == "__main__":
    main()
