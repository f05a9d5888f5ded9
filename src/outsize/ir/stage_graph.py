"""Problem: may these units be these stages?

Stages are parts of the model's graph. Any parts are allowed, as long as their numbers ascend

    along values      a stage comes after those it receives values from: the quotient graph has no cycle
    along gradients   the users of a value with a gradient, or of a trainable parameter, taken in the model's
                      own order, never go back to a stage with a lower number

The second law is exactness (law 2): one process adds the gradients of a value from its last user to its
first, so the partial sum is threaded from stage to stage in that order, and a stage is visited once.

    x used by a, b, c in this order      a in 1, b in 2, c in 2     2 -> 1: as one process adds
                                         a in 1, b in 2, c in 1     refused: c + b + a, but not c + a + b

Within a stage units keep the model's order, so everything else is as in one process. Complexity: O(units +
users of all values). Oracle: tests/unit/ir/test_stage_graph.py; by bits:
tests/parity/test_branched_stages.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from outsize.errors import BadPlan
from outsize.ir.graph import ModelGraph


def in_stages(owners: Sequence[int]) -> tuple[int, ...]:
    """Returns the units, one stage after the other; within a stage in their order."""
    return tuple(sorted(range(len(owners)), key=owners.__getitem__))


def check_quotient(graph: ModelGraph, owners: Sequence[int]) -> None:
    """Raises BadPlan unless `owners[unit]`, the stages, ascend along values and along gradients."""
    for value in graph.values:
        for user in value.consumers:
            if owners[user] < owners[value.producer]:
                raise _against_the_flow(graph, owners, value.producer, user)
    for what, users in summed(graph):
        for earlier, later in pairwise(users):
            if owners[later] < owners[earlier]:
                raise _out_of_order(graph, owners, what, earlier, later)


def summed(graph: ModelGraph) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields each name whose gradient several units add to, with these in the model's order, the producer
    first.
    """
    for value in graph.values:
        if value.requires_grad:
            yield graph.units[value.producer].name, (value.producer, *value.consumers)
    users: dict[str, list[int]] = {}
    for unit in graph.units:
        for name in dict.fromkeys(graph.parameter_of[n].name for n in unit.parameters):
            users.setdefault(name, []).append(unit.index)
    for name, indices in users.items():
        if len(indices) > 1 and graph.parameter_of[name].trainable:
            yield name, tuple(indices)


def _against_the_flow(graph: ModelGraph, owners: Sequence[int], maker: int, user: int) -> BadPlan:
    names = graph.units[maker].name, graph.units[user].name
    return BadPlan(
        f"stage {owners[user]} takes a value from stage {owners[maker]}, which comes after it",
        numbers=f"{names[0]!r} of stage {owners[maker]} makes it, {names[1]!r} of stage {owners[user]} uses "
        "it",
        next_step="number the stages so that each comes after those it takes values from; where two need "
        "each other, make them one",
    )


def _out_of_order(graph: ModelGraph, owners: Sequence[int], what: str, earlier: int, later: int) -> BadPlan:
    names = graph.units[earlier].name, graph.units[later].name
    return BadPlan(
        f"the gradient of {what!r} cannot be added up over these stages in the order of one process",
        numbers=f"{names[0]!r} uses it first, in stage {owners[earlier]}, then {names[1]!r}, in stage "
        f"{owners[later]}",
        next_step=f"put {names[1]!r} into stage {owners[earlier]} or a later one",
    )
