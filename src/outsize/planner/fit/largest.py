"""Problem: which is the largest size (of a batch, a sequence, a model) that fits, by few answers?

An answer costs a capture, so few sizes are looked at. Bytes are close to affine in the size: from two sizes
the next guess is where the line through their shares of the memory reaches 1. Between one that fits and one
that does not, a guess that leaves most of the sizes is followed by their middle. It ends when neighbours are
known, so the answer is exact for every monotone question.

Source: bracketing and regula falsi with bisection as its safeguard (Dekker 1969). Complexity: O(log most)
answers, about five where bytes are affine. Oracle: tests/unit/planner/fit/test_largest.py asks every size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Final, final

# While all sizes fit they grow by this factor, or to where the line reaches 1, and at most by the second.
GROWTH: Final = 2
MOST_GROWTH: Final = 1024
# A guess that leaves more than this share of the sizes is followed by their middle.
SLOW: Final = 0.5


@final
@dataclass(frozen=True, slots=True)
class Filled:
    """Says whether a size fits, and how full the fullest device is (infinite where that is unknown)."""

    fits: bool
    share: float


def largest_fitting(filled: Callable[[int], Filled], most: int, known: int = 0) -> int:
    """Returns the largest of 1..most that fits, 0 where none does; `known` is a size that fits.

    `filled` is called for the result and for the size above it, if that is at most `most`.
    """
    low, low_share, slope = known, 0.0, 0.0
    if known:
        low_share = filled(known).share
    size = min(most, max(1, known + 1))
    while low < most:
        answer = filled(size)
        if not answer.fits:
            return _between(filled, (low, low_share), (size, answer.share))
        slope = (answer.share - low_share) / (size - low) if low else 0.0
        low, low_share = size, answer.share
        reached = low + int((1 - low_share) / slope) if slope > 0 else GROWTH * low
        size = min(most, max(reached, low + 1), MOST_GROWTH * low)
    return low


def _between(filled: Callable[[int], Filled], below: tuple[int, float], above: tuple[int, float]) -> int:
    """Returns the largest size that fits, of which one is known that fits (or 0), and one that does not."""
    (low, low_share), (high, high_share) = below, above
    halve = False
    while high - low > 1:
        width, rise = high - low, high_share - low_share
        guess = (low + high) // 2
        if not halve and low and isfinite(rise) and rise > 0:
            guess = low + int((1 - low_share) / rise * width)
        guess = min(max(guess, low + 1), high - 1)
        answer = filled(guess)
        if answer.fits:
            low, low_share = guess, answer.share
        else:
            high, high_share = guess, answer.share
        halve = high - low > SLOW * width and not halve
    return low
