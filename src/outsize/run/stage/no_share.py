"""The backward of a microbatch that has no share in the loss: every gradient is zero.

A masked mean over nothing is 0 / 0, so its loss is NaN, and a backward that begins with a gradient of 0 gives
NaN times 0. In the undivided batch the same samples have gradients of zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def zero_gradients(weights: Iterable[Tensor]) -> Iterator[None]:
    """Within the block a backward accumulates zeros into these weights, where it reaches them."""
    hooks = [weight.register_hook(torch.zeros_like) for weight in weights if weight.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def zeroed(gradients: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
    """Returns zeros in place of each gradient that there is."""
    return {key: None if g is None else torch.zeros_like(g) for key, g in gradients.items()}
