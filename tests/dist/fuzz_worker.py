"""One rank of two: `fuzz_worker.py FOLDER SEEDS`. Composed models of tests/parity, a stage on each rank."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from fuzz_cases import Case, differing, plain, plan_of, restore, split
from recorded_once import always_recorded

from outsize.train.world.join import join
from outsize.train.world.world import leave


def main(folder: Path, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    world = join()
    wrong: dict[str, list[str]] = {}
    with always_recorded():
        for seed in seeds:
            case = Case.of(seed, ranks=world.world_size)
            expected, plan = plain(case), plan_of(case)
            if plan.axes.pp == world.world_size:
                numbers, _ = split(case, plan, world.group)
                wrong[str(case)] = differing(expected, numbers)
    restore()
    (folder / f"rank{world.rank}.json").write_text(json.dumps(wrong))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2].split(",")])
