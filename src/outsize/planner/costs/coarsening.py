"""Problem: a model has thousands of units in a row, of which only a few hundred cuts are worth trying.

Neighbouring units are merged into pieces of about equal work, and pieces end where few bytes cross. A cut
between two pieces is a cut of the model, so a result for the pieces is one for the model. Only cuts within a
piece are lost; the lower bound (bounds/step_time.py) is computed on the units themselves and shows that loss.

A piece of units u..v costs the sums of their seconds, weights and saved bytes, and the largest workspace.
Values that stay inside are dropped; those that cross keep their producer's and users' pieces. This is
coarsening as in multilevel partitioning (Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998), here along the
chain. Complexity: O(units + users of all values). Oracle: tests/unit/planner/costs/test_coarsening.py, where
a run of pieces costs what its units cost.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from outsize.ir.graph import PIECE, ModelGraph, Unit, Value, Work
from outsize.ir.profile import Profile, UnitCost
from outsize.planner.costs.stage_edges import crossing_bytes
from outsize.planner.costs.unit_times import UnitSeconds

# The name of a unit up to the first number, which is its place in a list of modules: `layers.7`.
_BLOCK: Final = re.compile(r"(?:[^.]+\.)*?\d+(?=[.:#]|$)")
# A piece may end once it has this share of its part of the work, which leaves room to find a cut with few
# bytes.
SOONEST: Final = 0.5


def pieces(graph: ModelGraph, seconds: UnitSeconds, most: int) -> tuple[int, ...]:
    """Returns the first unit of each of at most about `most` pieces, then the number of units."""
    n = len(graph.units)
    if n <= most:
        return tuple(range(n + 1))
    work = np.cumsum(seconds.total)
    part, crossing = float(work[-1]) / most, crossing_bytes(graph)
    ends, done = [0], 0.0
    while ends[-1] < n:
        soonest = max(int(np.searchsorted(work, done + SOONEST * part)), ends[-1]) + 1
        latest = max(int(np.searchsorted(work, done + part)), soonest)
        end = n if latest >= n else soonest + int(np.argmin(crossing[soonest : latest + 1]))
        ends.append(end)
        done = float(work[end - 1])
    return tuple(ends)


def refined_around(ends: Sequence[int], bounds: Sequence[int]) -> tuple[int, ...]:
    """Returns the pieces, with single units within one piece of each of the bounds."""
    fine = {0, ends[-1]}
    for bound in bounds[1:-1]:
        place = bisect_right(ends, bound) - 1
        fine |= set(range(ends[max(0, place - 1)], ends[min(len(ends) - 1, place + 1)] + 1))
    return tuple(sorted({*ends, *fine}))


def between_blocks(graph: ModelGraph) -> tuple[int, ...]:
    """Returns the cuts that no repeated block of the model is on both sides of, with 0 and the end.

    A block is an item of the outermost list of modules, as `layers.7`.
    """
    blocks = [match and match.group() for match in (_BLOCK.match(unit.name) for unit in graph.units)]
    inner = (k for k, (a, b) in enumerate(pairwise(blocks), 1) if a is None or a != b)
    return (0, *inner, len(graph.units))


def coarse_graph(graph: ModelGraph, ends: Sequence[int]) -> ModelGraph:
    """Returns the model with its pieces as units; the fingerprint stays the model's."""
    units = (_merged(index, graph.units[a:b]) for index, (a, b) in enumerate(pairwise(ends)))
    values = (_moved(value, ends) for value in graph.values)
    crossing = tuple(v for v in values if v.consumers)
    fields = {name: getattr(graph, name) for name in ModelGraph.model_fields}
    return ModelGraph.model_validate(fields | {"units": tuple(units), "values": crossing})


def coarse_profile(profile: Profile, ends: Sequence[int]) -> Profile:
    """Returns the costs of the pieces."""
    units = tuple(_added(profile.units[a:b]) for a, b in pairwise(ends))
    return profile.model_copy(update={"units": units})


def _merged(index: int, units: Sequence[Unit]) -> Unit:
    if len(units) == 1:
        return units[0].model_copy(update={"index": index})
    return Unit(
        index=index,
        name=units[0].name,
        kind=PIECE,
        parameters=tuple(dict.fromkeys(name for u in units for name in u.parameters)),
        buffer_bytes=sum(u.buffer_bytes for u in units),
        flops=sum(u.flops for u in units),
        moved_bytes=sum(u.moved_bytes for u in units),
        saved_bytes=sum(u.saved_bytes for u in units),
        workspace_bytes=max(u.workspace_bytes for u in units),
        saved_input_bytes=sum(u.saved_input_bytes for u in units),
        saved_small_bytes=sum(u.saved_small_bytes for u in units),
        backward_workspace_bytes=max(u.backward_workspace_bytes for u in units),
        waiting_bytes=sum(u.waiting_bytes for u in units),
        weight_sum_bytes=max(u.weight_sum_bytes for u in units),
        cast_bytes=sum(u.cast_bytes for u in units),
        lasting_bytes=sum(u.lasting_bytes for u in units),
        forward=_works(u.forward for u in units),
        backward_input=_works(u.backward_input for u in units),
        backward_weight=_works(u.backward_weight for u in units),
    )


def _works(passes: Iterable[tuple[Work, ...]]) -> tuple[Work, ...]:
    return tuple(work for works in passes for work in works)


def _moved(value: Value, ends: Sequence[int]) -> Value:
    producer = _piece(value.producer, ends)
    users = sorted({_piece(unit, ends) for unit in value.consumers} - {producer})
    saved_by = _piece(value.saved_by, ends) if value.saved_by >= 0 else -1
    return value.model_copy(update={"producer": producer, "consumers": tuple(users), "saved_by": saved_by})


def _piece(unit: int, ends: Sequence[int]) -> int:
    return bisect_right(ends, unit) - 1


def _added(costs: Sequence[UnitCost]) -> UnitCost:
    if len(costs) == 1:
        return costs[0]
    return costs[0].model_copy(
        update={
            "forward_s": sum(c.forward_s for c in costs),
            "backward_input_s": sum(c.backward_input_s for c in costs),
            "backward_weight_s": sum(c.backward_weight_s for c in costs),
            "saved_bytes": sum(c.saved_bytes for c in costs),
            "workspace_bytes": max(c.workspace_bytes for c in costs),
            "flops": sum(c.flops for c in costs),
        }
    )
