"""Compares what a script prints here with what it has printed on another machine."""

from __future__ import annotations

import re

NUMBER = re.compile(r"\d+\.\d+")
FIRST = "step 1: loss"
"""The line of the first loss. Its gradients multiply the rounding (DeepLabV3's by a fifth)."""
ROUNDING = 0.01


def are_alike(text: str, other: str) -> bool:
    """Tells whether both texts have the same words and lines, and nearly the same first loss.

    The scripts compute in bf16, whose products CPUs with instructions for it round otherwise.
    """
    ours, theirs = text.splitlines(), other.splitlines()
    return len(ours) == len(theirs) and all(map(_alike, ours, theirs))


def _alike(line: str, other: str) -> bool:
    if line == other:
        return True
    if NUMBER.split(line) != NUMBER.split(other):
        return False
    loss, expected = (float(NUMBER.findall(each)[0]) for each in (line, other))
    return not line.startswith(FIRST) or abs(loss - expected) <= ROUNDING * expected
