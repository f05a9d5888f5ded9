"""Two models that other splitters refuse: a dictionary of outputs with a second head, and two inputs.

Both are trained for one step on crops of the sample photographs, split and plain, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.providers import import_torchvision
from outsize.demo.images import PHOTOGRAPHS, Crops
from outsize.demo.job import Batch, LossFn
from outsize.demo.quiet import quiet

SHADES = 5
FEATURES = 512


@final
@dataclass(frozen=True)
class Guest:
    """A model with one batch and a loss; `microbatches` as it is checked."""

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss_fn: LossFn
    microbatches: int = 2


@final
class LateFusion(nn.Module):
    """Two ResNet-18, one per image, joined by concatenation in front of one classifier."""

    def __init__(self, left: nn.Module, right: nn.Module, classes: int) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.left.fc, self.right.fc = nn.Identity(), nn.Identity()
        self.classifier = nn.Linear(2 * FEATURES, classes)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Images a and b, [n, 3, h, w] each, to class scores [n, classes]."""
        return self.classifier(torch.cat([self.left(a), self.right(b)], dim=1))


def late_fusion() -> nn.Module:
    """The fusion of two torchvision ResNets that share nothing."""
    with quiet():
        models = import_torchvision().models
        torch.manual_seed(0)
        return LateFusion(models.resnet18(), models.resnet18(), PHOTOGRAPHS).train()


def deeplab(backbone: str) -> nn.Module:
    """torchvision's DeepLabV3 with both heads' last layers changed to the user's classes."""
    with quiet():
        segmentation = import_torchvision().models.segmentation
        torch.manual_seed(0)
        build = getattr(segmentation, f"deeplabv3_{backbone}")
        model = build(weights=None, weights_backbone=None, aux_loss=True)
        for head in (model.classifier, model.aux_classifier):
            head[-1] = nn.Conv2d(head[-1].in_channels, SHADES, 1)
        return model.train()


def segmentation_loss(output: Mapping[str, Tensor], target: Tensor) -> Tensor:
    """torchvision's own training loss: cross entropy of the output, and 0.5 of the auxiliary one."""
    return F.cross_entropy(output["out"], target) + 0.5 * F.cross_entropy(output["aux"], target)


def shaded(size: int, count: int) -> Batch:
    """Crops and, as the class of each pixel, its shade from 0 (dark) to SHADES - 1 (bright)."""
    images, _ = Crops(size).take(count, seed=0)
    shades = ((images.mean(dim=1) + 1) / 2 * SHADES).long().clamp(max=SHADES - 1)
    return Batch(args=(images,), target=shades)


def pairs(size: int, count: int) -> Batch:
    """Two crops of one photograph each; the class is the photograph."""
    crops = Crops(size)
    (a, labels), (b, _) = crops.take(count, seed=1), crops.take(count, seed=2)
    return Batch(args=(a, b), target=labels)


def guests(*, quick: bool) -> tuple[Guest, ...]:
    """DeepLabV3 and the late fusion; quick: the smaller backbone and smaller images."""
    backbone, size = ("mobilenet_v3_large", 32) if quick else ("resnet101", 64)
    name = f"DeepLabV3-{backbone.split('_')[0].replace('resnet', 'ResNet')}, {SHADES} classes, auxiliary head"
    return (
        Guest(name, lambda: deeplab(backbone), lambda: shaded(size, 4), segmentation_loss),
        Guest("Late fusion of two ResNet-18", late_fusion, lambda: pairs(size, 4), F.cross_entropy),
    )
