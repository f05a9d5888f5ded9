"""Compares what a script prints here with what it has printed on another machine."""

from __future__ import annotations

import re

NUMBER = re.compile(r"\d+\.\d+")


def are_alike(text: str, other: str) -> bool:
    """Tells whether both texts differ in nothing but the last digits of numbers.

    The scripts compute in bf16, whose products CPUs with instructions for it round otherwise.
    """
    ours, theirs = NUMBER.findall(text), NUMBER.findall(other)
    same_words = NUMBER.split(text) == NUMBER.split(other)
    return same_words and all(
        abs(float(a) - float(b)) <= 2e-3 * max(1e-3, abs(float(b))) for a, b in zip(ours, theirs, strict=True)
    )
