"""Problem: a stage holds many blocks, but of sharded weights one block at a time is to be whole.

`by_blocks` makes a stage of each block, on the rank where it was; the schedule's actions become those of the
blocks, one after the other. Two stages of two blocks each, two microbatches, 1f1b:

    rank 0   0F0         0F1         0B0         0B1               as the plan has it
    rank 0   0F0 1F0     0F1 1F1     1B0 0B0     1B1 0B1           as it runs
    rank 1   2F0 3F0     3B0 2B0     2F1 3F1     3B1 2B1

A block is that of ir/units/recompute_segments.py; what is outside of blocks (embeddings, heads, a U-Net's
convolutions) is divided so that no piece outweighs the largest block or unit. These are the pieces of the
model, the same for every plan (`pieces_of`, by which planner/memory/sharded.py counts); a stage has what it
has of them, and pieces without weights go with their neighbour.
Complexity: O(units + actions). Oracle: tests/unit/schedules/test_refine.py, drawn by hand; the numbers of one
process, tests/dist/test_sharded_processes.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan, Stage
from outsize.ir.schedule import CUSTOM_NAME, Action, Kind, Schedule
from outsize.ir.units.names import compress_units
from outsize.ir.units.recompute_segments import blocks
from outsize.policies.activations import KEEP
from outsize.schedules.builders import planned, written


def by_blocks(plan: Plan, graph: ModelGraph) -> Plan:
    """Returns the plan as it runs: sharded weights block by block; any other plan unchanged.

    Raises what `Plan.owners` raises.
    """
    if not plan.shards:
        return plan
    owners = plan.owners(graph)
    of_stage = [[u for u, at in enumerate(owners) if at == stage] for stage in range(len(plan.stages))]
    pieces = pieces_of_stages(graph, of_stage)
    whole = planned(plan.schedule, len(plan.stages), plan.microbatches, plan.axes.pp, plan.actions)
    refined = divided(whole, list(map(len, pieces)))
    names = [unit.name for unit in graph.units]
    stages = [
        _stage(plan, stage, names, piece)
        for stage, parts_of_stage in enumerate(pieces)
        for piece in parts_of_stage
    ]
    actions = written(refined)
    updates = {"stages": tuple(stages), "schedule": CUSTOM_NAME, "actions": actions, "expected": None}
    return plan.model_copy(update=updates)


def divided(schedule: Schedule, counts: Sequence[int]) -> Schedule:
    """Returns the compute-only schedule with each stage divided into `counts[stage]` parts, numbered in
    order.
    """
    numbers = iter(range(sum(counts)))
    parts = [[next(numbers) for _ in range(count)] for count in counts]
    rows = tuple(tuple(_spelled(row, parts)) for row in schedule.actions)
    return Schedule(CUSTOM_NAME, schedule.microbatches, rows)


def pieces_of_stages(graph: ModelGraph, stages: Iterable[Sequence[int]]) -> list[list[list[int]]]:
    """Returns the pieces of each stage as lists of units; `stages` are the units of each stage, ascending."""
    piece_of, size = pieces_of(graph), _sizes(graph)
    return [
        _joined((list(group) for _, group in groupby(units, piece_of.__getitem__)), size) for units in stages
    ]


def _spelled(row: Iterable[Action], parts: Sequence[Sequence[int]]) -> Iterator[Action]:
    """Yields each action of a stage as the actions of its parts; backwards in descending order."""
    for action in row:
        own = parts[action.stage]
        for part in own if action.kind is Kind.F else reversed(own):
            yield Action(part, action.kind, action.microbatch)


def _stage(plan: Plan, stage: int, names: Sequence[str], piece: Sequence[int]) -> Stage:
    """Returns some units of a stage as a stage of their own, with the stage's recompute policy."""
    policy = plan.activation_policy(stage)
    recomputed = plan.recomputed(stage, names) if policy.lists_units else frozenset()
    chosen = [unit for unit in piece if unit in recomputed]
    return Stage(
        units=compress_units(names, piece),
        device=plan.stages[stage].device,
        recompute=KEEP.name if policy.lists_units and not chosen else policy.name,
        recomputed=compress_units(names, chosen),
    )


def pieces_of(graph: ModelGraph) -> list[int]:
    """Returns the number of each unit's piece, ascending."""
    size, block_of = _sizes(graph), blocks([unit.name for unit in graph.units])
    weight = defaultdict[str, int](int)
    for unit, block in enumerate(block_of):
        weight[block] += size[unit] if block else 0
    most = max([*size, *weight.values()])
    return list(_numbered(block_of, size, most))


def _numbered(block_of: Sequence[str], size: Sequence[int], most: int) -> Iterator[int]:
    """Yields piece numbers: a piece ends with its block; outside of blocks, before it has more than `most`
    bytes.
    """
    number = held = 0
    for unit, block in enumerate(block_of):
        other = unit > 0 and block != block_of[unit - 1]
        full = not block and size[unit] > 0 and held + size[unit] > most
        if unit > 0 and (other or full):
            number, held = number + 1, 0
        held += size[unit]
        yield number


def _sizes(graph: ModelGraph) -> list[int]:
    """Returns the bytes of the weights that each unit owns."""
    size = [0] * len(graph.units)
    for name, unit in graph.owner_of.items():
        size[unit] += graph.parameter_of[name].size_bytes
    return size


def _joined(pieces: Iterable[list[int]], size: Sequence[int]) -> list[list[int]]:
    """Joins pieces without weights to the end of the piece before, or to the start of the next."""
    joined: list[list[int]] = []
    for piece in pieces:
        if joined and (not any(size[u] for u in piece) or not any(size[u] for u in joined[-1])):
            joined[-1] = joined[-1] + piece
        else:
            joined.append(piece)
    return joined
