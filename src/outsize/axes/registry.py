"""Defines AXES: all axes, in the order of the mesh, and where a rank stands on them.

The last axis is innermost: its ranks are neighbours, which have the fastest links. So those that send most
come last. An axis is added by a line here.

    sizes        pp 2, dp_replicate 2, tp 2                  torch's names and order (row-major)
    rank 5       {pp: 1, dp_replicate: 0, tp: 1}             coordinate(sizes, 5)
    ranks along  tp: 0 1    dp_replicate: 0 2    both: 0 1 2 3    the first group (ranks_along)

Oracle: tests/unit/axes/test_registry.py compares with a tensor of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Final

from outsize.axes.axis import Axis
from outsize.axes.context import CONTEXT
from outsize.axes.expert import EXPERT
from outsize.axes.pipeline import PIPELINE
from outsize.axes.replicate import REPLICATE
from outsize.axes.shard import SHARD
from outsize.axes.tensor import TENSOR

AXES: Final[tuple[Axis, ...]] = (
    PIPELINE,
    REPLICATE,
    SHARD,
    EXPERT,
    CONTEXT,
    TENSOR,
)
# All axes, as plan files and sentences list them.
LISTED: Final = tuple(sorted(AXES, key=lambda axis: axis.listed))


def those(asked: Callable[[Axis], bool]) -> tuple[Axis, ...]:
    """Returns the axes whose records say so, in the order of the mesh."""
    return tuple(filter(asked, AXES))


# Ranks along these have different stages, or are of the group of devices that one stage has.
STAGES: Final = those(lambda axis: axis.cuts_stages)
GROUP: Final = those(lambda axis: not axis.cuts_stages)
# Ranks along these have parts of the batch.
REPLICAS: Final = those(lambda axis: axis.divides_batch)
# Of these, ranks compute each microbatch together with one of every other rank.
PAIRING: Final = those(lambda axis: axis.divides_batch and axis.within_stages)
# Ranks along these hold the same weights, or the same experts, and add up their gradients.
HOLDERS: Final = those(lambda axis: axis.same_weights)
EXPERT_HOLDERS: Final = those(lambda axis: axis.same_experts)
# Ranks along these have all weights again, may have parts of one weight, and divide weights as they compute.
COPIES: Final = those(lambda axis: axis.copies_weights)
PARTS: Final = those(lambda axis: axis.has_parts)
DIVIDING: Final = those(lambda axis: axis.divides_weights is not None)


def axes_typed(sizes: Mapping[str, int | str]) -> str:
    """Returns what a user types for these sizes: `--axes tp=2,dp_shard=4`; "" for none."""
    return f"--axes {','.join(f'{name}={size}' for name, size in sizes.items())}" if sizes else ""


def coordinate(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Returns the rank's coordinate on each axis; `sizes` by name."""
    place: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, place[axis.name] = divmod(rank, sizes[axis.name])
    return {axis.name: place[axis.name] for axis in AXES}


def number_along(sizes: Mapping[str, int], place: Mapping[str, int], along: Collection[Axis]) -> int:
    """Returns the number of the rank at a place among all that differ from it along these axes alone."""
    number = 0
    for axis in AXES:
        number = number * sizes[axis.name] + place[axis.name] if axis in along else number
    return number


def ranks_along(sizes: Mapping[str, int], along: Collection[Axis]) -> list[int]:
    """Returns the first group of ranks along these axes, in ascending order."""
    ranks, stride = [0], 1
    for axis in reversed(AXES):
        size = sizes[axis.name]
        if axis in along:
            ranks = [place * stride + rank for place in range(size) for rank in ranks]
        stride *= size
    return ranks


def size_of(sizes: Mapping[str, int], along: Collection[Axis]) -> int:
    """Returns the number of ranks along these axes."""
    return prod(sizes[axis.name] for axis in along)
