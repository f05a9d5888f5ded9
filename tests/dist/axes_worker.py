"""One rank of two: models that no pipeline of two small devices holds: planned as it comes, trained, checked.

`axes_worker.py FOLDER` leaves FOLDER/rank<r>.json, by model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import outsize
from outsize.errors import NoFeasiblePlan
from outsize.ir.cluster import make_cluster
from outsize.train.world.join import join
from outsize.train.world.world import leave

WORDS, WIDTH, CLASSES, STEPS = 4096, 16, 8, 3
Found = dict[str, Any]


class Tagger(nn.Module):
    """Nearly all weights are in one table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return self.head(x + self.down(torch.relu(self.up(x)))).mean(1)


class Filter(nn.Module):
    """Nearly all weights are in one convolution, which tp leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64)
        self.wide, self.head = nn.Conv2d(64, 64, 4), nn.Linear(64, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.wide(torch.relu(self.norm(self.first(image)))).flatten(1))


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def plain(
    kind: type[nn.Module], x: Tensor, tags: Tensor, parts: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The loop of one process over as many parts of the batch."""
    model = built(kind)
    optimizer, losses = adamw(model.parameters()), list[float]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for part, wanted in zip(x.chunk(parts), tags.chunk(parts), strict=True):
            loss = nn.functional.cross_entropy(model(part), wanted) * len(part) / len(x)
            loss.backward()
            losses[-1] += float(loss)
        optimizer.step()
    return losses, dict(model.named_parameters())


def tried(kind: type[nn.Module], x: Tensor, kib: int) -> Found:
    """Planned for two devices of so much memory, trained, and on rank 0 compared."""
    tags, cluster = torch.arange(len(x)) % CLASSES, make_cluster("2xcpu", "cpu", 1, 2, kib << 10)
    asked: Found = {"loss_fn": nn.functional.cross_entropy, "target": tags}
    try:
        outsize.plan(built(kind), (x,), cluster=cluster, axes="pp", **asked)
        refused = ""
    except NoFeasiblePlan as error:
        refused = str(error)
    plan = outsize.plan(built(kind), (x,), cluster=cluster, **asked)
    engine = outsize.parallelize(built(kind), (x,), plan=plan, optimizer=adamw, **asked)
    losses = [float(engine.step(x, target=tags).loss) for _ in range(STEPS)]
    state = engine.weights.full_state_dict()
    wanted, weights = plain(kind, x, tags, plan.microbatches * plan.axes.replicas)
    off = [float((state[name] - one).abs().max()) for name, one in weights.items() if state]
    return {
        "refused": refused,
        "why": [reason.code for reason in plan.why],
        "axes": plan.axes.model_dump(),
        "loss_off": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
        "weights_off": max(off, default=0.0),
    }


def main(folder: Path) -> None:
    world = join("cpu")
    torch.manual_seed(1)
    found = {
        "tagger": tried(Tagger, torch.randint(WORDS, (8, 4)), 2300),
        "filter": tried(Filter, torch.randn(8, 3, 4, 4).double(), 2600),
    }
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
