"""Odd models that decide, draw and keep state: routing, halting, Python's random numbers, queues.

Features are [n, 12] unless said otherwise; nothing in here knows outsize.
"""

from __future__ import annotations

import random
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, FEATURES, WIDTH = 5, 12, 16


def dense(inside: int = FEATURES, outside: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, WIDTH), nn.GELU(), nn.Linear(WIDTH, outside))


class Experts(nn.Module):
    """Each token goes to its two best experts; where an expert has none, it is skipped."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(dense(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, rank = torch.where(chosen == i)
            if rows.numel() > 0:
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, rank, None])
        share = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        return out, len(self.experts) * (share * scores.mean(0)).sum()


@final
class MixtureOfExperts(nn.Module):
    """Top-2 routing in two layers, with the balancing loss as second output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.first(x), x.new_zeros(())
        for layer in self.layers:
            found, extra = layer(x)
            x, balance = x + found, balance + extra
        return self.last(x), balance


class Clipped(nn.Module):
    """Looks at a value of its activations, and takes another way when it is large."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max().item() > 0.5:
            return torch.tanh(self.large(x))
        return self.small(x)


@final
class InnerBranch(nn.Module):
    """Submodules branch on activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Clipped() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) * 0.7
        return self.last(x)


@final
class RootBranch(nn.Module):
    """The model's own forward branches on activations: an early exit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.early, self.late = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        early = self.early(x)
        if early.softmax(-1).amax(-1).min().item() > 0.9:
            return early
        return self.late(torch.relu(self.second(x)))


class Halting(nn.Module):
    """Adaptive computation time (Graves 2016, arXiv:1603.08983): steps until every sample has halted."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.halt = nn.GRUCell(FEATURES, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state, total = x.new_zeros(len(x), WIDTH), x.new_zeros(len(x), 1)
        out = torch.zeros_like(state)
        ponder = torch.zeros_like(total)
        while bool((total < 0.99).any()) and float(ponder.max()) < 8:
            state = self.cell(x, state)
            p = torch.minimum(self.halt(state).sigmoid(), 1 - total)
            out, total = out + p * state, total + p
            ponder = ponder + (total < 0.99).float() + p
        return out, ponder.mean()


@final
class AdaptiveDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.halting, self.last = nn.LayerNorm(FEATURES), Halting(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found, ponder = self.halting(self.norm(x))
        return self.last(found), 0.01 * ponder


class RandomBlock(nn.Module):
    """Stochastic depth by Python's own random numbers."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.keep, self.inner = keep, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() > self.keep:
            return x
        return x + torch.relu(self.inner(x))


@final
class PythonStochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.Sequential(*(RandomBlock(0.9 - 0.1 * i) for i in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


@final
class RootLayerDrop(nn.Module):
    """The model's own loop drops layers, by torch's and by NumPy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            draw = torch.rand([]).item() if i % 2 else np.random.random()
            if not self.training or draw > 0.4:
                x = x + torch.tanh(layer(x))
        return self.last(x)


class Augment(nn.Module):
    """Noise of the model's own, mixing of samples by a random permutation, dropped paths."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn_like(x)
        x = 0.8 * x + 0.2 * x[torch.randperm(len(x))]
        keep = torch.bernoulli(torch.full((len(x), 1), 0.9))
        return x * keep / 0.9


@final
class NoisyStudent(nn.Module):
    """Many random ops of torch: dropouts of every kind, gumbel softmax, noise, permutations."""

    def __init__(self) -> None:
        super().__init__()
        self.augment, self.codes = Augment(), nn.Parameter(torch.randn(6, WIDTH))
        self.first, self.choose = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 6)
        self.alpha, self.last = nn.AlphaDropout(0.2), nn.Linear(WIDTH, CLASSES)
        self.rrelu = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.alpha(F.selu(self.first(self.augment(x))))
        x = x + F.gumbel_softmax(self.choose(x), tau=0.7, hard=True) @ self.codes
        return self.last(self.rrelu(F.dropout1d(x[:, :, None], 0.3, self.training)[:, :, 0]))


@final
class Distilled(nn.Module):
    """A frozen teacher in eval mode beside the student; the loss is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), nn.Linear(WIDTH, CLASSES)
        )
        self.teacher.requires_grad_(False)
        self.student = dense()

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            wanted = (self.teacher(x) / 2).softmax(-1)
        logits = self.student(x)
        soft = F.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean")
        return {"loss": soft + F.cross_entropy(logits, labels), "logits": logits}


@final
class MomentumPair(nn.Module):
    """BYOL-like: the target network follows the online network by moving averages, inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target, self.predictor = dense(FEATURES, 8), dense(FEATURES, 8), dense(8, 8)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            wanted = self.target(b)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(a)), wanted).mean()


@final
class Queue(nn.Module):
    """MoCo's queue of negatives (He et al. 2019, arXiv:1911.05722): a buffer written at a kept position."""

    queue: Tensor
    position: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = dense(FEATURES, 8)
        self.register_buffer("queue", F.normalize(torch.randn(8, 24), dim=0))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        query, key = F.normalize(self.encoder(a)), F.normalize(self.encoder(b)).detach()
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1) / 0.2
        at = int(self.position)
        self.queue[:, at : at + len(key)] = key.T
        self.position[0] = (at + len(key)) % self.queue.shape[1]
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))


@final
class CarriedState(nn.Module):
    """Keeps its detached hidden state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = self.state if self.state is not None else x.new_zeros(1, WIDTH)
        found = self.cell(x, state.expand(len(x), -1))
        self.state = found.detach().mean(0, keepdim=True)
        return self.last(found)


@final
class HookedFeatures(nn.Module):
    """A forward hook keeps a middle layer's features, which the model's own forward then uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.last = nn.Linear(2 * WIDTH, CLASSES)
        self.kept: dict[str, Tensor] = {}
        self.body[1].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.kept["middle"] = out

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.last(torch.cat([x, self.kept.pop("middle")], -1))


@final
class MixedPrecision(nn.Module):
    """Regions of autocast and of double precision inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(FEATURES, WIDTH), dense(WIDTH, WIDTH)
        self.solve, self.last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.middle(self.first(x))
            with torch.autocast("cpu", enabled=False):
                x = x.float().softmax(-1)
        return self.last(self.solve(x.double()).float())
