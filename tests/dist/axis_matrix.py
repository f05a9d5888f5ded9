"""The matrix of test_axis_matrix.py: axes and pairs of them x schedules x policies of memory x loops.

A cell trains one model over four processes; the judge is PyTorch alone, in one of them: the whole model,
eager, one microbatch after the other.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from experts_worker import Block
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1] / "parity"))

from turns import covering_rows

import outsize
from outsize.policies.weights import RESIDENT, weight_policy
from outsize.schedules.families import LAYER_BY_LAYER, built, family_of

RANKS: Final = 4
SAMPLES, TOKENS, WORDS, WIDTH = 8, 8, 61, 16
REPLICAS: Final = ("dp_replicate", "dp_shard", "ep")
AXES: Final = ("stages", *REPLICAS, "cp", "tp")
LAYOUTS: Final = (*((axis,) for axis in AXES), *combinations(AXES, 2))
POLICIES: Final[dict[str, dict[str, Any]]] = {
    "keep": {"recompute": "none"},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "offload": {"recompute": "offload"},
    "streamed": {"recompute": "streamed"},
    "sharded": {"weights": "sharded"},
    "host": {"weights": "host"},
    "host-optimizer": {"weights": "host-optimizer"},
    "pieces": {"loss_pieces": 2, "module_pieces": 2},
}
LOOPS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.1},
    "accumulated": {},
    "evaluated": {},
}
SCHEDULES: Final = tuple(name for name in built() if family_of(name).trains)
STEPS: Final = 4


@final
@dataclass(frozen=True)
class Cell:
    """One axis of four ranks or two of two; the schedule is that of the stages, where they are an axis."""

    axes: tuple[str, ...]
    schedule: str
    policy: str
    loop: str

    def in_turns(self) -> Cell:
        """The cell, by a schedule in which weights come and go where they lie on hosts."""
        weights = weight_policy(POLICIES[self.policy].get("weights", RESIDENT.name))
        return replace(self, schedule=LAYER_BY_LAYER.name) if weights.on_host else self

    @property
    def name(self) -> str:
        """As tests and their answers call it."""
        return "-".join((*self.axes, *([self.schedule] * ("stages" in self.axes)), self.policy, self.loop))

    @property
    def wishes(self) -> dict[str, Any]:
        """What `plan` is asked for."""
        size = RANKS // len(self.axes)
        mesh = {axis: size for axis in self.axes if axis != "stages"}
        wishes: dict[str, Any] = {"stages": 1, "axes": mesh} | POLICIES[self.policy]
        replicas = size if {*REPLICAS} & {*self.axes} else 1
        wishes["microbatches"] = 4 // (RANKS if {*self.axes} <= {*REPLICAS} else replicas)
        if "stages" in self.axes:
            is_plain = family_of(self.schedule).allows(size, size)
            wishes |= {"schedule": self.schedule, "stages": size if is_plain else 2 * size}
        return wishes


def policies_of(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those that a layout may have: weights are on the hosts of stages alone, and sharded over what shares
    them.
    """
    lacks = {"host", "host-optimizer"} if axes != ("stages",) else set[str]()
    lacks |= set[str]() if {"dp_shard", "cp"} & {*axes} else {"sharded"}
    return tuple(policy for policy in POLICIES if policy not in lacks)


def cells_of(axes: tuple[str, ...]) -> list[Cell]:
    """A covering array: each value of a factor meets each value of each other one."""
    schedules = SCHEDULES if "stages" in axes else ("1f1b",)
    factors: tuple[tuple[Any, ...], ...] = (schedules, policies_of(axes), (*LOOPS,))
    rows = covering_rows(map(len, factors))
    cells = (Cell(axes, *(values[at] for values, at in zip(factors, row, strict=True))) for row in rows)
    return list(dict.fromkeys(each.in_turns() for each in cells))


class Attention(nn.Module):
    """Causal attention of four heads, of which two share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (of(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for of in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Attention, MLPs and experts by turns, a skip over all of it, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        blocks = [part for _ in range(2) for part in (Attention(), Mlp(), Attention(), Block(WIDTH, 4))]
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def made() -> tuple[nn.Module, Tensor, Tensor]:
    """The model in float64, its batch, its labels."""
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (SAMPLES, TOKENS + 1))
    return Decoder().double().train(), ids[:, :-1], ids[:, 1:].contiguous()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def updates(step: int, loop: str) -> bool:
    return loop != "accumulated" or step % 2 == 1


Found = tuple[list[float], dict[str, Tensor]]


def plain(loop: str) -> Found:
    """Losses and last weights of PyTorch alone."""
    model, ids, target = made()
    optimizer, losses = sgd(model.parameters()), list[float]()
    for step in range(STEPS):
        parts = [loss_of(model(x), y) / 4 for x, y in zip(ids.chunk(4), target.chunk(4), strict=True)]
        for part in parts:
            part.backward()
        losses.append(sum(float(part.detach()) for part in parts))
        if updates(step, loop):
            if "clip_norm" in LOOPS[loop]:
                nn.utils.clip_grad_norm_(model.parameters(), LOOPS[loop]["clip_norm"])
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def divided(cell: Cell) -> Found:
    """The same by an engine; weights on rank 0 alone."""
    model, ids, target = made()
    given: dict[str, Any] = {"target": target, "loss_fn": loss_of}
    request = outsize.Request(cluster=f"{RANKS}x12GB", **cell.wishes)
    plan = outsize.plan(model, (ids,), request=request, **given)
    engine = outsize.parallelize(model, (ids,), plan=plan, optimizer=sgd, **given, **LOOPS[cell.loop])
    losses = list[float]()
    for step in range(STEPS):
        if cell.loop == "evaluated":
            engine.evaluate(ids, target=target)
        found = engine.step(ids, target=target, update=updates(step, cell.loop))
        losses.append(float(found.loss))
    state = engine.weights.full_state_dict()
    return losses, {name: state[name] for name in state if name != "head.weight"}


def distance(found: Found, expected: Found) -> float:
    """Of losses, and of weights relative to each one's largest element."""
    apart = [abs(a - b) / abs(b) for a, b in zip(found[0], expected[0], strict=True)]
    return max(
        [*apart, *(float((t - expected[1][n]).abs().max() / t.abs().max()) for n, t in found[1].items())]
    )


def compared(axes: tuple[str, ...], group: dist.ProcessGroup) -> dict[str, float]:
    """How far each cell of a layout is from the judge."""
    expected = {loop: plain(loop) for loop in LOOPS}
    answers = dict[str, float]()
    for cell in cells_of(axes):
        found = divided(cell)
        if group.rank() == 0:
            assert found[1].keys() == expected[cell.loop][1].keys()
        answers[cell.name] = distance(found, expected[cell.loop])
    return answers
