"""The networks of the question, smaller than in the papers so that one core can time them, each with a loss.

    resnet101    torchvision's, as it is                     96 x 96 pixels instead of 224 x 224
    amoebanet    AmoebaNet-D (18, 256): 18 normal cells      128 x 128, not 224 x 224; 64 filters, not 256
    unet         U-Net (5, 64): 5 convolutions a level       96 x 96, not 192 x 192; 16 channels, not 64

AmoebaNet-D: Real et al., arXiv 1802.01548, fig. 5 and its authors' released code, which GPipe measures
(arXiv 1811.06965, table 2). U-Net (B, C): Kim et al., arXiv 2004.09910 (torchgpipe), sec. 4.2: five levels, B
convolutions in each, C channels after the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.models.imports import import_torchvision
from outsize.train.batch.batch import Batch


@final
@dataclass(frozen=True)
class Case:
    """A model, its batch of `batch.size` samples, and into how many microbatches it is split."""

    model: nn.Module
    batch: Batch
    loss_fn: Callable[..., Tensor]
    microbatches: int


# -- AmoebaNet-D ------------------------------------------------------------------------------------------

# A cell adds up pairs of (state, op): state 0 is the last cell's result, 1 that of the one before, and each
# pair makes another state. What is concatenated at the end is listed behind.
Pairs = tuple[tuple[tuple[int, str], tuple[int, str]], ...]
NORMAL: Final[Pairs] = (
    ((1, "1x1"), (1, "max")),
    ((1, "none"), (0, "1x7")),
    ((0, "1x1"), (0, "1x7")),
    ((2, "max"), (2, "none")),
    ((1, "average"), (5, "1x1")),
)
REDUCING: Final[Pairs] = (
    ((0, "max2"), (0, "max")),
    ((2, "none"), (1, "3x3")),
    ((2, "1x7"), (2, "max")),
    ((3, "none"), (1, "max2")),
    ((2, "average"), (3, "1x1")),
)
JOINED_NORMAL, JOINED_REDUCING = (0, 3, 4, 6), (4, 5, 6)


@final
class AmoebaNetD(nn.Module):
    """A stem, two reducing cells, then three groups of normal cells with reducing cells between them."""

    def __init__(self, normal_cells: int, filters: int, classes: int) -> None:
        super().__init__()
        width = filters // 4
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width)
        )
        self.cells = nn.ModuleList(_cells(normal_cells // 3, width))
        self.head = nn.Linear(len(JOINED_NORMAL) * 16 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, 3, height, width] in, logits [batch, classes] out."""
        before = last = self.stem(x)
        for cell in self.cells:
            before, last = last, cell(last, before)
        return self.head(F.adaptive_avg_pool2d(last, 1).flatten(1))


def _cells(group: int, width: int) -> Iterator[nn.Module]:
    before = last = width
    halved = False
    for reducing in (True, True, *[False] * group, True, *[False] * group, True, *[False] * group):
        width *= 2 if reducing else 1
        yield Cell(last, before, width, reducing=reducing, halved=halved)
        before, last = last, width * len(JOINED_REDUCING if reducing else JOINED_NORMAL)
        halved = reducing


@final
class Cell(nn.Module):
    """One cell; `halved`: the last one was reducing, so the one before is twice as wide and high."""

    def __init__(self, last: int, before: int, width: int, *, reducing: bool, halved: bool) -> None:
        super().__init__()
        self.last = nn.Sequential(*_convolution(last, width, 1))
        self.before = Halving(before, width) if halved else nn.Sequential(*_convolution(before, width, 1))
        self.pairs = REDUCING if reducing else NORMAL
        self.joined = JOINED_REDUCING if reducing else JOINED_NORMAL
        steps = [2 if reducing and state < 2 else 1 for pair in self.pairs for state, _ in pair]
        names = [name for pair in self.pairs for _, name in pair]
        self.ops = nn.ModuleList(_op(name, width, step) for name, step in zip(names, steps, strict=True))

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        states = [self.last(last), self.before(before)]
        ops = iter(self.ops)
        for (one, _), (other, _) in self.pairs:
            states.append(next(ops)(states[one]) + next(ops)(states[other]))
        return torch.cat([states[n] for n in self.joined], 1)


@final
class Halving(nn.Module):
    """Half the width and height without a pool: two strided 1x1 convolutions, one of them a pixel aside."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.here = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.aside = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        moved = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat([self.here(x), self.aside(moved)], 1))


def _op(name: str, width: int, step: int) -> nn.Module:
    pools = {
        "max": nn.MaxPool2d(3, step, 1),
        "max2": nn.MaxPool2d(2, step),
        "average": nn.AvgPool2d(3, step, 1),
    }
    if name in pools:
        return pools[name]
    if name == "none":
        return nn.Identity() if step == 1 else Halving(width, width)
    if name == "1x1":
        return nn.Sequential(*_convolution(width, width, 1, step))
    narrow = width // 4
    wide = [(3, 3)] if name == "3x3" else [(1, 7), (7, 1)]
    steps = [step] if name == "3x3" else [(1, step), (step, 1)]
    between = [m for size, s in zip(wide, steps, strict=True) for m in _convolution(narrow, narrow, size, s)]
    return nn.Sequential(*_convolution(width, narrow, 1), *between, *_convolution(narrow, width, 1))


Size = int | tuple[int, int]


def _convolution(inputs: int, outputs: int, size: Size, step: Size = 1) -> tuple[nn.Module, ...]:
    rows, columns = (size, size) if isinstance(size, int) else size
    padding = rows // 2, columns // 2
    layer = nn.Conv2d(inputs, outputs, (rows, columns), stride=step, padding=padding, bias=False)
    return nn.ReLU(), layer, nn.BatchNorm2d(outputs)


# -- U-Net (B, C) -----------------------------------------------------------------------------------------


@final
class UNet(nn.Module):
    """Five levels down and up; the result of each level crosses to the other side."""

    def __init__(self, convolutions: int, channels: int, levels: int = 5) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels)]
        below = widths[-1]
        self.down = nn.ModuleList(
            _level(a, w, w, convolutions) for a, w in zip([3, *widths], widths, strict=False)
        )
        self.bottom = _level(below, 2 * below, below, convolutions)
        self.up = nn.ModuleList(_level(2 * w, w // 2, w // 2, convolutions) for w in reversed(widths))
        self.head = nn.Conv2d(channels // 2, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images [batch, 3, height, width] in, logits [batch, 1, height, width] out."""
        crossing = []
        for level in self.down:
            x = level(x)
            crossing.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), crossing.pop()], 1))
        return self.head(x)


def _level(inputs: int, between: int, outputs: int, convolutions: int) -> nn.Module:
    widths = [inputs, *[between] * (convolutions - 1), outputs]
    layers = [
        layer
        for a, b in pairwise(widths)
        for layer in (
            nn.Conv2d(a, b, 3, padding=1, bias=False),
            nn.Dropout2d(0.1),
            nn.InstanceNorm2d(b),
            nn.LeakyReLU(0.01),
        )
    ]
    return nn.Sequential(*layers)


# -- with batches -----------------------------------------------------------------------------------------


def resnet101(samples: int, microbatches: int, side: int = 96) -> Case:
    """torchvision's ResNet-101 on square images."""
    torch.manual_seed(0)
    model = import_torchvision().models.resnet101().train()
    return Case(model, images(samples, side), F.cross_entropy, microbatches)


def amoebanet(samples: int, microbatches: int, side: int = 128, filters: int = 64) -> Case:
    """AmoebaNet-D with 18 normal cells."""
    torch.manual_seed(0)
    model = AmoebaNetD(18, filters, 1000).train()
    return Case(model, images(samples, side), F.cross_entropy, microbatches)


def unet(samples: int, microbatches: int, side: int = 96, channels: int = 16) -> Case:
    """A U-Net of five convolutions a level, on masks."""
    torch.manual_seed(0)
    x, y = torch.randn(samples, 3, side, side), torch.rand(samples, 1, side, side)
    model = UNet(5, channels).train()
    return Case(model, Batch((x,), {}, (y,)), F.binary_cross_entropy_with_logits, microbatches)


def images(samples: int, side: int) -> Batch:
    """Random ones of 1,000 classes."""
    x, y = torch.randn(samples, 3, side, side), torch.randint(0, 1000, (samples,))
    return Batch((x,), {}, (y,))


Network = Callable[[int, int], Case]
NETWORKS: Final[dict[str, Network]] = {"resnet101": resnet101, "amoebanet-d-18": amoebanet, "unet-5": unet}
# The same as large as in the papers.
PAPER: Final[dict[str, Network]] = {
    "resnet101": partial(resnet101, side=224),
    "amoebanet-d-18": partial(amoebanet, side=224, filters=256),
    "unet-5": partial(unet, side=192, channels=64),
}
# Real steps of two processes, for benchmarks/prediction/worker.py.
CASES: Final[dict[str, Callable[[], Case]]] = {
    "resnet101": lambda: resnet101(16, 4),
    "amoebanet-d-18": lambda: amoebanet(32, 8),
    "unet-5": lambda: unet(32, 8),
}
