"""One rank of two: `gradient_storage_worker.py FOLDER TURNS`: gradients of sharing ops, by schedule."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from test_gradient_storage import SHARING, batch, built, plain_gradients, plan_of

from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import leave

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def differing(name: str, schedule: str, group: Any) -> list[str]:
    """This rank's own parameters whose gradients are not those of the plain loop."""
    expected = plain_gradients(name, 1, 2)
    plan = plan_of(name, schedule, 1, ranks=2)
    engine: Any = make_engine(built(name), plan, group, EngineOptions(loss_fn=F.mse_loss))
    inputs, target = batch(1)
    for _ in range(2):
        engine.step(*inputs, target=target, update=False)
    own = dict(engine.weights.named_parameters())
    assert own
    return [key for key, parameter in own.items() if not torch.equal(parameter.grad, expected[key])]


def main(folder: Path, turns: int) -> None:
    """With 4 turns each operation meets one schedule, with 1 each."""
    torch.set_num_threads(1)
    world = join()
    wrong = {
        f"{schedule}, {name}": differing(name, schedule, world.group)
        for number, schedule in enumerate(SCHEDULES)
        for name in list(SHARING)[number % turns :: turns]
    }
    (folder / f"rank{world.rank}.json").write_text(json.dumps(wrong))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
