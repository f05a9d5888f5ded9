"""Knows whether `torch.nn.utils.parametrize.cached()` is active, which computes parametrized weights once.

A tape calls such modules without that context, and would compute the weight at each call: gradients round
otherwise, and spectral norm iterates more often. So the code that opens the context becomes one instruction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


def is_caching() -> bool:
    """Returns whether the caller is within `parametrize.cached()`."""
    return parametrize._cache_enabled > 0


def reads_cache(module: nn.Module) -> bool:
    """Returns whether a call of the module now takes weights from a cache that its caller has opened."""
    return is_caching() and any(hasattr(part, "parametrizations") for part in module.modules())


@contextmanager
def own_weight_cache() -> Iterator[None]:
    """Hides the caller's cache: nothing is taken from it or put into it within the context."""
    state: Any = parametrize
    before = state._cache_enabled, state._cache
    state._cache_enabled, state._cache = 0, {}
    try:
        yield
    finally:
        state._cache_enabled, state._cache = before
