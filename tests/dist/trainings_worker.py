"""One rank of two: `trainings_worker.py FOLDER`. The trainings of tests/parity, a stage on each rank."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from recorded_once import always_recorded
from trainings import TRAININGS, differing

from outsize.train.world.join import join
from outsize.train.world.world import leave


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    world = join()
    with always_recorded():
        wrong = {name: differing(training, world.group) for name, training in TRAININGS.items()}
    (folder / f"rank{world.rank}.json").write_text(json.dumps(wrong))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
