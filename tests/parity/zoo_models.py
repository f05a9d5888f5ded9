"""The hand-written models of the zoo, as a user would write them; nothing in here knows outsize."""

from __future__ import annotations

from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn


@final
class ToyModel(nn.Module):
    """The model of PyTorch's tutorial "Single-Machine Model Parallel Best Practices", on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x)))


def mlp() -> nn.Module:
    """Six layers of uneven widths: 12 features in, 5 classes out."""
    widths = (12, 48, 16, 64, 24, 32, 5)
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        layers += [nn.Linear(wide, narrow), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def double_conv(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


@final
class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015, arXiv:1505.04597) of depth three, BatchNorm; skips by concatenation.

    Images [n, 3, h, w] with h and w divisible by four to class scores [n, 5, h, w].
    """

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.down1 = double_conv(3, width)
        self.down2 = double_conv(width, 2 * width)
        self.bottom = double_conv(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge2 = double_conv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge1 = double_conv(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.down1(image)
        coarse = self.down2(self.pool(fine))
        x = self.bottom(self.pool(coarse))
        x = self.merge2(torch.cat([coarse, self.up2(x)], dim=1))
        x = self.merge1(torch.cat([fine, self.up1(x)], dim=1))
        return self.head(x)


@final
class LateFusion(nn.Module):
    """Two image encoders, one per input, joined by concatenation before one classifier.

    The encoders are ResNets whose own classifier is replaced by Identity.
    """

    def __init__(self, left: nn.Module, right: nn.Module, classes: int, features: int = 512) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.left.fc = nn.Identity()
        self.right.fc = nn.Identity()
        self.classifier = nn.Linear(2 * features, classes)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.classifier(torch.cat([self.left(a), self.right(b)], dim=1))


@final
class LSTMClassifier(nn.Module):
    """Token ids [n, length] to class scores [n, 5]: embedding, two-layer LSTM, last hidden state, linear."""

    def __init__(self, vocabulary: int = 128, width: int = 32, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.classifier = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embedding(ids))
        return self.classifier(hidden[-1])
