"""Runs that are saved under one layout and go on under another, against runs that nobody interrupts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.capture.graph.build import Captured, build_graph
from outsize.capture.recording.fallbacks import record
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.policies.activations import Recompute
from outsize.policies.weights import Weights
from outsize.train.batch.batch import Batch
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

BATCH, MICROBATCHES, STEPS = 8, 4, 4
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Perceptron(nn.Module):
    """Running statistics, dropout, a frozen layer, and a weight that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(16, 4)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.norm(self.a(x))))
        return self.head(self.drop(torch.tanh(self.b(self.frozen(hidden)))))


class Transformer(nn.Module):
    """Tied embeddings, two blocks, and a buffer that the state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        layer = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.1, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.randn(5, 8), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


MODELS: dict[str, type[nn.Module]] = {"perceptron": Perceptron, "transformer": Transformer}


def batches(model: str, steps: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(7)
    if model == "perceptron":
        inputs = [torch.randn(BATCH, 6, generator=draw) for _ in range(steps)]
        return [Batch((x,), {}, (torch.randint(0, 4, (BATCH,), generator=draw),)) for x in inputs]
    ids = [torch.randint(0, 16, (2, BATCH, 5), generator=draw) for _ in range(steps)]
    return [Batch((one[0],), {}, (one[1],)) for one in ids]


def loss_of(model: str) -> Any:
    return F.cross_entropy if model == "perceptron" else token_loss


def fresh(model: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[model]()


def by_dims(optimizer: type[Optimizer], **how: Any) -> MakeOptimizer:
    """Two groups, as weight decay has them."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        known = list(parameters)
        flat = [p for p in known if p.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": [p for p in known if p.ndim > 1], "weight_decay": 0.1}]
        return optimizer([*groups, {"params": flat}], **how)

    return make


def of(optimizer: type[Optimizer], **how: Any) -> MakeOptimizer:
    return lambda parameters: optimizer(parameters, **how)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": of(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "plain-sgd": of(torch.optim.SGD, lr=0.05),
    "adamw": by_dims(torch.optim.AdamW, lr=1e-2),
    "adamw-foreach": by_dims(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw-fused": by_dims(torch.optim.AdamW, lr=1e-2, fused=True),
    "adam-amsgrad": of(torch.optim.Adam, lr=torch.tensor(1e-2), amsgrad=True),
    "adafactor": of(torch.optim.Adafactor, lr=1e-2),
    "rmsprop": of(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": of(torch.optim.Adagrad, lr=1e-2),
    "nadam": of(torch.optim.NAdam, lr=1e-2),
    "asgd": of(torch.optim.ASGD, lr=1e-2),
    "rprop": of(torch.optim.Rprop, lr=1e-3),
}


@final
@dataclass(frozen=True)
class Layout:
    """Cuts between units, which rank runs each stage, a schedule, and where weights stay."""

    bounds: tuple[int, ...]
    ranks: int
    schedule: ScheduleName
    weights: Weights | None = None
    recompute: Recompute = "none"


@cache
def captured(model: str) -> Captured:
    found, part = fresh(model), batches(model, 1)[0].split(MICROBATCHES)[0]
    return build_graph(record(found, part.args, part.kwargs, loss_of(model), part.target), found)


def random_layout(model: str, draw: random.Random) -> Layout:
    """Any exact layout of one process."""
    units = len(captured(model).graph.units)
    stages = draw.randint(1, min(4, units))
    bounds = (0, *sorted(draw.sample(range(1, units), stages - 1)), units)
    weights: list[Weights | None] = [None, None, None, "host", "host-optimizer"]
    where = draw.choice(weights)
    if where is not None:
        return Layout(bounds, 1, "gpipe", where, "full")
    if stages == 4 and draw.random() < 0.5:
        return Layout(bounds, 2, "interleaved")
    recompute: Recompute = draw.choice(["none", "full"])
    return Layout(bounds, stages, draw.choice(["gpipe", "1f1b", "zero-bubble"]), recompute=recompute)


def plan_of(model: str, layout: Layout) -> Plan:
    graph, ranks = captured(model).graph, layout.ranks
    devices = tuple(f"cpu:{stage % ranks}" for stage in range(len(layout.bounds) - 1))
    where: dict[str, Any] = {} if layout.weights is None else {"weights": layout.weights}
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{ranks}xcpu",
        axes=Axes(pp=ranks),
        batch_size=BATCH,
        microbatches=MICROBATCHES,
        schedule=layout.schedule,
        stages=stages_from_bounds(graph, layout.bounds, devices),
        recompute=layout.recompute,
        **where,
    )


def engine_of(model: str, layout: Layout, optimizer: str) -> Engine:
    options = EngineOptions(loss_fn=loss_of(model), optimizer=OPTIMIZERS[optimizer], seed=5)
    engine = make_engine(fresh(model), plan_of(model, layout), None, options)
    engine.prepare(batches(model, 1)[0])
    return engine


def train(engine: Engine, parts: Iterable[Batch]) -> list[Tensor]:
    return [engine.step(*b.args, target=b.target[0]).loss for b in parts]


def state_of(engine: Engine) -> dict[str, Any]:
    """Weights, buffers, and states of the optimizer by name."""
    found: dict[str, Any] = dict(engine.model.named_parameters()) | dict(engine.model.named_buffers())
    names = {id(p): name for name, p in engine.model.named_parameters()}
    assert engine.optimizer is not None
    for weight, state in engine.optimizer.state.items():
        found |= {f"{names[id(weight)]}/{key}": value for key, value in state.items()}
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in {**one, **other} if not _same(one.get(name), other.get(name))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def resumed_differs(
    model: str, optimizer: str, layouts: tuple[Layout, Layout], uninterrupted: Layout, folder: Path
) -> list[str]:
    """Returns what is not as in a run that nobody interrupts: losses, weights, buffers, states."""
    parts = batches(model, STEPS)
    whole = engine_of(model, uninterrupted, optimizer)
    losses = train(whole, parts)
    first = engine_of(model, layouts[0], optimizer)
    early = train(first, parts[: STEPS // 2])
    first.save(folder)
    second = engine_of(model, layouts[1], optimizer)
    assert second.state.resume(folder) == STEPS // 2
    late = train(second, parts[STEPS // 2 :])
    pairs = enumerate(zip([*early, *late], losses, strict=True))
    wrong = [f"loss {number}" for number, pair in pairs if not _same(*pair)]
    return wrong + differences(state_of(second), state_of(whole))
