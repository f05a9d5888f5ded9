"""What a case of the zoo is, and the batches and losses that cases share.

A case builds its model from a fixed seed, so that two builds are equal, and makes batches of any size;
twelve samples split into 1, 3, 4 and 6 microbatches (`smallest_microbatch` says how far they may be split).
The loss is either inside the model (labels among the keyword arguments, `case.loss is None`, read
`output.loss`) or a function `loss(output, target)`; `loss_of` does the right one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[tuple[Any, ...], dict[str, Any]]
VOCABULARY, LENGTH, CLASSES = 128, 16, 5


@final
@dataclass(frozen=True)
class Case:
    """One model with its batches. `make` builds it as shipped; with a loss inside, `loss` is None."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Tensor], Tensor] | None = None
    target: Callable[[int], Tensor | None] = lambda batch_size: None
    smallest_microbatch: int = 1

    def build(self, dropout: bool = False, seed: int = 0) -> nn.Module:
        """A new model in train mode; `dropout=True` keeps the class's own probabilities."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
        return (model if dropout else without_randomness(model)).train()

    def loss_of(self, output: Any, target: Tensor | None) -> Tensor:
        """The training loss of one (micro)batch's output."""
        if self.loss is None:
            return output.loss
        assert target is not None
        return self.loss(output, target)


def without_randomness(model: nn.Module) -> nn.Module:
    """Set every probability of dropout, stochastic depth, layer drop and router noise to zero, in place.

    They are floats named `...drop...` on modules and on transformers' configs, the `p` of dropout
    modules and of torchvision's StochasticDepth, and Mixtral's `router_jitter_noise`.
    """
    for module in model.modules():
        _silence(module)
        if hasattr(module, "config"):
            _silence(module.config)
    return model


def _silence(holder: Any) -> None:
    kind = type(holder).__name__.lower()
    dropping = "drop" in kind or kind == "stochasticdepth"
    for name, value in list(vars(holder).items()):
        random = "drop" in name or "jitter" in name or (dropping and name == "p")
        if random and isinstance(value, float):
            setattr(holder, name, 0.0)


# -- batches ---------------------------------------------------------------------------------------


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(batch_size: int, size: int, seed: int = 1) -> Tensor:
    return torch.randn(batch_size, 3, size, size, generator=_seeded(seed))


def tokens(batch_size: int, length: int = LENGTH, seed: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch_size, length), generator=_seeded(seed))


def classes(batch_size: int) -> Tensor:
    return torch.randint(0, CLASSES, (batch_size,), generator=_seeded(3))


def label_map(batch_size: int, size: int) -> Tensor:
    return torch.randint(0, CLASSES, (batch_size, size, size), generator=_seeded(4))


def features(batch_size: int, width: int) -> Tensor:
    return torch.randn(batch_size, width, generator=_seeded(5))


def causal_batch(batch_size: int) -> Batch:
    ids = tokens(batch_size)
    return (), {"input_ids": ids, "labels": ids}


def seq2seq_batch(batch_size: int) -> Batch:
    return (), {"input_ids": tokens(batch_size), "labels": tokens(batch_size, 10, seed=6)}


def masked_batch(batch_size: int) -> Batch:
    ids = tokens(batch_size)
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    return (), {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def image_labels_batch(batch_size: int) -> Batch:
    return (), {"pixel_values": images(batch_size, 32), "labels": classes(batch_size)}


def whisper_batch(batch_size: int) -> Batch:
    mel = torch.randn(batch_size, 8, 64, generator=_seeded(7))
    return (), {"input_features": mel, "labels": tokens(batch_size, 10)}


# -- losses outside the model ----------------------------------------------------------------------


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def segmentation_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Main head plus 0.4 of the auxiliary head, as in torchvision's reference training script."""
    return F.cross_entropy(output["out"], target) + 0.4 * F.cross_entropy(output["aux"], target)
