"""Models with branches, and splits of them that are no runs of their own order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import narrow_resnet18
from zoo_models import UNet

from outsize.capture.graph.build import Captured, build_graph
from outsize.capture.recording.fallbacks import record
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_units
from outsize.ir.stage_graph import summed
from outsize.planner.costs.stage_edges import edges_among, flows
from outsize.schedules.builders import written
from outsize.schedules.compose import compose
from outsize.schedules.job import Job, StageCost
from outsize.train.batch.batch import Batch, as_target
from outsize.train.check.compare import PlainLoop, TrainingSnapshot, reference_snapshot

CLASSES = 5


@final
class Fusion(nn.Module):
    """Two towers, each with an input of its own, fused late."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (narrow_resnet18(classes=16) for _ in range(2))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(a), self.right(b)], dim=1))


@final
class Siamese(nn.Module):
    """One tower, twice; the difference of what it says is judged."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.tower(a) - self.tower(b)).abs())


@final
class VisionText(nn.Module):
    """An image encoder and a text encoder; every pair of a batch is scored."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten()
        )
        self.project = nn.Linear(72, 12)
        self.words = nn.Embedding(20, 12)
        self.text = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 2, 24, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(24, CLASSES)

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        seen = F.normalize(self.project(self.vision(image)), dim=-1)
        read = self.words(tokens)
        for layer in self.text:
            read = layer(read)
        read = F.normalize(read.mean(1), dim=-1)
        return self.head(torch.cat([seen * self.scale.exp(), read], dim=1))


@final
class Inception(nn.Module):
    """A block of four branches that are put together, twice, as in GoogLeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2)
        self.blocks = nn.ModuleList(_Block(width) for width in (8, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


@final
class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(width, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.three = nn.Sequential(
            nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        )
        self.five = nn.Sequential(nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 5, padding=2), nn.ReLU())
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(width, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


def _images(n: int, size: int = 16, seed: int = 3) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def _features(n: int, seed: int) -> Tensor:
    return torch.randn(n, 12, generator=torch.Generator().manual_seed(seed))


def _tokens(n: int) -> Tensor:
    return torch.randint(0, 20, (n, 6), generator=torch.Generator().manual_seed(4))


def _classes(n: int) -> Tensor:
    return torch.arange(n) % CLASSES


Example = tuple[tuple[Any, ...], Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Example]]] = {
    "fusion": (Fusion, lambda n: ((_images(n, 32), _images(n, 32, 9)), _classes(n))),
    "siamese": (Siamese, lambda n: ((_features(n, 1), _features(n, 2)), _classes(n))),
    "vision-text": (VisionText, lambda n: ((_images(n), _tokens(n)), _classes(n))),
    "inception": (Inception, lambda n: ((_images(n),), _classes(n))),
    "unet": (UNet, lambda n: ((_images(n, 32),), torch.arange(n * 32 * 32).view(n, 32, 32) % CLASSES)),
}


def built(name: str) -> nn.Module:
    """The model with its first weights."""
    torch.manual_seed(0)
    return MODELS[name][0]()


def by_name(graph: ModelGraph, stages: Sequence[str]) -> list[int]:
    """A stage has the units that begin with one of its words, `left right`; the last one has the rest."""
    table = {word: stage for stage, words in enumerate(stages) for word in words.split()}
    return [
        next((stage for word, stage in table.items() if unit.name.startswith(word)), len(stages) - 1)
        for unit in graph.units
    ]


def at_random(graph: ModelGraph, stages: int, draw: random.Random) -> list[int]:
    """Any split that `check_quotient` lets pass, most of them far from runs."""
    owners: list[int] = []
    before: dict[int, list[int]] = {}
    for value in graph.values:
        for user in value.consumers:
            before.setdefault(user, []).append(value.producer)
    for _, users in summed(graph):
        for place, user in enumerate(users[1:]):
            before.setdefault(user, []).append(users[place])
    for unit in range(len(graph.units)):
        low = max((owners[other] for other in before.get(unit, ())), default=0)
        owners.append(
            min(low + draw.choice((0, 0, 0, 0, 1, 2)), stages - 1) if low else draw.randrange(stages)
        )
    return [sorted(set(owners)).index(stage) for stage in owners]


def plan_of(
    graph: ModelGraph,
    owners: Sequence[int],
    batch_size: int,
    microbatches: int,
    schedule: ScheduleName = "1f1b",
) -> Plan:
    """Stage s on rank s."""
    count = max(owners) + 1
    units = [[u for u, stage in enumerate(owners) if stage == s] for s in range(count)]
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{count}xcpu",
        axes=Axes(pp=count),
        batch_size=batch_size,
        microbatches=microbatches,
        schedule=schedule,
        stages=stages_from_units(graph, units, [f"cpu:{s}" for s in range(count)]),
    )


def composed(
    graph: ModelGraph,
    owners: Sequence[int],
    ranks: Sequence[int],
    batch_size: int,
    microbatches: int,
    draw: random.Random,
) -> Plan:
    """The stages on these ranks under a schedule for random seconds, by a rule that is drawn, too."""
    plan = plan_of(graph, owners, batch_size, microbatches)
    edges = edges_among(flows(graph), owners.__getitem__)
    costs = [StageCost(draw.random(), 2 * draw.random() + 1, draw.random()) for _ in ranks]
    forward, backward = (
        dict.fromkeys(sizes, 0.1) for sizes in ({**edges.forward, **edges.step}, edges.backward)
    )
    room = (draw.choice((len(ranks), 99)),) * (max(ranks) + 1)
    job = Job(tuple(ranks), microbatches, tuple(costs), forward, backward, (1,) * len(ranks), room)
    found = draw.choice(compose(job))
    stages = (
        s.model_copy(update={"device": f"cpu:{rank}"}) for s, rank in zip(plan.stages, ranks, strict=True)
    )
    return plan.model_copy(
        update={
            "cluster": f"{max(ranks) + 1}xcpu",
            "axes": Axes(pp=max(ranks) + 1),
            "schedule": "auto",
            "actions": written(found.schedule),
            "stages": tuple(stages),
        }
    )


# Stage by stage the words with which its units begin; the last stage has the rest.
SPLITS = {
    "fusion": ("left", "right", "head"),
    "siamese": ("tower.0#0 tower.1#0 tower.2#0 tower.3#0 tower.4#0", "tower", "head"),
    "vision-text": ("words text.0 text.1", "vision project", "head"),
    "inception": ("stem blocks.0.one blocks.0.three.0 blocks.0.five.0", "blocks.0", "blocks.1", "head"),
}
BATCH_SIZE, STEPS, SEED = 8, 2, 3
LOSS = nn.CrossEntropyLoss()


def batch_of(name: str) -> Batch:
    """The model's batch with its target."""
    args, target = MODELS[name][1](BATCH_SIZE)
    return Batch(args, {}, as_target(target))


@cache
def captured(name: str, microbatches: int) -> Captured:
    """The model at the size of one microbatch."""
    part, model = batch_of(name).split(microbatches)[0], built(name)
    return build_graph(record(model, part.args, part.kwargs, LOSS, part.target), model)


@cache
def reference(name: str, microbatches: int) -> TrainingSnapshot:
    """The plain loop."""
    tape = captured(name, microbatches).tape
    loop = PlainLoop(microbatches, LOSS, steps=STEPS, seed=SEED)
    return reference_snapshot(built(name), tape, batch_of(name), loop)
