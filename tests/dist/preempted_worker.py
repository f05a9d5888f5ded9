"""A run of two ranks that signals ask to end: rank 1's own at step 3, then the launcher's at step 5.

preempted_worker.py FOLDER     trains until step 7 and writes the losses of rank 0, by step
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import outsize


def losses(root: Path | None, stages: int, last: int) -> dict[int, float]:
    """Trains from what `root` has up to step `last`; without a root nothing is saved and no signal comes."""
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
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        resume=root,
    )
    seen: dict[int, float] = {}
    while engine.steps < last:
        seen[engine.steps] = float(engine.step(batch[0], target=batch[1]).loss)
        if root is None:
            continue
        if engine.rank == 0:
            (root.parent / f"losses-{min(seen)}.json").write_text(json.dumps(seen))
        if engine.steps == 3 and engine.rank == 1:
            signal.raise_signal(signal.SIGUSR1)
        if engine.steps == 5 and engine.rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        while engine.steps == 5 and not _asked(engine):
            pass  # until the launcher has passed it on, which takes a moment
        engine.state.checkpoint(root, keep=1)
    return seen


def _asked(engine: outsize.Engine) -> bool:
    saver = engine.state._saver
    return saver is None or saver._preemption.received != 0


if __name__ == "__main__":
    losses(Path(sys.argv[1]) / "run", 2, 7)
