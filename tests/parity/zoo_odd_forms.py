"""Odd forms of input and output: optional and keyword inputs, named tuples, dataclasses, nested containers.

Features are [n, 12] unless said otherwise; nothing in here knows outsize.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, FEATURES, WIDTH = 5, 12, 16


def dense(inside: int = FEATURES, outside: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outside))


class Heads(NamedTuple):
    """Scores, and features when they were asked for."""

    scores: Tensor
    features: Tensor | None
    nothing: None = None


@final
class NamedHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = dense(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, *, with_features: bool = False) -> Heads:
        x = self.body(x)
        return Heads(self.head(x), x if with_features else None)


@dataclass
class Found:
    """Output with a loss inside, and what no gradient flows to."""

    loss: Tensor
    scores: Tensor
    names: list[str]
    count: int
    extra: dict[str, Tensor | None]


@final
class DataclassOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = dense(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Found:
        scores = self.head(torch.relu(self.body(x)))
        loss = F.cross_entropy(scores, labels, label_smoothing=0.1)
        return Found(loss, scores, ["a", "b"], len(x), {"best": scores.argmax(-1), "none": None})


@final
class NestedOutput(nn.Module):
    """Tuples in lists in dicts; one value twice, one input handed through."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = dense(), dense()

    def forward(self, x: Tensor) -> dict[str, Any]:
        a, b = self.left(x), self.right(x)
        return {"pair": (a, [b, (a + b, None)]), "again": a, "input": x, "size": x.shape[-1]}


@final
class OptionalInputs(nn.Module):
    """Arguments that may be None, a nested dict of inputs, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.joint = nn.Linear(FEATURES, WIDTH), nn.Linear(8, WIDTH), dense(WIDTH)

    def forward(
        self, inputs: dict[str, Tensor | None], mask: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        text, image = inputs.get("text"), inputs.get("image")
        x = self.text(text) if text is not None else 0
        if image is not None:
            x = x + self.image(image)
        if mask is not None:
            x = x * mask
        return self.joint(x if scale is None else x * scale)


@final
class Routed(nn.Module):
    """A ModuleDict routed by a keyword; the other heads stay without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(FEATURES, WIDTH)
        self.heads = nn.ModuleDict(
            {"classify": dense(WIDTH), "regress": dense(WIDTH, 1), "unused": dense(WIDTH, 2)}
        )

    def forward(self, *, x: Tensor, tasks: tuple[str, ...]) -> dict[str, Tensor]:
        x = self.body(x)
        return {task: self.heads[task](x) for task in tasks}


@final
class Triplet(nn.Module):
    """A Siamese encoder called three times, triplet loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)
        )
        self.criterion = nn.TripletMarginLoss(margin=0.5)

    def forward(self, anchor: Tensor, same: Tensor, other: Tensor) -> Tensor:
        a, b, c = (F.normalize(self.encoder(x), dim=-1) for x in (anchor, same, other))
        return self.criterion(a, b, c)


@final
class Contrastive(nn.Module):
    """CLIP-like: two encoders, a learned temperature, every sample against all others of its microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = dense(FEATURES, 8), dense(FEATURES, 8)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        scores = a @ b.T * self.temperature.exp()
        return scores, scores.T


@final
class SharedGraph(nn.Module):
    """Submodules called several times, in turns, some under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.alias, self.order = self.a, nn.ModuleList([self.b, self.a, self.b])
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.norm(self.a(x) + self.b(x))
        for layer in self.order:
            x, y = y, self.norm(x + torch.tanh(layer(y)))
        return self.last(self.alias(y) * x)


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = torch.relu(self.message(torch.cat([nodes[source], nodes[target]], -1)))
        return self.update(torch.zeros_like(nodes).index_add(0, target, sent), nodes)


@final
class GraphNetwork(nn.Module):
    """Graphs of equal size as a batch: nodes in one long list, edges shifted, messages added by index."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(4, WIDTH), nn.ModuleList(MessagePassing() for _ in range(2))
        self.last = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        n, size, _ = nodes.shape
        source, target = (edges + torch.arange(n)[:, None, None] * size).permute(2, 0, 1).flatten(1)
        x = self.embed(nodes).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, source, target)
        graph = torch.arange(n).repeat_interleave(size)
        total = x.new_zeros(n, WIDTH).index_add_(0, graph, x)
        best = x.new_full((n, WIDTH), -9.0).scatter_reduce(0, graph[:, None].expand_as(x), x, "amax")
        return self.last(torch.cat([total / size, best], -1))


@final
class LowRankAdapters(nn.Module):
    """A frozen body with trained low-rank additions; a learned scalar and a frozen embedding table."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            [nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)]
        )
        self.body.requires_grad_(False)
        self.down = nn.ParameterList([torch.randn(n, 2) / 4 for n in (FEATURES, WIDTH, WIDTH)])
        self.up = nn.ParameterList([torch.randn(2, n) / 4 for n in (WIDTH, WIDTH, CLASSES)])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer, down, up in zip(self.body, self.down, self.up, strict=True):
            x = torch.tanh(layer(x) + self.scale * (x @ down @ up))
        return x


@final
class MixtureDensity(nn.Module):
    """The output is a torch distribution's log-likelihood, with arguments checked as by default."""

    def __init__(self) -> None:
        super().__init__()
        self.body = dense(FEATURES, 3 * 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights, mean, scale = self.body(x).chunk(3, -1)
        mixture = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=weights),
            torch.distributions.Normal(mean, F.softplus(scale) + 1e-3),
        )
        return -mixture.log_prob(y).mean()


@torch.jit.script
def fused_gate(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.tanh(y) + 0.1 * x


@final
class Scripted(nn.Module):
    """A scripted function and a scripted submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.tail = torch.jit.script(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(fused_gate(self.a(x), self.b(x)))


@final
class SetMatching(nn.Module):
    """Sorting, ranking and soft pooling of a set; then distances of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.lift, self.last = nn.Linear(4, 1), nn.Linear(4, WIDTH), nn.Linear(WIDTH + 9, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        order = self.score(points).squeeze(-1).sort(dim=-1, descending=True)
        best = (
            points.gather(1, order.indices[:, :3, None].expand(-1, -1, 4))
            * order.values[:, :3, None].sigmoid()
        )
        lifted = self.lift(points)
        pooled = (lifted * lifted.norm(dim=-1, keepdim=True).softmax(1)).sum(1)
        return self.last(torch.cat([pooled, torch.cdist(best, best + 0.1).flatten(1)], -1))


@final
class TimeSeries(nn.Module):
    """Forecasts from a list of series of several lengths, normalised by their own statistics and back."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleDict({str(n): nn.Linear(n, WIDTH) for n in (8, 12)})
        self.mix = nn.Conv1d(2, 1, 3, padding=1, padding_mode="circular")
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, series: list[Tensor]) -> Tensor:
        means = [s.mean(-1, keepdim=True) for s in series]
        spread = torch.stack([s.std(-1, keepdim=True) for s in series]).mean(0) + 1e-5
        found = [self.scales[str(s.shape[-1])](s - m) for s, m in zip(series, means, strict=True)]
        mixed = self.mix(torch.stack(found, dim=1)).squeeze(1)
        return self.last(F.glu(torch.cat([mixed, mixed.flip(-1)], -1))) * spread + sum(means)
