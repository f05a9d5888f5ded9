"""Runs a program up to its first `Trainer.train()`, and so many updates of it, for `outsize check --trainer`.

    outsize check --trainer "train.py --lr 1e-4" --stages 2 --processes
      FOLDER both 2 {"stages": 2} train.py --lr 1e-4     on every rank, where forks of it can compute
      FOLDER plain 2 {"stages": 2} train.py --lr 1e-4    else in one process: its trainer plain, and it ends
      FOLDER split 2 {"stages": 2} train.py --lr 1e-4    and on every rank, split
    what the runs have written to the folder is compared (train/check/trainers.py)

Any trainer that derives from transformers' is taken, wherever it is made. Generators of Python and numpy,
which begin by chance, begin alike in two runs, and on other ranks unlike those of rank 0, as in any run;
torch's begin alike everywhere.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from outsize.errors import BadOption
from outsize.integrations.split_options import named_options
from outsize.integrations.trainers import split_trainers
from outsize.integrations.transformers import Trainer
from outsize.ops.launch.worker import execute
from outsize.train.check.trainers import RunFiles, check_trainer
from outsize.train.world.join import is_first_rank


def main(arguments: Sequence[str]) -> None:
    """Runs `FOLDER both|plain|split UPDATES OPTIONS [-m] TARGET ARGS...`; what it prints goes to stderr.

    Raises BadOption for a program that ends without a call of a trainer's `train`.
    """
    folder, how, updates, options, *program = arguments
    files = RunFiles(Path(folder))

    def train(trainer: Trainer, *_: Any, **__: Any) -> None:
        del Trainer.train
        rank = dist.get_rank() if dist.is_initialized() else 0
        if how != "both":
            run = trainer.observed(int(updates), split=how == "split")
            run.save(files.rank(rank) if run.plan else files.plain)
        else:
            verdict = check_trainer(trainer, int(updates))
            if rank == 0:
                files.told.write_text(verdict.to_json(), encoding="utf-8")
        sys.exit(0)

    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    seed = 0 if is_first_rank() else 1
    random.seed(seed)
    np.random.seed(seed)
    split_trainers(**named_options(json.loads(options)))
    Trainer.train = train  # pyright: ignore[reportAttributeAccessIssue]
    is_module = program[0] == "-m"
    execute("module" if is_module else "script", program[is_module:])
    raise BadOption(
        f"{program[is_module]} has ended, and no trainer of transformers was trained by trainer.train()",
        next_step="call trainer.train() of a class that derives from transformers.Trainer",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
