"""Problem: when are a stage's weights whole, if replicas share them (FSDP)?

`with_gathers` takes a lowered schedule. A stage's weights are gathered (UNSHARD) while the rank computes with
those before them, and given up (RESHARD) where its next compute action needs others; each backward's
gradients are scattered (REDUCE_GRAD) before that. So two stages are whole at a time, the one at work and the
next (ZeRO-3). Three stages of one rank, one microbatch:

    0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 1RESHARD 2F0 1UNSHARD 2B0 2REDUCE_GRAD 2RESHARD ..

Or `once` a step (ZeRO-1): given up when no later action needs them, and the sum of all microbatches'
gradients is scattered before that. More is whole, less is sent. Two stages, two microbatches:

    0UNSHARD 1UNSHARD 0F0 1F0 1B0 0B0 0F1 1F1 1B1 1REDUCE_GRAD 1RESHARD 0B1 0REDUCE_GRAD 0RESHARD

Where weights are whole on every replica, `with_reductions` adds REDUCE_GRAD behind the last backward of each
stage alone: its gradients are added up in buckets of BUCKET_BYTES, which leave within that backward.

    1F0 0F0 .. 1B0 1B1 1REDUCE_GRAD 0B1 0REDUCE_GRAD

Sends go first: another rank waits for them. A stage that uses a tied weight needs its owner's, too, where
that is on the same rank (from another one it gets a copy).

Sources: FSDP2's unshard and reshard, arXiv 2304.11277, sec. 3.3 (`once`: reshard_after_forward=False, and
set_requires_gradient_sync for the last microbatch alone); `_add_unshard_reshard` of
torch.distributed.pipelining, which looks ahead over three stages: with blocks for stages, one ahead hides as
much. Complexity: O(actions). Oracle: tests/unit/schedules/test_gathers.py plays every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import or_
from typing import Final

from outsize.ir.schedule import COMPUTE, LEAVING, Action, Kind, Schedule
from outsize.schedules.message import SENDS, Edges

# As those of torch's DDP, arXiv 2006.15704, sec. 3.2.3.
BUCKET_BYTES: Final = 25_000_000
_BACKWARD: Final = frozenset({Kind.B, Kind.I, Kind.W})
_FIRST_HALF: Final = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F}) | LEAVING
_SECOND_HALF: Final = frozenset({Kind.B, Kind.SEND_B, Kind.RECV_B})
Needs = Mapping[int, frozenset[int]]


def with_gathers(schedule: Schedule, uses: Edges, *, once: bool = False) -> Schedule:
    """Returns the lowered schedule with UNSHARD, RESHARD and REDUCE_GRAD, one of each for a stage if `once`.

    `uses` holds (owner, user) where a stage uses sharded weights of its own or of another one.
    """
    needs = _needs(schedule.rank_of, uses)
    rows = tuple(tuple(_row(row, needs, once)) for row in schedule.actions)
    return schedule.with_rows(rows)


def _needs(rank_of: Mapping[int, int], uses: Edges) -> Needs:
    """Returns the stages of its own rank whose weights each stage computes with."""
    needs = {stage: frozenset[int]() for stage in rank_of}
    for owner, user in uses:
        if rank_of[owner] == rank_of[user]:
            needs[user] |= {owner}
    return needs


def end_of_forwards(row: Sequence[Action]) -> int:
    """Returns where the second half of a call's row begins, in which all backwards are: behind the forwards,
    their messages, and what their weights leave by.
    """
    second = next((at for at, action in enumerate(row) if action.kind in _SECOND_HALF), len(row))
    return max((at + 1 for at, action in enumerate(row[:second]) if action.kind in _FIRST_HALF), default=0)


def with_gathers_of_call(schedule: Schedule, uses: Edges, *, once: bool = False) -> Schedule:
    """Returns the lowered schedule of a call with UNSHARD and RESHARD, for each of its halves by itself.

    Between the halves are the user's loss, and perhaps other calls and updates, so weights are divided there.
    Gradients are scattered where the user's backward ends, and not within the row. One stage:

        0UNSHARD 0F0 0F1 0RESHARD | 0UNSHARD 0B1 0B0 0RESHARD
    """
    ends = [end_of_forwards(row) for row in schedule.actions]
    cuts = [(row[:end], row[end:]) for row, end in zip(schedule.actions, ends, strict=True)]
    needs = _needs(schedule.rank_of, uses)
    rows = (
        tuple(a for half in halves for a in _row(half, needs, once) if a.kind is not Kind.REDUCE_GRAD)
        for halves in cuts
    )
    return schedule.with_rows(rows)


def with_reductions(schedule: Schedule) -> Schedule:
    """Returns the schedule with REDUCE_GRAD after the last backward of each stage and the sends that
    follow it.
    """
    rows = tuple(tuple(_reduced(row)) for row in schedule.actions)
    return schedule.with_rows(rows)


def _reduced(row: Sequence[Action]) -> Iterator[Action]:
    last = {a.stage: position for position, a in enumerate(row) if a.kind in _BACKWARD}
    waiting: list[Action] = []
    for position, action in enumerate(row):
        if action.kind is not Kind.SEND_B:
            yield from waiting
            waiting = []
        yield action
        if last.get(action.stage) == position:
            waiting.append(Action(action.stage, Kind.REDUCE_GRAD))
    yield from waiting


def _row(row: Sequence[Action], needs: Needs, once: bool) -> Iterable[Action]:
    next_uses = _coming([needs[a.stage] for a in row if a.kind in COMPUTE and needs[a.stage]], once)
    whole, following = frozenset[int](), tuple[Action, ...]()
    known: dict[_Turn, _Moves] = {}  # Microbatches repeat each other.
    for action in row:
        if action.kind not in SENDS:
            yield from following
            following = ()
        if action.kind in COMPUTE and needs[action.stage]:
            turn = action.kind, action.stage, whole, *next(next_uses)
            if turn not in known:
                known[turn] = _moves(turn, needs[action.stage], once)
            before, following, whole = known[turn]
            yield from before
        yield action
    yield from following


_Turn = tuple[Kind, int, frozenset[int], frozenset[int], frozenset[int]]
"""Is a compute action's kind and stage, the stages that are whole before it, those that the next use needs,
and those that stay whole after it.
"""
_Moves = tuple[tuple[Action, ...], tuple[Action, ...], frozenset[int]]
"""Is what comes before a compute action and what follows it, and the stages that are whole then."""


def _moves(turn: _Turn, needed: frozenset[int], once: bool) -> _Moves:
    kind, own, whole, needed_next, stay_whole = turn
    gathered = *sorted(needed - whole), *sorted(needed_next - needed - whole)
    following = [Action(stage, Kind.RESHARD) for stage in sorted((whole | needed) - stay_whole)]
    last = not once or own not in stay_whole
    if kind in (Kind.B, Kind.W) and own in needed and last:
        following.insert(0, Action(own, Kind.REDUCE_GRAD))
    before = tuple(Action(stage, Kind.UNSHARD) for stage in gathered)
    return before, tuple(following), (whole | needed | needed_next) & stay_whole


def _coming(uses: Sequence[frozenset[int]], once: bool) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Yields, for each use, the stages that the next use needs, and those that stay whole."""
    following = [*uses[1:], frozenset[int]()]
    later = list(accumulate(reversed(following), or_))[::-1]
    return iter(zip(following, later if once else following, strict=True))
