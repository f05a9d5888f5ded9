"""One rank of two: `message_memory_worker.py FOLDER`. How many memories of messages are mapped by a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import outsize
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import leave


class Tied(nn.Module):
    """A table of eight rows that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle = nn.Embedding(8, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [batch, length] in, scores [batch, length, 8] out."""
        return self.head(self.middle(self.table(ids)))


def loss_of(scores: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


def mapped() -> int:
    """Memories that this process shares with its peer."""
    return sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world, model, ids = join(), Tied(), torch.arange(12).remainder(8).view(4, 3)
    plan = outsize.plan(
        model,
        (ids,),
        cluster="2xcpu",
        batch_size=4,
        stages=2,
        microbatches=2,
        schedule="1f1b",
        loss_fn=loss_of,
        target=ids,
    )
    engine: Any = make_engine(model, plan, world.group, EngineOptions(loss_fn=loss_of))
    counts = list[int]()
    for _ in range(8):
        engine.step(ids, target=ids, update=False)
        counts.append(mapped())
    (folder / f"rank{world.rank}.json").write_text(json.dumps(counts))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
