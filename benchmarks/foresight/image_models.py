"""The models of published image rows that torchvision does not have: mmsegmentation's ResNets and its heads.

Written after the architectures of mmsegmentation v0 (mmseg/models, Apache 2.0): ResNet with a stem of three
convolutions (V1c) or torchvision's own (the rows with a "b"), dilated instead of strided in its last two
stages (D8), one of four heads, and an auxiliary FCN head on the third stage. The scores of both are resized
to the images and compared with the labels. Only shapes matter here: weights are on meta.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
IGNORED = 255


def conv(inputs: int, outputs: int, size: int = 1, **options: Any) -> nn.Sequential:
    """Convolution, batch norm and ReLU that keep the size of the image."""
    padding = options.pop("padding", options.get("dilation", 1) * (size // 2))
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=padding, bias=False, **options),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, or 1x1, 3x3 and 1x1 where `wide` is 4."""

    def __init__(self, inputs: int, planes: int, wide: int, stride: int, dilation: int) -> None:
        super().__init__()
        strided = {"stride": stride, "dilation": dilation}
        first = [conv(inputs, planes, 3, **strided)] if wide == 1 else [conv(inputs, planes)]
        middle = [] if wide == 1 else [conv(planes, planes, 3, **strided)]
        last = nn.Conv2d(planes, planes * wide, 3 if wide == 1 else 1, padding=int(wide == 1), bias=False)
        self.body = nn.Sequential(*first, *middle, last, nn.BatchNorm2d(planes * wide))
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != planes * wide:
            projection = nn.Conv2d(inputs, planes * wide, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(planes * wide))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = self.body(x)
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """The features of all four stages."""

    def __init__(self, depth: int, deep_stem: bool) -> None:
        super().__init__()
        stem = [conv(3, 64, 7, stride=2)]
        if deep_stem:
            stem = [conv(3, 32, 3, stride=2), conv(32, 32, 3), conv(32, 64, 3)]
        self.stem = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1))
        wide, inputs = 1 if depth < 50 else 4, 64
        stages: list[nn.Module] = []
        for number, (count, stride, dilation) in enumerate(
            zip(BLOCKS[depth], (1, 2, 1, 1), (1, 1, 2, 4), strict=True)
        ):
            planes, blocks = 64 << number, list[nn.Module]()
            for at in range(count):
                blocks.append(Block(inputs, planes, wide, stride if at == 0 else 1, dilation))
                inputs = planes * wide
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.channels = [(64 << number) * wide for number in range(4)]

    def forward(self, x: Tensor) -> list[Tensor]:
        """One tensor per stage."""
        x, features = self.stem(x), list[Tensor]()
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features


class FCNHead(nn.Module):
    """3x3 convolutions, whose input is concatenated to their result where there are two."""

    def __init__(self, inputs: int, channels: int, classes: int, convs: int) -> None:
        super().__init__()
        sizes = [inputs, *[channels] * convs]
        self.convs = nn.Sequential(*(conv(a, b, 3) for a, b in pairwise(sizes)))
        self.join = conv(inputs + channels, channels, 3) if convs == 2 else None
        self.classify = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(channels, classes, 1))

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Scores at the feature's resolution."""
        out = self.convs(features[-1])
        if self.join is not None:
            out = self.join(torch.cat([features[-1], out], dim=1))
        return self.classify(out)


class PyramidHead(nn.Module):
    """PSPNet's head (pools of four sizes) or DeepLabV3's (four dilations and a global pool).

    `low` are the channels of the first stage's features, which DeepLabV3+ adds; its convolutions are
    separable.
    """

    def __init__(self, inputs: int, channels: int, classes: int, kind: str, low: int) -> None:
        super().__init__()
        self.pools, self.low = nn.ModuleList(), None
        separable = kind == "DeepLabV3+"
        if kind == "PSPNet":
            self.branches = nn.ModuleList()
            self.pools.extend(
                nn.Sequential(nn.AdaptiveAvgPool2d(n), conv(inputs, channels)) for n in (1, 2, 3, 6)
            )
            joined = inputs + 4 * channels
        else:
            wide = _separable if separable else conv
            dilated = (wide(inputs, channels, 3, dilation=d) for d in (12, 24, 36))
            self.branches = nn.ModuleList([conv(inputs, channels), *dilated])
            self.pools.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(inputs, channels)))
            joined = 5 * channels
        self.keeps_input = kind == "PSPNet"
        self.join = conv(joined, channels, 3)
        if separable:
            narrow = 48 if channels > 128 else 12
            self.low = conv(low, narrow)
            self.refine = nn.Sequential(
                _separable(channels + narrow, channels, 3), _separable(channels, channels, 3)
            )
        self.classify = nn.Sequential(nn.Dropout2d(0.1), nn.Conv2d(channels, classes, 1))

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Scores at the resolution of the last feature, or of the first under DeepLabV3+."""
        x = features[-1]
        pooled = [_resized(pool(x), x.shape[2:]) for pool in self.pools]
        parts = [x, *pooled] if self.keeps_input else [*pooled, *(branch(x) for branch in self.branches)]
        out = self.join(torch.cat(parts, dim=1))
        if self.low is not None:
            first = self.low(features[0])
            out = self.refine(torch.cat([_resized(out, first.shape[2:]), first], dim=1))
        return self.classify(out)


def _separable(inputs: int, outputs: int, size: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(conv(inputs, inputs, size, groups=inputs, **options), conv(inputs, outputs))


def _resized(x: Tensor, size: Sequence[int]) -> Tensor:
    return functional.interpolate(x, size=list(size), mode="bilinear", align_corners=False)


class Segmenter(nn.Module):
    """mmsegmentation's EncoderDecoder in training: images and labels in, the sum of both losses out."""

    def __init__(self, kind: str, depth: int, deep_stem: bool, classes: int) -> None:
        super().__init__()
        self.backbone = ResNet(depth, deep_stem)
        first, _, third, last = self.backbone.channels
        channels, beside = (512, 256) if depth >= 50 else (128, 64)
        self.head: nn.Module = (
            FCNHead(last, channels, classes, 2)
            if kind == "FCN"
            else PyramidHead(last, channels, classes, kind, first)
        )
        self.auxiliary = FCNHead(third, beside, classes, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        features = self.backbone(images)
        losses = [
            functional.cross_entropy(
                _resized(scores, images.shape[2:]), labels, reduction="none", ignore_index=IGNORED
            ).mean()
            for scores in (self.head(features), self.auxiliary(features[:3]))
        ]
        return losses[0] + 0.4 * losses[1]
