"""One rank of two: `sequence_fuzz_worker.py FOLDER AXIS SEEDS`. Random transformers, with cp or ep.

Attention, positions, masks, norms, experts, losses and the order of blocks are drawn from the seed. The judge
is the same module in this process, in float64, over the same microbatches.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

import outsize
from outsize.errors import BadOption
from outsize.train.world.join import join
from outsize.train.world.world import leave

WORDS = 31


@dataclass(frozen=True)
class Choices:
    """What a seed has drawn."""

    samples: int
    tokens: int
    width: int
    heads: int
    groups: int
    layers: int
    attention: str
    positions: str
    mask: str
    norm: str
    is_post: bool
    mlp: str
    loss: str
    crosses: bool

    @classmethod
    def of(cls, seed: int, axis: str) -> Self:
        draw = random.Random(seed)
        tokens, heads = draw.randint(4, 11), draw.choice((2, 4))
        return cls(
            samples=draw.choice((1, 2, 3, tokens)) if axis == "cp" else draw.choice((2, 4)),
            tokens=tokens,
            width=8 * heads,
            heads=heads,
            groups=draw.choice([g for g in (1, 2, 4) if g <= heads]),
            layers=draw.randint(1, 2),
            attention=draw.choice(("causal", "masked", "eager", "grouped")),
            positions=draw.choice(("table", "counted", "rotary", "bias", "none")),
            mask=draw.choice(("causal", "window", "padded", "packed", "both ways")),
            norm=draw.choice(("layer", "rms", "rms without weights", "by hand")),
            is_post=draw.random() < 0.3,
            mlp="experts"
            if axis == "ep"
            else draw.choice(("gelu", "gated", "experts", "experts with balance")),
            loss=draw.choice(("shifted", "ignored", "counted", "with z-loss")),
            crosses=draw.random() < 0.25,
        )


class NormByHand(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def norm_of(how: str, width: int) -> nn.Module:
    if how == "layer":
        return nn.LayerNorm(width)
    return NormByHand(width) if how == "by hand" else nn.RMSNorm(width, elementwise_affine=how == "rms")


class Attention(nn.Module):
    def __init__(self, c: Choices) -> None:
        super().__init__()
        self.c, self.size = c, c.width // c.heads
        self.q = nn.Linear(c.width, c.width)
        self.k = nn.Linear(c.width, c.groups * self.size, bias=False)
        self.v = nn.Linear(c.width, c.groups * self.size)
        self.out = nn.Linear(c.width, c.width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None, turns: Any) -> Tensor:
        c, (b, t, _), s = self.c, x.shape, memory.shape[1]
        q = self.q(x).view(b, t, c.heads, self.size).transpose(1, 2)
        k = self.k(memory).view(b, s, c.groups, self.size).transpose(1, 2)
        v = self.v(memory).view(b, s, c.groups, self.size).transpose(1, 2)
        if turns is not None:
            q, k = turned(q, *turns), turned(k, *turns)
        if c.attention == "grouped":
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:
            k, v = (each.repeat_interleave(c.heads // c.groups, 1) for each in (k, v))
            if c.attention == "eager":
                scores = q @ k.transpose(2, 3) / self.size**0.5
                y = (scores if mask is None else scores + mask).softmax(-1) @ v
            elif c.attention == "causal" and mask is not None and c.mask == "causal" and t == s:
                y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, c.width))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Experts(nn.Module):
    """Four experts as transformers has them: `[experts, a, b]`, called with tokens, choices and weights."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        hit = functional.one_hot(chosen, self.num_experts).permute(2, 1, 0)
        for expert in hit.sum((-1, -2)).gt(0).nonzero():
            number = expert[0]
            place, token = torch.where(hit[number])
            h = functional.silu(functional.linear(x[token], self.up[number]))
            h = functional.linear(h, self.down[number]) * weights[token, place, None]
            total.index_add_(0, token, h.to(total.dtype))
        return total


class Mlp(nn.Module):
    def __init__(self, c: Choices) -> None:
        super().__init__()
        self.c, self.balance = c, torch.zeros(())
        self.up, self.gate = nn.Linear(c.width, 2 * c.width), nn.Linear(c.width, 2 * c.width)
        self.down = nn.Linear(2 * c.width, c.width)
        if c.mlp.startswith("experts"):
            self.router, self.experts = nn.Linear(c.width, 4, bias=False), Experts(c.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.c.mlp == "gelu":
            return self.down(functional.gelu(self.up(x))), None
        if self.c.mlp == "gated":
            return self.down(functional.silu(self.gate(x)) * self.up(x)), None
        flat = x.reshape(-1, self.c.width)
        shares = self.router(flat).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = self.experts(flat, chosen, weights).view(x.shape)
        if self.c.mlp == "experts":
            return y, None
        used = functional.one_hot(chosen, 4).to(shares.dtype).mean((0, 1))
        return y, (used * shares.mean(0)).sum() * 4


class Block(nn.Module):
    def __init__(self, c: Choices, *, crosses: bool = False) -> None:
        super().__init__()
        self.c = c
        self.attention, self.mlp = Attention(c), Mlp(c)
        self.before, self.between = norm_of(c.norm, c.width), norm_of(c.norm, c.width)
        self.cross, self.ahead = (Attention(c), norm_of(c.norm, c.width)) if crosses else (None, None)

    def forward(
        self, x: Tensor, mask: Tensor | None, turns: Any, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.c.is_post:
            x = self.before(x + self.attention(x, x, mask, turns))
        else:
            h = self.before(x)
            x = x + self.attention(h, h, mask, turns)
        if self.cross is not None and self.ahead is not None and memory is not None:
            x = x + self.cross(self.ahead(x), memory, None, None)
        y, balance = self.mlp(x if self.c.is_post else self.between(x))
        return (self.between(x + y) if self.c.is_post else x + y), balance


class Composed(nn.Module):
    """A language model with its loss inside."""

    def __init__(self, c: Choices) -> None:
        super().__init__()
        self.c = c
        self.words, self.places = nn.Embedding(WORDS, c.width), nn.Embedding(32, c.width)
        self.encoder = Block(c) if c.crosses else None
        self.blocks = nn.ModuleList(Block(c, crosses=c.crosses) for _ in range(c.layers))
        self.last, self.head = norm_of(c.norm, c.width), nn.Linear(c.width, WORDS, bias=False)

    def mask(self, x: Tensor, known: Tensor, parts: Tensor) -> Tensor | None:
        t, c = known.shape[1], self.c
        if c.mask == "both ways":
            return None
        row, column = torch.arange(t)[:, None], torch.arange(t)[None]
        seen = (column <= row)[None, None]
        if c.mask == "window":
            seen = seen & (row - column < 3)[None, None]
        if c.mask == "padded":
            seen = seen & (known[:, None, None] | (row == column)[None, None])
        if c.mask == "packed":
            seen = seen & (parts[:, None, :, None] == parts[:, None, None])
        mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, float("-inf"))
        if c.positions == "bias":
            mask = mask - 0.1 * (row - column).abs().to(x.dtype)
        return mask

    def forward(self, ids: Tensor, labels: Tensor, known: Tensor, parts: Tensor) -> Tensor:
        c, x = self.c, self.words(ids)
        if c.positions == "table":
            x = x + self.places(torch.arange(ids.shape[1]))
        elif c.positions == "counted":
            x = x + self.places((known.long().cumsum(-1) - 1).clamp(min=0))
        turns = None
        if c.positions == "rotary":
            size = c.width // c.heads
            angle = torch.arange(ids.shape[1])[:, None] / 10 ** torch.arange(0, 1, 2 / size)[None]
            angle = torch.cat((angle, angle), -1).to(x.dtype)
            turns = angle.cos(), angle.sin()
        mask, memory = self.mask(x, known, parts), None
        balances = list[Tensor]()
        if self.encoder is not None:
            memory, balance = self.encoder(self.words(ids.flip(1)), None, turns, None)
            balances += [] if balance is None else [balance]
        for block in self.blocks:
            x, balance = block(x, mask, turns, memory)
            balances += [] if balance is None else [balance]
        loss = self.loss(self.head(self.last(x)), labels)
        return loss + 0.01 * sum(balances, torch.zeros((), dtype=x.dtype)) if balances else loss

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        how = self.c.loss
        if how == "shifted":
            return functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
            )
        if how == "ignored":
            return functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100)
        counted = labels >= 0
        each = functional.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
        mean = (each.view(labels.shape) * counted).sum() / counted.sum()
        return mean if how == "counted" else mean + 1e-3 * logits.logsumexp(-1).pow(2).mean()


def batch_of(c: Choices, seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (c.samples, c.tokens), generator=draw)
    known = torch.ones(ids.shape, dtype=torch.bool)
    known[0, -(c.tokens // 3) :] = False
    labels = ids.masked_fill(~known, -100) if c.mask == "padded" else ids.clone()
    parts = (torch.arange(c.tokens) >= c.tokens // 2).long().expand_as(ids).contiguous()
    return {"ids": ids, "labels": labels, "known": known, "parts": parts}


def compared(seed: int, axis: str) -> dict[str, Any]:
    """How far loss and gradients are from the plain module's, or why the model is refused."""
    c = Choices.of(seed, axis)
    torch.manual_seed(seed)
    model, batch = Composed(c), batch_of(c, seed)
    plain = copy.deepcopy(model)
    parts = [batch]
    if axis == "ep":
        half = c.samples // 2
        parts = [{k: v[:half] for k, v in batch.items()}, {k: v[half:] for k, v in batch.items()}]
    losses = [plain(**part) for part in parts]
    counts = [counted(c, part) for part in parts]
    loss = torch.stack([one * count for one, count in zip(losses, counts, strict=True)]).sum() / sum(counts)
    loss.backward()
    asked = outsize.Request(axes={axis: 2}, stages=1, microbatches=1, cluster="2xcpu", recompute="none")
    try:
        engine = outsize.parallelize(model, (), batch, plan=asked)
    except BadOption as refused:
        return {"refused": str(refused), "choices": asdict(c)}
    found = engine.step(**batch, update=False).loss
    assert found is not None
    own = {
        n: engine.weights.whole(n, p.grad) for n, p in engine.weights.named_parameters() if p.grad is not None
    }
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    gaps = {
        n: float((own[n] - p.grad).abs().max()) / max(float(p.grad.abs().max()), 1e-6 * largest)
        for n, p in plain.named_parameters()
        if p.grad is not None
    }
    return {
        "loss": abs(float(found) / float(loss) - 1),
        "gradients": max(gaps.values()),
        "choices": asdict(c),
    }


def counted(c: Choices, part: dict[str, Tensor]) -> int:
    """By what a microbatch's loss is weighted: tokens, or samples where terms count different tokens."""
    if c.loss == "with z-loss":
        return len(part["ids"])
    return int((part["labels"][:, 1:] if c.loss == "shifted" else part["labels"]).ge(0).sum())


def main(folder: Path, axis: str, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    world = join()
    found = {str(seed): compared(seed, axis) for seed in seeds}
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(seed) for seed in sys.argv[3].split(",")])
