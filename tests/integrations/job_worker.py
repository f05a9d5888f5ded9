"""A script that a cluster's engine starts, stops by a signal, and starts again.

job_worker.py FOLDER [--signal]   writes `step loss` a line; ten steps where it goes on, else without an end
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import outsize

MORE = 10


def losses(root: Path | None, stages: int | None) -> Iterator[tuple[int, float]]:
    """Yields step and loss; saves after a signal where there is a root."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
    batch = torch.randn(8, 4), torch.randint(0, 3, (8,))
    engine = outsize.parallelize(
        model,
        batch[:1],
        loss_fn=F.cross_entropy,
        target=batch[1],
        stages=stages,
        microbatches=2,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        resume=None if root is None else root / "run",
    )
    while True:
        loss = float(engine.step(batch[0], target=batch[1]).loss)
        if engine.rank == 0:
            yield engine.steps, loss
        else:
            yield -1, loss
        if root is not None:
            engine.state.checkpoint(root / "run", keep=1)


def main(root: Path, *, asks: bool) -> None:
    """Trains until it is asked to end, or ten steps where it goes on; `asks` itself after five."""
    goes_on = (root / "losses").exists()
    for step, loss in islice(losses(root, 2), MORE if goes_on else None):
        if step > 0:
            with (root / "losses").open("a") as file:
                file.write(f"{step} {loss!r}\n")
        if asks and not goes_on and step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0 if goes_on else 0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), asks="--signal" in sys.argv)
