"""Chooses round numbers for an axis (Heckbert, "Nice Numbers for Graph Labels", Graphics Gems, 1990)."""

from __future__ import annotations

import math


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` multiples of 1, 2 or 5 times a power of ten within low..high."""
    if not high > low:
        return [low]
    step = _nice((high - low) / max(1, count))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _nice(raw: float) -> float:
    power = 10 ** math.floor(math.log10(raw))
    return power * next(factor for factor in (1, 2, 5, 10) if raw <= factor * power * (1 + 1e-9))
