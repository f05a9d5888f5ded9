"""Reads layer-graph profiles as PipeDream's profiler writes them.

    node7 -- LSTM(2048, 1024) -- forward_compute_time=3.190, backward_compute_time=5.348, ...
    <tab>node6 -- node7

Times are milliseconds unless a unit follows (`3.19ms`, `3190us`, `0.00319s`, `3190000ns`); a missing field is
0; a list of sizes `[a; b]` counts as their sum. They become whole ticks: 1 ms = 10^digits ticks, with as many
digits as the file writes, so that nothing is rounded (at most 9; finer times are rounded to 1 fs).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import final

FIELD = re.compile(r"(\w+)\s*=\s*(\[[^\]]*\]|[^,\s]+)")
NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([a-zA-Zµ]*)")
UNITS_MS = {
    "": Fraction(1),
    "s": Fraction(1000),
    "ms": Fraction(1),
    "us": Fraction(1, 1000),
    "µs": Fraction(1, 1000),
    "ns": Fraction(1, 10**6),
}
MOST_DIGITS = 9
TIMES = ("forward_compute_time", "backward_compute_time")


class BadProfile(Exception):
    """A file that holds no profile; the text says why."""


@final
@dataclass(frozen=True)
class LayerGraph:
    """`ticks[u]`: forward and backward of node u; `order`: the nodes by the number in their names."""

    name: str
    nodes: tuple[str, ...]
    ticks: tuple[int, ...]
    output_bytes: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    ticks_per_ms: int

    def ms(self, ticks: float) -> float:
        """Ticks as milliseconds."""
        return ticks / self.ticks_per_ms


def read(path: Path) -> LayerGraph:
    """Raises BadProfile, with the line, for what cannot be understood."""
    nodes: dict[str, dict[str, str]] = {}
    pairs: list[tuple[str, str]] = []
    bare: list[tuple[str, str]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        parts = [part.strip() for part in line.strip().split(" -- ")]
        if len(parts) == 1:
            if parts[0]:
                raise BadProfile(f"line {number} is neither a node nor an edge")
        elif len(parts) == 2 and "=" not in parts[1]:
            (pairs if line[0].isspace() else bare).append((parts[0], parts[1]))
        else:
            nodes[parts[0]] = dict(FIELD.findall(parts[-1]))
    # Without the tab: an edge between nodes, or a node without figures.
    names = nodes.keys() | {name for name, _ in bare}
    pairs += [pair for pair in bare if pair[1] in names]
    for name, _ in (pair for pair in bare if pair[1] not in names):
        nodes.setdefault(name, {})
    if not nodes:
        raise BadProfile("no nodes")
    return _graph(path.stem, nodes, pairs)


def _graph(name: str, nodes: dict[str, dict[str, str]], pairs: list[tuple[str, str]]) -> LayerGraph:
    unknown = sorted({end for pair in pairs for end in pair} - set(nodes))
    if unknown:
        raise BadProfile(f"edges name {unknown[0]}, which is no node")
    place = {node: index for index, node in enumerate(nodes)}
    ms = [sum((_number(f.get(time, "0")) for time in TIMES), Fraction(0)) for f in nodes.values()]
    if min(ms) < 0:
        raise BadProfile("a node takes less than no time")
    scale = _scale(ms)
    return LayerGraph(
        name=name,
        nodes=tuple(nodes),
        ticks=tuple(round(m * scale) for m in ms),
        output_bytes=tuple(round(_number(f.get("activation_size", "0"))) for f in nodes.values()),
        edges=tuple(sorted({(place[a], place[b]) for a, b in pairs})),
        ticks_per_ms=scale,
    )


def _number(text: str) -> Fraction:
    """Milliseconds or bytes; the sum of a list."""
    total = Fraction(0)
    for digits, unit in NUMBER.findall(text):
        if unit not in UNITS_MS:
            raise BadProfile(f"{text} has an unknown unit")
        total += Fraction(digits) * UNITS_MS[unit]
    return total


def _scale(ms: list[Fraction]) -> int:
    """The least power of ten that makes all of them whole."""
    digits = 0
    while digits < MOST_DIGITS and any((m * 10**digits).denominator != 1 for m in ms):
        digits += 1
    return 10**digits
