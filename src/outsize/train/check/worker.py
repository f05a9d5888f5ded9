"""Runs one rank of `check --processes`: loads the question, runs this rank's stage, writes the numbers to
a file.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from outsize.capture.models.imports import import_torchvision
from outsize.train.batch.loss_weights import UnknownShares
from outsize.train.check.compare import adamw, engine_snapshot
from outsize.train.engine.factory import make_engine
from outsize.train.engine.options import EngineOptions
from outsize.train.launch.launch import join, leave


def main(folder: Path) -> None:
    """Runs as `python -m outsize.train.check.worker FOLDER` under a launcher."""
    if (folder / "torchvision").exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the process that asks has shown the warning
            import_torchvision()
    world = join()
    question = torch.load(folder / "question.pt", weights_only=False)
    model, batch, loss_fn, plan, steps, seed, threads = question
    torch.set_num_threads(threads)  # as in the reference, so that kernels sum in the same parts
    engine = make_engine(model, plan, world.group, EngineOptions(loss_fn=loss_fn, optimizer=adamw, seed=seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownShares)  # the verdict notes it, with numbers
        snapshot = engine_snapshot(engine, batch, steps=steps)
    torch.save(snapshot, folder / f"rank{world.rank}.pt")
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
