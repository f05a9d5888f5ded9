"""Reads learning rates from optimizers of any kind.

An optimizer may have no `param_groups` (a pair of two that a user has written), groups without an `lr`, an lr
that is None (transformers' Adafactor finds its own), or one that is a tensor.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def learning_rates(optimizer: Any) -> list[float | None]:
    """Returns the learning rate of each group; None where a group has none that is a finite number."""
    return [_number(group.get("lr")) for group in getattr(optimizer, "param_groups", ())]


def learning_rate(optimizer: Any) -> float | None:
    """Returns the learning rate of the first group that has one; None without an optimizer or without one."""
    return next((rate for rate in learning_rates(optimizer) if rate is not None), None)


def _number(value: Any) -> float | None:
    """Returns a number, or the one that a tensor of one element holds; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
