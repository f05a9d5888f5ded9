"""The models of the question, each with a batch and a loss: unmodified, with seeded random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.models.imports import import_torchvision, import_transformers
from outsize.train.batch.batch import Batch


@final
@dataclass(frozen=True)
class Case:
    """A model, its batch of `batch.size` samples, and into how many microbatches it is split."""

    model: nn.Module
    batch: Batch
    loss_fn: Callable[..., Tensor]
    microbatches: int


@final
class UNet(nn.Module):
    """Ronneberger et al., arXiv 1505.04597, with padding and BatchNorm; skips cross the whole network."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, 3, height, width] in, logits [batch, classes, height, width] out."""
        skips = []
        for block in self.down[:-1]:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def double(inputs: int, outputs: int) -> nn.Module:
    """Two convolutions with BatchNorm and ReLU."""
    return nn.Sequential(*layer(inputs, outputs), *layer(outputs, outputs))


def layer(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    """One of them."""
    return (
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def resnet50(samples: int, side: int, microbatches: int) -> Case:
    """torchvision's ResNet-50 on square images."""
    torch.manual_seed(0)
    model = import_torchvision().models.resnet50().train()
    x, y = torch.randn(samples, 3, side, side), torch.randint(0, 1000, (samples,))
    return Case(model, Batch((x,), {}, (y,)), F.cross_entropy, microbatches)


def unet(samples: int, side: int, microbatches: int) -> Case:
    """A U-Net of four levels on square images."""
    torch.manual_seed(0)
    x, y = torch.randn(samples, 3, side, side), torch.randint(0, 8, (samples, side, side))
    return Case(UNet(32, 4, 8).train(), Batch((x,), {}, (y,)), F.cross_entropy, microbatches)


def gpt2(samples: int, length: int, microbatches: int, **sizes: int) -> Case:
    """transformers' GPT-2 of these sizes; 124 M parameters, as published, without any."""
    sizes = {"n_positions": length, "bos_token_id": 0, "eos_token_id": 0, **sizes}
    config = import_transformers().GPT2Config(**sizes)
    torch.manual_seed(0)
    model = import_transformers().GPT2LMHeadModel(config).train()
    ids = torch.randint(0, config.vocab_size, (samples, length))
    batch = Batch((), {"input_ids": ids, "use_cache": False}, (torch.roll(ids, -1, 1),))
    return Case(model, batch, next_token, microbatches)


def next_token(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of logits [batch, length, classes] against [batch, length]."""
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


CASES: dict[str, Callable[[], Case]] = {
    "resnet50-24x96x96": lambda: resnet50(24, 96, 4),
    "resnet50-64x128x128": lambda: resnet50(64, 128, 8),
    "gpt2-8-layers": lambda: gpt2(16, 256, 4, n_layer=8, n_embd=256, n_head=4, vocab_size=256),
    "gpt2-124M": lambda: gpt2(8, 128, 4),
    "unet": lambda: unet(16, 128, 4),
}
