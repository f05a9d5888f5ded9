"""Two models that other splitters refuse: a dictionary of outputs with a second head, and two inputs.

Both are trained for one step on crops of the sample photographs, split and in one process, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from rich.text import Text
from torch import Tensor, nn

import outsize
from outsize.capture.models.imports import import_torchvision
from outsize.cli.demo.images import PHOTOGRAPHS, Crops
from outsize.cli.demo.job import DemoBatch, LossFn, library_messages_off
from outsize.cli.demo.screen import DemoScreen, verdict_text
from outsize.ir.answers.verdict import Verdict

BRIGHTNESS_CLASSES = 5
RESNET18_FEATURES = 512
STAGE_COUNTS = (2, 3)


@final
@dataclass(frozen=True)
class ComparedModel:
    """A model with one batch and a loss; it is checked with `microbatches`."""

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], DemoBatch]
    loss_fn: LossFn
    microbatches: int = 2

    def check(self, screen: DemoScreen) -> list[Verdict]:
        """Splits the model into two and into three stages, compares a step of each, and writes one line."""
        counts = " and ".join(map(str, STAGE_COUNTS))
        with screen.working(f"{self.title}: planning and checking {counts} stages"):
            model, batch = self.model(), self.batch()
            verdicts = [
                outsize.check(
                    model,
                    batch.args,
                    batch.kwargs,
                    loss_fn=self.loss_fn,
                    target=batch.target,
                    stages=stages,
                    microbatches=self.microbatches,
                )
                for stages in STAGE_COUNTS
            ]
        parts = [Text.assemble(f"{len(v.stages)} stages ", verdict_text(v.bit_equal)) for v in verdicts]
        screen.line(Text.assemble(self.title, ": ", Text(", ").join(parts)))
        return verdicts


def compared_models(*, quick: bool) -> tuple[ComparedModel, ...]:
    """Returns DeepLabV3 and the late fusion; `quick` takes a smaller backbone and smaller images."""
    backbone, size = ("mobilenet_v3_large", 32) if quick else ("resnet101", 64)
    name = backbone.split("_")[0].replace("resnet", "ResNet")
    return (
        ComparedModel(
            f"DeepLabV3-{name}, {BRIGHTNESS_CLASSES} classes, auxiliary head",
            lambda: deeplab(backbone),
            lambda: brightness_batch(size, 4),
            segmentation_loss,
        ),
        ComparedModel(
            "Late fusion of two ResNet-18", late_fusion, lambda: pair_batch(size, 4), F.cross_entropy
        ),
    )


def deeplab(backbone: str) -> nn.Module:
    """Returns torchvision's DeepLabV3; the last layers of both heads have the brightness classes."""
    with library_messages_off():
        segmentation = import_torchvision().models.segmentation
        torch.manual_seed(0)
        build = getattr(segmentation, f"deeplabv3_{backbone}")
        model = build(weights=None, weights_backbone=None, aux_loss=True)
        for head in (model.classifier, model.aux_classifier):
            head[-1] = nn.Conv2d(head[-1].in_channels, BRIGHTNESS_CLASSES, 1)
        return model.train()


def segmentation_loss(output: Mapping[str, Tensor], target: Tensor) -> Tensor:
    """Returns torchvision's own training loss: the output's cross entropy and half of the auxiliary one's."""
    return F.cross_entropy(output["out"], target) + 0.5 * F.cross_entropy(output["aux"], target)


def brightness_batch(size: int, count: int) -> DemoBatch:
    """Returns crops; the class of each pixel is its brightness, the darkest is 0."""
    images, _ = Crops(size).take(count, seed=0)
    brightness = (images.mean(dim=1) + 1) / 2
    classes = (brightness * BRIGHTNESS_CLASSES).long().clamp(max=BRIGHTNESS_CLASSES - 1)
    return DemoBatch(args=(images,), target=classes)


@final
class LateFusion(nn.Module):
    """Two ResNet-18, one per image, whose features are concatenated before one classifier."""

    def __init__(self, left: nn.Module, right: nn.Module, classes: int) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.left.fc, self.right.fc = nn.Identity(), nn.Identity()
        self.classifier = nn.Linear(2 * RESNET18_FEATURES, classes)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns class scores [n, classes] of the images a and b, [n, 3, h, w] each."""
        return self.classifier(torch.cat([self.left(a), self.right(b)], dim=1))


def late_fusion() -> nn.Module:
    """Returns the fusion of two torchvision ResNets that share no weights."""
    with library_messages_off():
        models = import_torchvision().models
        torch.manual_seed(0)
        return LateFusion(models.resnet18(), models.resnet18(), PHOTOGRAPHS).train()


def pair_batch(size: int, count: int) -> DemoBatch:
    """Returns pairs of crops of one photograph; the class is the photograph."""
    crops = Crops(size)
    (a, labels), (b, _) = crops.take(count, seed=1), crops.take(count, seed=2)
    return DemoBatch(args=(a, b), target=labels)
