"""Finds the small meshes in which a plan's axes are rehearsed.

A mesh of a plan has too many devices. Which meshes of at most `most` ranks prove most of it? Each shows some
features, and together they shall show all, in as few as possible:

    ("pair", a, b)   axes a and b meet: both have two ranks at least, so that groups of one cross the other's
    ("wide", a)      a has three ranks at least, where the plan has as many: neighbours on both sides differ
                     (rings), and a pipeline has a stage in its middle
    ("there", a)     a has two ranks at least
    ("three", ...)   three axes meet; this only decides between equals

It is the problem of covering a set. The greedy rule (Chvatal, Mathematics of Operations Research 4, 1979)
takes the mesh with the largest weight of features that are new; among equals that with more stages, then
with fewer ranks. An axis has a divisor of its size, so that what it divides evenly stays divided evenly.
Only whether an axis cuts stages is asked of its record; nothing here knows an axis by its name.

Oracle: tests/unit/ops/rehearsal/test_worlds.py looks through all sets of meshes of small plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, product
from math import prod
from typing import Final

from outsize.axes.axis import Axis
from outsize.axes.registry import AXES
from outsize.ir.plan import Axes

MOST_RANKS: Final = 8
_WIDE: Final = 3

Feature = tuple[str, ...]
_WEIGHTS: Final[Mapping[str, float]] = {"pair": 4.0, "wide": 3.0, "there": 1.0, "three": 0.5}


def small_worlds(axes: Axes, most: int = MOST_RANKS, *, keeps_stages: bool = False) -> list[Axes]:
    """Returns the meshes, the one that shows most first; the plan's own where it has at most `most` ranks.

    `keeps_stages` leaves the pipeline as long as it is, for a plan whose rows name its ranks.
    """
    if axes.world_size <= most:
        return [axes]
    used = [axis for axis in AXES if axes.of(axis) > 1]
    wanted = _wanted(axes, used)
    meshes = [mesh for mesh in _meshes(axes, used, most) if not keeps_stages or _same_stages(mesh, axes)]
    chosen = list[Axes]()
    while meshes:
        best = max(meshes, key=lambda mesh: (_weight(_shown(mesh, used) & wanted), mesh.pp, -mesh.world_size))
        new = _shown(best, used) & wanted
        if not any(feature[0] != "three" for feature in new):
            break
        chosen.append(best)
        wanted -= new
    return chosen


def pairs_met(axes: Axes, worlds: Iterable[Axes]) -> tuple[list[Feature], list[Feature]]:
    """Returns the pairs of the plan's axes that meet in a world, and those that never do."""
    names = [axis.name for axis in AXES if axes.of(axis) > 1]
    together = [set(world.used) for world in worlds]
    pairs = list(combinations(names, 2))
    met = [pair for pair in pairs if any(set(pair) <= used for used in together)]
    return [(a, b) for a, b in met], [(a, b) for a, b in pairs if (a, b) not in met]


def _wanted(axes: Axes, used: list[Axis]) -> set[Feature]:
    wide = {("wide", axis.name) for axis in used if axes.of(axis) >= _WIDE}
    names = [axis.name for axis in used]
    pairs: set[Feature] = {("pair", *pair) for pair in combinations(names, 2)}
    three: set[Feature] = {("three", *each) for each in combinations(names, 3)}
    there: set[Feature] = {("there", name) for name in names}
    return {*wide, *pairs, *three, *there}


def _shown(mesh: Axes, used: list[Axis]) -> set[Feature]:
    return _wanted(mesh, [axis for axis in used if mesh.of(axis) > 1])


def _weight(features: Iterable[Feature]) -> float:
    return sum(_WEIGHTS[feature[0]] for feature in features)


def _meshes(axes: Axes, used: list[Axis], most: int) -> Iterator[Axes]:
    """Yields every mesh of at most `most` ranks that has some of the axes."""
    sizes = [_sizes(axis, axes.of(axis), most) for axis in used]
    for each in product(*sizes):
        if prod(each) <= most:
            small = dict(zip((axis.name for axis in used), each, strict=True))
            yield axes.with_one(AXES).model_copy(update=small)


def _sizes(axis: Axis, size: int, most: int) -> list[int]:
    """Returns the sizes that an axis may have: its divisors, and any for stages, which are cut anew."""
    below = range(1, min(size, most) + 1)
    divisors = [each for each in below if size % each == 0]
    return list(below) if axis.cuts_stages or len(divisors) == 1 else divisors


def _same_stages(mesh: Axes, axes: Axes) -> bool:
    return all(mesh.of(axis) == axes.of(axis) for axis in AXES if axis.cuts_stages)
