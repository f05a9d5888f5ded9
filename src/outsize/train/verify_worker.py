"""One rank of `check --processes`: load the question, run this rank's stage, leave the numbers in a file."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from outsize.capture.providers import import_torchvision
from outsize.train.launch import join, leave
from outsize.train.parallel import make_engine
from outsize.train.parity import adamw, engine_snapshot


def main(folder: Path) -> None:
    """Run as `python -m outsize.train.verify_worker FOLDER` under a launcher."""
    if (folder / "torchvision").exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the asking process has said it
            import_torchvision()
    world = join()
    question = torch.load(folder / "question.pt", weights_only=False)
    model, batch, loss_fn, plan, steps, seed, threads = question
    torch.set_num_threads(threads)  # as many as the reference had, so that kernels add up in the same parts
    engine = make_engine(model, plan, world.group, loss_fn=loss_fn, optimizer=adamw, seed=seed)
    snapshot = engine_snapshot(engine, batch, steps=steps)
    torch.save(snapshot, folder / f"rank{world.rank}.pt")
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
