"""How the zoo's shelves of transformers write a row: a class, the arguments of its config, a batch.

Where the class computes no loss, or one that matches predictions with objects outside of torch, the loss is
a function of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_case import CLASSES, Batch, Case, classes, image_labels_batch, images

from outsize.capture.models.imports import import_transformers

hf = import_transformers()
Config = dict[str, Any]


def built(kind: str, **config: Any) -> nn.Module:
    """A model of this class, with random weights."""
    cls = getattr(hf, kind)
    return cls(cls.config_class(**config))


# -- batches and losses ----------------------------------------------------------------------------


def pixels(size: int = 32, **more: Callable[[int], Any]) -> Callable[[int], Batch]:
    """Images as `pixel_values`, and what else there is."""
    return batch(pixel_values=partial(images, size=size), **more)


def batch(**parts: Callable[[int], Any]) -> Callable[[int], Batch]:
    """Keyword arguments, each made for as many samples."""
    return lambda n: ((), {name: part(n) for name, part in parts.items()})


def drawn(*shape: int, seed: int = 11) -> Callable[[int], Tensor]:
    """Normal numbers of this shape per sample."""
    return lambda n: torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 12) -> Callable[[int], Tensor]:
    """Integers below `high` of this shape per sample."""
    return lambda n: torch.randint(0, high, (n, *shape), generator=torch.Generator().manual_seed(seed))


def of(*names: str) -> Callable[[Any, Tensor], Tensor]:
    """Cross entropy of all numbers of these outputs, taken for scores of so many classes."""

    def loss(output: Any, target: Tensor) -> Tensor:
        found = [getattr(output, name) for name in names]
        return sum((F.cross_entropy(x.flatten(1), target) for x in found), torch.zeros(()))

    return loss


def inside(name: str, kind: str, config: Config, made: Callable[[int], Batch], smallest: int = 1) -> Case:
    """A model with its loss inside."""
    return Case(name, partial(built, kind, **config), made, smallest_microbatch=smallest)


def outside(
    name: str, kind: str, config: Config, made: Callable[[int], Batch], *names: str, smallest: int = 1
) -> Case:
    """A model whose loss reads these outputs."""
    return Case(name, partial(built, kind, **config), made, of(*names), classes, smallest)


def classifier(name: str, kind: str, smallest: int = 1, **config: Any) -> Case:
    """A classifier of images of 32 pixels, `kind` without "ForImageClassification"."""
    kind += "ForImageClassification"
    return inside(name, kind, {"num_labels": CLASSES, **config}, image_labels_batch, smallest)


# -- configs that several rows share ---------------------------------------------------------------

HEADS: Config = {"num_hidden_layers": 2, "num_attention_heads": 4}
WIDTHS: Config = {**HEADS, "hidden_size": 32, "intermediate_size": 64}
VIT: Config = {**WIDTHS, "image_size": 32, "patch_size": 8}
STAGES: Config = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
