"""A run whose number of ranks changes: its losses by step, and faults that ranks inflict on themselves.

elastic_worker.py FOLDER LAST KILLS [SECONDS [EVERY]]     trains up to step LAST, SECONDS longer in each step;
                                                          KILLS, `3:1,6:0`: at step 3 rank 1 kills itself;
                                                          saves after EVERY steps (1)

Each kill happens once, in whichever attempt comes first to its step. Rank 0 appends `step ranks loss` to
FOLDER/losses when a step is over. The loader shuffles, so that its position counts, too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outsize

SAMPLES, BATCH = 48, 8


def train(
    folder: Path | None, last: int, kills: dict[int, int], step_s: float = 0.0, every: int = 1
) -> list[str]:
    """Trains up to step `last` and returns a line for each step; without a folder nothing is saved."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    model = nn.Sequential(*layers)
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.randint(0, 3, (SAMPLES,)))
    x, y = data[:BATCH]
    engine = outsize.parallelize(
        model,
        (x,),
        loss_fn=F.cross_entropy,
        target=y,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        resume=None if folder is None else folder / "run",
    )
    if folder is not None:
        written = folder / f"{os.getpid()}.written"
        written.write_text(str(os.getpid()))
        written.replace(folder / f"pid-{engine.rank}")  # whoever reads it finds a number
    sampler = engine.batch_sampler(data, shuffle=True)
    batches = engine.state.batches(DataLoader(data, batch_sampler=sampler))
    seen: list[str] = []
    for epoch in range(batches.epoch, 1_000_000):
        sampler.set_epoch(epoch)
        for x, y in batches:
            loss = float(engine.step(x, target=y).loss)
            seen.append(f"{engine.steps} {engine.plan.axes.world_size} {loss.hex()}")
            if folder is not None:
                if engine.rank == 0:
                    with (folder / "losses").open("a") as file:
                        file.write(f"{seen[-1]}\n")
                if (
                    kills.get(engine.steps) == engine.rank
                    and not (folder / f"killed-{engine.steps}").exists()
                ):
                    (folder / f"killed-{engine.steps}").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.state.checkpoint(folder / "run", every=every, keep=2)
                time.sleep(step_s)
            if engine.steps == last:
                engine.state.finish_saving()
                return seen
    raise AssertionError


def kills_in(text: str) -> dict[int, int]:
    """Returns the rank that dies at each step, of `3:1,6:0`."""
    return {int(step): int(rank) for step, _, rank in (one.partition(":") for one in text.split(",") if one)}


if __name__ == "__main__":
    step_s, every = [*sys.argv[4:], *("0", "1")[len(sys.argv) - 4 :]]
    train(Path(sys.argv[1]), int(sys.argv[2]), kills_in(sys.argv[3]), float(step_s), int(every))
