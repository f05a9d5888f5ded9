"""Real images to learn: crops of the two photographs that ship with scikit-learn, and a ResNet-50.

The label of a crop is the photograph it was cut from (a Chinese temple, a flower). Nothing is downloaded.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.providers import import_torchvision
from outsize.demo.job import Batch, Job, Recipe, seeded
from outsize.demo.quiet import quiet

PHOTOGRAPHS = 2


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
        """`count` crops, the photographs in turn: images [n, 3, size, size] in [-1, 1], photographs [n]."""
        generator = seeded(seed)
        which = torch.arange(count) % PHOTOGRAPHS
        return torch.stack([self._crop(self._photographs[p], generator) for p in which]), which

    def _crop(self, photograph: Tensor, generator: torch.Generator) -> Tensor:
        _, height, width = photograph.shape
        top = int(torch.randint(0, height - self.size, (), generator=generator))
        left = int(torch.randint(0, width - self.size, (), generator=generator))
        return photograph[:, top : top + self.size, left : left + self.size]


@final
class ImageJob(Job):
    """A ResNet of torchvision; cross entropy outside the model."""

    name = "resnet"

    def __init__(self, *, builder: str, size: int, microbatches: int, recipe: Recipe) -> None:
        self._builder, self._crops, self.recipe = builder, Crops(size), recipe
        self.microbatches = microbatches
        self.loss_fn = F.cross_entropy
        self.title, self.source = builder.replace("resnet", "ResNet-"), "two photographs"
        self.about = (
            f"torchvision's {builder}, BatchNorm per microbatch; {recipe.batch_size} crops of {size} x "
            f"{size} pixels, cut from scikit-learn's sample photographs: which of the two?"
        )

    def model(self) -> nn.Module:
        """The ResNet as torchvision builds it, seeded random weights."""
        with quiet():
            torchvision = import_torchvision()
            torch.manual_seed(0)
            return getattr(torchvision.models, self._builder)(num_classes=PHOTOGRAPHS).train()

    def batch(self, step: int) -> Batch:
        """Random crops, half of them from each photograph; the same ones in every step."""
        images, labels = self._crops.take(self.recipe.batch_size, seed=0)
        return Batch(args=(images,), target=labels)
