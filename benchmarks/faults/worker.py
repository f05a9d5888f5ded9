"""A training that `run.py` disturbs: `worker.py FOLDER WIDTH LAYERS FAULT`, saved after each step.

Each rank appends `time pid ranks step` to FOLDER/steps-RANK when a step is over. FAULT is what the last rank
does after step 5: `raise`, `leave` or `none`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import outsize

AT = 5


def main(folder: Path, width: int, layers: int, fault: str) -> None:
    """Trains until it is ended."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))
    x = torch.randn(16, width)
    engine = outsize.parallelize(
        model,
        (x,),
        loss_fn=F.mse_loss,
        target=x,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        resume=folder / "run",
    )
    rank, ranks = engine.rank, engine.plan.axes.world_size
    while True:
        engine.step(x, target=x)
        with (folder / f"steps-{rank}").open("a") as file:
            file.write(f"{time.time()} {os.getpid()} {ranks} {engine.steps}\n")
        if engine.steps == AT and rank == ranks - 1 and fault != "none":
            (folder / "fault").write_text(str(time.time()))
            if fault == "raise":
                raise ValueError("an error of the training")
            return
        engine.state.checkpoint(folder / "run", every=1, keep=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
