"""The models of the question with a batch and a loss: unmodified, seeded random weights, random inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.models.imports import import_torchvision, import_transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "prediction"))
from models import UNet  # the same U-Net as the other questions'


@final
@dataclass(frozen=True)
class Case:
    """A model, the arguments of one batch, its targets and its loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., Tensor]
    target: Tensor

    @property
    def samples(self) -> int:
        """Of the batch."""
        return len(self.target)

    @property
    def example(self) -> dict[str, Any]:
        """Loss and targets as outsize's functions take them."""
        return {"loss_fn": self.loss_fn, "target": self.target}


def images(samples: int, side: int) -> Tensor:
    """[samples, 3, side, side]."""
    return torch.randn(samples, 3, side, side, generator=torch.Generator().manual_seed(1))


def labels(samples: int, classes: int, *shape: int) -> Tensor:
    """[samples, *shape] of class numbers."""
    return torch.randint(0, classes, (samples, *shape), generator=torch.Generator().manual_seed(2))


def resnet(name: str, samples: int, side: int) -> Case:
    """A ResNet of torchvision."""
    torch.manual_seed(0)
    model = getattr(import_torchvision().models, name)().train()
    return Case(model, (images(samples, side),), {}, F.cross_entropy, labels(samples, 1000))


def deeplab(samples: int, side: int) -> Case:
    """torchvision's DeepLabV3 with a ResNet-101."""
    torch.manual_seed(0)
    models = import_torchvision().models
    model = models.segmentation.deeplabv3_resnet101(
        weights=None, weights_backbone=None, num_classes=8
    ).train()
    return Case(model, (images(samples, side),), {}, _segmentation, labels(samples, 8, side, side))


def _segmentation(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["out"], target)


def unet(samples: int, side: int) -> Case:
    """A U-Net of four levels, width 32."""
    torch.manual_seed(0)
    return Case(
        UNet(32, 4, 8).train(), (images(samples, side),), {}, F.cross_entropy, labels(samples, 8, side, side)
    )


def gpt2(samples: int, length: int, **sizes: int) -> Case:
    """transformers' GPT-2; without `sizes` the one of 124 M parameters."""
    torch.manual_seed(0)
    config = import_transformers().GPT2Config(**sizes)
    model = import_transformers().GPT2LMHeadModel(config).train()
    ids = labels(samples, config.vocab_size, length)
    return Case(model, (), {"input_ids": ids, "use_cache": False}, _next_token, torch.roll(ids, -1, 1))


def _next_token(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


ENDS = {"bos_token_id": 0, "eos_token_id": 0}
CASES: dict[str, Callable[[], Case]] = {
    "resnet50-24x96x96": lambda: resnet("resnet50", 24, 96),
    "resnet50-64x128x128": lambda: resnet("resnet50", 64, 128),
    "deeplabv3-8x96x96": lambda: deeplab(8, 96),
    "unet-16x96x96": lambda: unet(16, 96),
    "gpt2-8x64": lambda: gpt2(8, 64),
    "resnet18-32x64x64": lambda: resnet("resnet18", 32, 64),
    "gpt2-4-layers": lambda: gpt2(16, 64, n_layer=4, n_embd=256, n_head=4, vocab_size=1024, **ENDS),
}
