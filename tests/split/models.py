"""Small models, each with another thing that a cut has to keep: skips, statistics, ties, several outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

WIDTH, TOKENS, WORDS, CLASSES = 16, 9, 31, 4


def mlp() -> nn.Module:
    """Four layers in a row; the widths differ, so that no two weights have the same shape."""
    layers = (nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 12), nn.GELU())
    return nn.Sequential(*layers, nn.Linear(12, CLASSES))


@final
class Block(nn.Module):
    """Attention of two heads and a feed-forward layer, with dropout behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.after, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropped, self.left = nn.Dropout(0.2), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropped(self.out(mixed))
        return x + self.left(self.down(F.gelu(self.up(self.after(x)))))


def transformer() -> nn.Module:
    """Two blocks between a projection and a head: [batch, TOKENS, 8] to [batch, TOKENS, CLASSES]."""
    return nn.Sequential(
        nn.Linear(8, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
    )


@final
class Residual(nn.Module):
    """Two convolutions with statistics of the batch, added to their input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.one, self.two = nn.BatchNorm2d(6), nn.BatchNorm2d(6, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.two(self.second(torch.relu(self.one(self.first(x))))))


def resnet() -> nn.Module:
    """Two residual blocks: [batch, 3, 6, 6] to [batch, CLASSES]."""
    stem = (nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    return nn.Sequential(
        *stem, Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES)
    )


def gpt2() -> nn.Module:
    """GPT-2 of transformers: the head's weight is that of the embedding."""
    config = GPT2Config(vocab_size=WORDS, n_positions=12, n_embd=WIDTH, n_layer=2, n_head=2, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0  # those of the real one are not in this vocabulary
    return GPT2LMHeadModel(config)


def mixtral() -> nn.Module:
    """Mixtral of transformers: four experts in each of two layers, of which a token has two."""
    of_experts: dict[str, Any] = {"experts_implementation": "eager"}  # a keyword of any config
    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        use_cache=False,
        **of_experts,
    )
    return MixtralForCausalLM(config)


@final
class UNet(nn.Module):
    """Two levels; what the way down has computed is read again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.down = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 10, 3, stride=2, padding=1)
        self.bottom, self.norm = nn.Conv2d(10, 10, 3, padding=1), nn.GroupNorm(2, 10)
        self.up, self.merge = nn.ConvTranspose2d(10, 6, 2, stride=2), nn.Conv2d(12, 6, 3, padding=1)
        self.out = nn.Conv2d(9, CLASSES, 1)

    def forward(self, image: Tensor) -> Tensor:
        high = torch.relu(self.into(image))
        low = self.bottom(self.norm(torch.relu(self.down(high))))
        merged = torch.relu(self.merge(torch.cat([self.up(low), high], 1)))
        return self.out(torch.cat([merged, image], 1))


@final
class Towers(nn.Module):
    """Two towers whose features meet late; the second one's input may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, WIDTH))
        self.alone = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 14), nn.GELU(), nn.Linear(14, CLASSES))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        features = self.left(x)
        features = self.alone(features) if other is None else features * self.right(other)
        return self.head(features)


@final
class Norms(NamedTuple):
    """A part of the outputs: of the first layer's features, and of the last one's."""

    early: Tensor
    late: Tensor


@final
@dataclass
class Answer:
    """Outputs of several stages, a dict and a tuple in it, and a number without a dim for samples."""

    logits: Tensor
    features: dict[str, Tensor]
    norms: Norms
    balance: Tensor
    width: int = WIDTH


@final
class Several(nn.Module):
    """Returns what an early stage has computed beside what the last one has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 20)
        self.third, self.fourth = nn.Linear(20, 18), nn.Linear(18, CLASSES)

    def forward(self, x: Tensor) -> Answer:
        early = torch.tanh(self.first(x))
        middle = torch.tanh(self.second(early))
        late = torch.tanh(self.third(middle))
        norms = Norms(early.square().sum(1), late.square().sum(1))
        return Answer(self.fourth(late), {"early": early, "middle": middle}, norms, middle.square().mean())


@final
class Twice(nn.Module):
    """A weight that is used twice in a row, and an input that the first and the last layer read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.middle = (
            nn.Linear(8, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.late, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH + 8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.again(torch.tanh(self.again(h))))
        h = torch.tanh(self.middle(h))
        h = torch.tanh(self.late(torch.tanh(self.late(h))))
        return self.last(torch.cat([h, x], 1))


@final
class Shared(nn.Module):
    """One layer twice in each of four blocks, so that several stages use its weights several times each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = h + block(torch.tanh(self.layer(torch.tanh(self.layer(h)))))
        return self.last(h)


@final
class Recurrent(nn.Module):
    """Two GRUs, each of which torch computes on a CPU step by step in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(8, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.middle, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.first(x)
        h, _ = self.second(torch.tanh(self.middle(h)))
        return self.last(h)


@final
class Checkpointed(nn.Module):
    """Recomputes two of its parts in the backward, as the user has written it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(8, WIDTH), nn.Linear(WIDTH, CLASSES), reentrant
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for part in self.parts:
            h = h + checkpoint(part, h, use_reentrant=self.reentrant)
        return self.last(h)
