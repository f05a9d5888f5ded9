"""The image job: a ResNet learns which of two photographs a crop was cut from.

The photographs (a Chinese temple, a flower) are part of scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.models.imports import import_torchvision
from outsize.cli.demo.job import DemoBatch, DemoJob, TrainingRecipe, library_messages_off, seeded

PHOTOGRAPHS = 2


def image_job(*, quick: bool) -> DemoJob:
    """Returns ResNet-50 with a few steps; `quick` returns ResNet-18 on small crops."""
    if quick:
        recipe = TrainingRecipe(batch_size=8, steps=4, learning_rate=1e-4, warmup=1)
        return ImageJob(builder="resnet18", size=32, microbatches=2, recipe=recipe)
    recipe = TrainingRecipe(batch_size=16, steps=8, learning_rate=1e-4, warmup=1)
    return ImageJob(builder="resnet50", size=64, microbatches=4, recipe=recipe)


@final
class Crops:
    """Random crops of `size` x `size` pixels."""

    def __init__(self, size: int) -> None:
        self.size = size

    @cached_property
    def _photographs(self) -> list[Tensor]:
        from sklearn.datasets import load_sample_images

        images: list[Any] = load_sample_images().images
        return [torch.tensor(image).permute(2, 0, 1).float() / 127.5 - 1 for image in images]

    def take(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns `count` crops [n, 3, size, size] in [-1, 1] and the photograph of each [n]."""
        generator = seeded(seed)
        labels = torch.arange(count) % PHOTOGRAPHS
        return torch.stack([self._crop(self._photographs[label], generator) for label in labels]), labels

    def _crop(self, photograph: Tensor, generator: torch.Generator) -> Tensor:
        _, height, width = photograph.shape
        top = int(torch.randint(0, height - self.size, (), generator=generator))
        left = int(torch.randint(0, width - self.size, (), generator=generator))
        return photograph[:, top : top + self.size, left : left + self.size]


@final
class ImageJob(DemoJob):
    """A ResNet of torchvision with cross entropy outside the model."""

    name = "resnet"

    def __init__(self, *, builder: str, size: int, microbatches: int, recipe: TrainingRecipe) -> None:
        self._builder, self._crops, self.recipe = builder, Crops(size), recipe
        self.microbatches = microbatches
        self.loss_fn = F.cross_entropy
        self.title, self.data = builder.replace("resnet", "ResNet-"), "two photographs"
        self.about = (
            f"torchvision's {builder}, BatchNorm per microbatch; {recipe.batch_size} crops of {size} x "
            f"{size} pixels from scikit-learn's sample photographs: which of the two?"
        )

    def model(self) -> nn.Module:
        """Returns the ResNet as torchvision builds it, with seeded random weights."""
        with library_messages_off():
            torchvision = import_torchvision()
            torch.manual_seed(0)
            return getattr(torchvision.models, self._builder)(num_classes=PHOTOGRAPHS).train()

    def batch(self, step: int) -> DemoBatch:
        """Returns the same random crops in every step, half of them from each photograph."""
        images, labels = self._crops.take(self.recipe.batch_size, seed=0)
        return DemoBatch(args=(images,), target=labels)
