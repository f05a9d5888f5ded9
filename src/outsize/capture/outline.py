"""What a model whose weights are on meta returns: its forward once, on meta too, with nobody watching.

Several times as fast as `record`; tells whether there is a loss inside, and the shapes that come out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outsize.capture.caches import Caches
from outsize.capture.chance import python_generators_kept
from outsize.capture.fakes import remember
from outsize.program.tree import map_leaves


def outline(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output, on meta; the model stays as it is. Raises whatever the forward raises without values."""
    caches, restore = Caches(model, None), remember(model.modules())
    given, named = map_leaves(_on_meta, (args, kwargs))
    kept = torch.random.fork_rng(devices=[])
    try:
        with kept, python_generators_kept(), caches.without_fakes(), torch.no_grad():
            return model(*given, **named)
    finally:
        restore()


def _on_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf
