"""Problem: when are a stage's weights whole, if replicas share them (ZeRO-3, FSDP)?

`with_gathers` takes a lowered schedule. A stage's weights are gathered (UNSHARD) while the rank computes with
those before them, and given up (RESHARD) where its next compute action needs others; each backward's
gradients are scattered (REDUCE_GRAD) before that. So two stages are whole at a time, the one at work and the
next. Three stages of one rank, one microbatch:

    0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2REDUCE_GRAD 2RESHARD 0UNSHARD 1B0 ..

Sends go first: another rank waits for them. A stage that uses a tied weight needs its owner's, too, where
that is on the same rank (from another one it gets a copy).

Sources: FSDP2's unshard and reshard, arXiv 2304.11277, sec. 3.3; `_add_unshard_reshard` of
torch.distributed.pipelining, which looks ahead over three stages and reduces once a step: with blocks for
stages, one ahead hides as much, and gradients that are reduced at once are never whole for more than a block.
Complexity: O(actions). Oracle: tests/unit/schedules/test_gathers.py plays every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.schedules.message import SENDS, Edges

Needs = Mapping[int, frozenset[int]]


def with_gathers(schedule: Schedule, uses: Edges) -> Schedule:
    """The lowered schedule with UNSHARD, RESHARD and REDUCE_GRAD.

    `uses`: (owner, user), where a stage uses sharded weights of its own or of another one.
    """
    rank_of, needs = schedule.rank_of, {stage: frozenset[int]() for stage in schedule.rank_of}
    for owner, user in uses:
        if rank_of[owner] == rank_of[user]:
            needs[user] |= {owner}
    rows = tuple(tuple(_row(row, needs)) for row in schedule.actions)
    return Schedule(schedule.name, schedule.microbatches, rows)


def _row(row: Sequence[Action], needs: Needs) -> Iterable[Action]:
    later = [needs[a.stage] for a in row if a.kind in COMPUTE and needs[a.stage]][1:]
    whole, ending = frozenset[int](), list[Action]()
    for action in row:
        if action.kind not in SENDS:
            yield from ending
            ending = []
        if action.kind in COMPUTE and needs[action.stage]:
            now, then = needs[action.stage], later.pop(0) if later else frozenset[int]()
            yield from (
                Action(stage, Kind.UNSHARD) for stage in (*sorted(now - whole), *sorted(then - now - whole))
            )
            ending = [Action(stage, Kind.RESHARD) for stage in sorted((whole | now) - then)]
            if action.kind in (Kind.B, Kind.W) and action.stage in now:
                ending.insert(0, Action(action.stage, Kind.REDUCE_GRAD))
            whole = then
        yield action
    yield from ending
