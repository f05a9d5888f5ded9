"""Five small models of the usual kinds, made of torch's own layers, each with a batch and a loss.

Together they have what is hard about a split: a weight that the first and the last layer share, skips over
the whole depth, running statistics, attention and recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES: Final = 16
TOKENS: Final = 32
WORDS: Final = 96
PIXELS: Final = 16


@final
@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Builds a model of some width, always with the same weights, and its batch (input, target)."""

    name: str
    make: Callable[[int], nn.Module]
    make_batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]

    def build(self, width: int) -> nn.Module:
        """Returns a new model on the CPU."""
        torch.manual_seed(0)
        return self.make(width)

    def batch(self, width: int) -> tuple[Tensor, Tensor]:
        """Returns a batch on the CPU, of SAMPLES samples along dim 0."""
        return self.make_batch(width, torch.Generator().manual_seed(1))


def _perceptron(width: int) -> nn.Module:
    return nn.Sequential(
        *(m for _ in range(6) for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()))
    )


def _convolutions(width: int) -> nn.Module:
    def block(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(block(3), *(block(width) for _ in range(3)), *head)


@final
class _Skips(nn.Module):
    """Joins the value of each layer of the first half to that of its mirror image in the second half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3 if n == 0 else width, width, 3, padding=1) for n in range(3))
        self.up = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (N, 3, H, W) to images of the same shape."""
        skips = list[Tensor]()
        for layer in self.down:
            x = F.silu(layer(x))
            skips.append(x)
        for layer in self.up:
            x = F.silu(layer(torch.cat([x, skips.pop()], 1)))
        return self.head(x)


@final
class _TiedTransformer(nn.Module):
    """Predicts words with the table that embeds them: the first and the last layer share a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.zeros(TOKENS, width))
        heads = max(1, width // 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """Maps words (N, TOKENS) to logits (N, TOKENS, WORDS)."""
        x = self.words(words) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@final
class _Recurrent(nn.Module):
    """Reads a sequence with two recurrent layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.LSTM(width, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Maps sequences (N, TOKENS, width) to logits (N, 10)."""
        x, _ = self.first(x)
        x, _ = self.second(x)
        return self.head(x[:, -1])


def _word_loss(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def _words(_width: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (SAMPLES, TOKENS + 1), generator=draw)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def _images(_width: int, draw: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, 3, PIXELS, PIXELS, generator=draw)


def _classes(draw: torch.Generator) -> Tensor:
    return torch.randint(10, (SAMPLES,), generator=draw)


PERCEPTRON: Final = DeviceModel(
    "perceptron",
    _perceptron,
    lambda width, draw: (
        torch.randn(SAMPLES, width, generator=draw),
        torch.randn(SAMPLES, width, generator=draw),
    ),
    F.mse_loss,
)
CONVOLUTIONS: Final = DeviceModel(
    "convolutions", _convolutions, lambda width, draw: (_images(width, draw), _classes(draw)), F.cross_entropy
)
SKIPS: Final = DeviceModel(
    "skips", _Skips, lambda width, draw: (_images(width, draw), _images(width, draw)), F.mse_loss
)
TIED: Final = DeviceModel("tied_transformer", _TiedTransformer, _words, _word_loss)
RECURRENT: Final = DeviceModel(
    "recurrent",
    _Recurrent,
    lambda width, draw: (torch.randn(SAMPLES, TOKENS, width, generator=draw), _classes(draw)),
    F.cross_entropy,
)


@final
class _Residual(nn.Module):
    """A convolution as residual networks have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (N, width, H, W) to images of the same shape."""
        return F.relu(x + self.norm(self.convolution(x)))


@final
class _Decoder(nn.Module):
    """A layer of a decoder as GPT-2 has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps sequences (N, T, width) to sequences of the same shape."""
        heads = self.qkv(self.before(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


@final
@dataclass(frozen=True, slots=True)
class Block:
    """A module of some width that maps a tensor to one of its shape, and the shape without its samples."""

    make: Callable[[int], nn.Module]
    shape: Callable[[int], tuple[int, ...]]


BLOCKS: Final = {
    "decoder": Block(_Decoder, lambda width: (TOKENS, width)),
    "residual": Block(_Residual, lambda width: (width, PIXELS, PIXELS)),
}


def stacked(block: Block, depth: int) -> DeviceModel:
    """Returns a model of `depth` equal blocks."""

    def batch(width: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = torch.randn(2, SAMPLES, *block.shape(width), generator=draw)
        return x, y

    return DeviceModel(
        "stacked", lambda width: nn.Sequential(*(block.make(width) for _ in range(depth))), batch, F.mse_loss
    )


MODELS: Final = (PERCEPTRON, CONVOLUTIONS, SKIPS, TIED, RECURRENT)
