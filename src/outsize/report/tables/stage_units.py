"""Writes the units of a stage in a few words: `transformer.{wte, wpe, drop, h.0-3}` for four patterns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

MOST_SHOWN = 8


def short_units(patterns: Sequence[str], most: int = MOST_SHOWN) -> str:
    """Returns patterns in order; neighbours below one module in braces, the middle of many left out."""
    shown = _elide(list(patterns), most)
    groups = [list(group) for _, group in groupby(shown, key=lambda p: p.split(".")[0])]
    return ", ".join(_braces(group) for group in groups)


def _elide(patterns: list[str], most: int) -> list[str]:
    """Returns the first and the last of too many; the text for the rest keeps their common prefix."""
    if len(patterns) <= most:
        return patterns
    head, tail = patterns[: most - 2], patterns[-1:]
    middle = patterns[most - 2 : -1]
    return [*head, f"{_common(middle)}… {len(middle)} more", *tail]


def _braces(group: list[str]) -> str:
    prefix = _common(group)
    if len(group) == 1 or not prefix:
        return ", ".join(group)
    return f"{prefix}{{{', '.join(p.removeprefix(prefix) for p in group)}}}"


def _common(patterns: Sequence[str]) -> str:
    """Returns the modules that contain all patterns, with a dot at the end; empty when there is none."""
    parents = [p.split(".")[:-1] for p in patterns]
    shared: list[str] = []
    for parts in zip(*parents, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "".join(f"{part}." for part in shared)
