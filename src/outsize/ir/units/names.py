"""Names runs of units: `model.layers.0-7` instead of 120 leaf names, and back.

A unit is named by the FQN of its leaf call, `:op` behind the FQN of a frame for heavy glue, and `#k`
when a module is called several times (`#0` is the first call). A pattern covers the unit itself and
everything below it.
`compress` writes a contiguous run of units as the shortest list of patterns; `expand` reads it back.
Stages of a plan are named one after the other, so what a pattern covers is kept for the last models.
Complexity: O(units) once for a model, then O(units of the stage).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

_RANGE = re.compile(r"^(.*\.)?([0-9]{1,18})-([0-9]{1,18})$")


@lru_cache(maxsize=1 << 16)
def prefixes(name: str) -> tuple[str, ...]:
    """Returns all patterns that cover a unit, longest first: `a.b:op#1` -> (`a.b:op#1`, `a.b`, `a`)."""
    patterns = [name]
    path = re.split(r"[:#]", name)[0]
    while path:
        if path != patterns[-1]:
            patterns.append(path)
        path = path.rpartition(".")[0]
    return tuple(patterns)


@lru_cache(maxsize=8)
def _covered(names: tuple[str, ...]) -> Mapping[str, Sequence[int]]:
    """Maps each pattern without a range to the units that it covers, which ascend."""
    below: dict[str, list[int]] = {}
    for unit, name in enumerate(names):
        for prefix in prefixes(name):
            below.setdefault(prefix, []).append(unit)
    return below


def compress(names: Sequence[str], first: int, last: int) -> tuple[str, ...]:
    """Returns patterns that cover exactly the units first..last of `names` (both inclusive)."""
    return compress_units(names, range(first, last + 1))


def compress_units(names: Sequence[str], units: Collection[int]) -> tuple[str, ...]:
    """Returns patterns that cover exactly these units, which ascend."""
    covered, patterns = _covered(tuple(names)), dict[str, None]()
    inside = Counter(p for unit in units for p in prefixes(names[unit]))
    for name in (names[unit] for unit in units):
        free = [p for p in prefixes(name) if inside[p] == len(covered[p])]
        patterns[free[-1] if free else name] = None
    return tuple(_fold(list(patterns)))


def _fold(patterns: list[str]) -> list[str]:
    """Folds `h.0, h.1, h.2` into `h.0-2`."""
    folded: list[tuple[str, int, int] | str] = []
    for pattern in patterns:
        head, _, tail = pattern.rpartition(".")
        if not tail.isdigit():
            folded.append(pattern)
            continue
        number, before = int(tail), folded[-1] if folded else ""
        if isinstance(before, tuple) and before[0] == head and before[2] == number - 1:
            folded[-1] = (head, before[1], number)
        else:
            folded.append((head, number, number))
    return [_unfold(f) for f in folded]


def _unfold(item: tuple[str, int, int] | str) -> str:
    if isinstance(item, str):
        return item
    head, low, high = item
    dot = f"{head}." if head else ""
    return f"{dot}{low}" if low == high else f"{dot}{low}-{high}"


def expand(patterns: Sequence[str], names: Sequence[str]) -> list[int]:
    """Returns indices of the units that the patterns cover, in order; KeyError names a pattern that covers
    none, or a range of which one end is none of them.
    """
    below, wanted = _covered(tuple(names)), set[int]()
    for pattern in patterns:
        plain = unroll(pattern, len(names))
        if not plain or plain[0] not in below or plain[-1] not in below:
            raise KeyError(pattern)
        wanted.update(unit for prefix in plain for unit in below.get(prefix, ()))
    return sorted(wanted)


def unroll(pattern: str, most: int) -> list[str]:
    """Returns `h.0, h.1, h.2` for `h.0-2`; any other pattern is returned alone.

    `most` is the number of units of the model: a range of more covers none of them, and is not listed.
    """
    match = _RANGE.match(pattern)
    if match is None:
        return [pattern]
    head, low, high = match[1] or "", int(match[2]), int(match[3])
    return [f"{head}{i}" for i in range(low, high + 1)] if high - low < most else []
