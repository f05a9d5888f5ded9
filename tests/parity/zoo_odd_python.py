"""Odd models in their Python: own objects, caches, counters, logging, matching, sparse and spectral tools.

Features are [n, 12] unless said otherwise; nothing in here knows outsize.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import permutations, starmap
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, FEATURES, WIDTH, VOCABULARY = 5, 12, 16, 128


def dense(inside: int = FEATURES, outside: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outside))


class Sheet:
    """What DETR's NestedTensor and graph libraries' Data are: an object that carries tensors along."""

    def __init__(self, values: Tensor, mask: Tensor) -> None:
        self.values, self.mask = values, mask

    def put(self, values: Tensor) -> Sheet:
        return Sheet(values, self.mask)


class SheetLayer(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inside, outside)

    def forward(self, sheet: Sheet) -> Sheet:
        return sheet.put(torch.relu(self.linear(sheet.values)) * sheet.mask)


@final
class OwnObjects(nn.Module):
    """Submodules take and return objects of a class of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(starmap(SheetLayer, ((FEATURES, WIDTH), (WIDTH, WIDTH))))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        sheet = Sheet(x, (x[:, :1] > -1).float())
        for layer in self.layers:
            sheet = layer(sheet)
        return self.last(sheet.values)


class CachedAttention(nn.Module):
    """Writes its keys into a dictionary that it is given."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.project, self.out = name, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        earlier = [cache[name] for name in sorted(cache)]
        cache[self.name] = k
        keys = torch.stack([k, *earlier]).mean(0)
        return x + self.out((q @ keys.mT).softmax(-1) @ v)


@final
class SharedCache(nn.Module):
    """Layers leave something for later layers in one dictionary; a generator walks over them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({name: CachedAttention(name) for name in "abc"})
        self.last = nn.Linear(3 * WIDTH, CLASSES)

    def states(self, x: Tensor) -> Iterator[Tensor]:
        cache: dict[str, Tensor] = {}
        for layer in self.layers.values():
            x = layer(x, cache)
            yield x.mean(1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.cat(list(self.states(self.embedding(ids))), -1))


@final
class DirectCalls(nn.Module):
    """`forward` called past `__call__`, methods of submodules, functions kept in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.activations = {"soft": partial(F.softplus, beta=2.0), "hard": F.hardswish}

    @torch.no_grad()
    def statistics(self, x: Tensor) -> Tensor:
        return self.encoder.forward(x).std(0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm.forward(self.encoder.forward(x)) + self.statistics(x)
        return self.head.forward(self.activations["hard" if self.training else "soft"](y))


@final
class Annealed(nn.Module):
    """Counts its calls in a Python number and weighs a term by it; keeps a log of values."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = dense(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.calls, self.log = 0, []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        self.calls += 1
        self.log.append(h.mean().item())
        return self.head(h), h.square().mean() * min(1.0, self.calls / 10)


@final
class CountingBuffer(nn.Module):
    """The same with a buffer: a step count and a running mean, read as tensors."""

    steps: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = dense(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x - 0.1)
        self.steps += 1
        self.mean.lerp_(h.detach().mean(0), 0.1)
        weight = (self.steps / 10).clamp(max=1.0)
        return self.head(h - self.mean.clone()), h.square().mean() * weight


@final
class SetPrediction(nn.Module):
    """DETR-like: predictions are matched with targets at the least cost, in Python, and then compared."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, WIDTH))
        self.encoder, self.boxes = dense(FEATURES, WIDTH), nn.Linear(WIDTH, 2)

    def match(self, found: Tensor, wanted: Tensor) -> list[tuple[int, ...]]:
        costs = torch.cdist(found.detach(), wanted).tolist()
        return [
            min(permutations(range(3)), key=lambda p, c=c: sum(c[i][j] for i, j in enumerate(p)))
            for c in costs
        ]

    def forward(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        found = self.boxes(torch.tanh(self.encoder(x)[:, None] + self.queries))
        order = torch.tensor(self.match(found, wanted))
        ordered = wanted.gather(1, order[..., None].expand_as(wanted))
        return {"loss": F.l1_loss(found, ordered), "boxes": found}


@final
class GradientPenalty(nn.Module):
    """WGAN-GP's critic loss (Gulrajani et al. 2017, arXiv:1704.00028): a gradient's norm is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = dense(4, FEATURES), dense(FEATURES, 1)

    def forward(self, real: Tensor) -> dict[str, Tensor]:
        fake = self.generator(torch.randn(len(real), 4)).detach()
        between = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).square().mean()
        return {"loss": self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty}


@final
class AdversarialPair(nn.Module):
    """Generator and discriminator in one forward: the sum of both losses, detached from one another."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = dense(4, FEATURES), dense(FEATURES, 1)

    def forward(self, real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        fake = self.generator(noise)
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        theirs = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        frozen = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        ours = F.softplus(-torch.func.functional_call(self.discriminator, frozen, (fake,))).mean()
        return {"loss": theirs + ours}


@final
class SparseGraph(nn.Module):
    """Graph convolution on a fixed sparse adjacency matrix, a buffer."""

    adjacency: Tensor

    def __init__(self, nodes: int = 6) -> None:
        super().__init__()
        ring = torch.eye(nodes) + torch.eye(nodes).roll(1, 0)
        self.register_buffer("adjacency", (ring / 2).to_sparse())
        self.layers = nn.ModuleList([nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)])

    def forward(self, nodes: Tensor) -> Tensor:
        x = nodes
        for layer in self.layers:
            x = layer(x).transpose(0, 1)
            mixed = torch.sparse.mm(self.adjacency, x.flatten(1)).view_as(x)
            x = torch.tanh(mixed).transpose(0, 1)
        return x.mean(1)


@final
class Spectrogram(nn.Module):
    """Audio through STFT, a learned mask, and back."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(32), persistent=False)
        self.mask = nn.GRU(17, 17, batch_first=True)
        self.mix = nn.Linear(17, 17)

    def forward(self, audio: Tensor) -> Tensor:
        spectrum = torch.stft(audio, 32, 8, window=self.window, return_complex=True)
        mask = self.mix(self.mask(spectrum.abs().mT)[0]).sigmoid().mT
        return torch.istft(spectrum * mask, 32, 8, window=self.window, length=audio.shape[-1])


@final
class GaussianProcess(nn.Module):
    """The negative log likelihood of a Gaussian process on deep features: Cholesky and triangular solves."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.noise = dense(FEATURES, 4), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.features(x)
        kernel = torch.exp(-torch.cdist(h, h).square()) + F.softplus(self.noise) * torch.eye(len(x))
        lower = torch.linalg.cholesky(kernel)
        half = torch.linalg.solve_triangular(lower, y[:, None], upper=False)
        return (half.square().sum() / 2 + lower.diagonal().log().sum()) / len(x)


@final
class OwnGenerator(nn.Module):
    """Random features from a generator of the model's own, and a seed set inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        waves = torch.randn(FEATURES, WIDTH, generator=generator)
        return self.last(torch.cat([torch.relu(self.first(x)), torch.cos(x @ waves)], -1))


@final
class CarefulForward(nn.Module):
    """Asserts, a NaN guard, formatted values, and questions about the modes around it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = dense(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        assert x.ndim == 2, f"want two dims, got {x.shape}"
        h = self.body(x)
        if torch.isnan(h).any():
            raise ValueError(f"not a number among {h}")
        scores = self.head(h)
        if torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
            scores = scores * 1.5
        assert scores.abs().max() < 1e6
        return scores


@final
class SecondTry(nn.Module):
    """Tries a layer that does not fit, and takes another when it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow = nn.Linear(FEATURES, WIDTH), nn.Linear(3, CLASSES)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        try:
            return self.narrow(h)
        except RuntimeError:
            return self.last(h)


@final
class TransformerDecoderOnly(nn.Module):
    """nn.TransformerDecoder with a learned memory, packed into one tensor of several streams."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.memory = nn.Parameter(torch.randn(1, 3, WIDTH))
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, ids: Tensor) -> Tensor:
        n, length = ids.shape
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        out = self.decoder(self.embedding(ids), self.memory.expand(n, -1, -1), tgt_mask=future)
        return out @ self.embedding.weight.T


def weight_drop(module: nn.Module, inputs: Any) -> None:
    """Drops single weights of a recurrent layer (AWD-LSTM), as a hook before each call."""
    module.weight_hh = F.dropout(module.weight_hh_raw, 0.3, module.training)  # pyright: ignore


@final
class WeightDrop(nn.Module):
    """A cell whose recurrent weight is made anew by a hook before each call."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        raw = self.cell.weight_hh
        del self.cell.weight_hh
        self.cell.register_parameter("weight_hh_raw", nn.Parameter(raw.data))
        self.cell.weight_hh = raw.data
        self.cell.register_forward_pre_hook(weight_drop)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        state = torch.zeros(len(ids), WIDTH)
        for word in self.embedding(ids)[:, :4].unbind(1):
            state = self.cell(word, state)
        return self.last(state)
