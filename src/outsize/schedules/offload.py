"""Problem: a device has room for some stages. In which order do stages run, and when do weights come and go?

Layer-major: all microbatches of a stage before the next stage, so weights move once for each pass and not
once for each microbatch (L2L, Pudipeddi et al., arXiv 2002.05645). Three stages, two microbatches:

    time   0   1   2   3   4   5   6   7   8   9   10  11
    rank 0 0F0 0F1 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1

`with_loads` adds LOAD, which launches the copies of a stage's weights, and UNLOAD, behind which its place may
be written, and its gradients go to the host. The next stage is loaded while one computes (double buffering,
ZeRO-Infinity, Rajbhandari et al., arXiv 2104.07857, sec. 6.2); what is still there when a pass turns stays:

    cell   1     2     3   4       5     6   7   8   9       10    11  12      13  14
    rank 0 0LOAD 1LOAD 0F0 0UNLOAD 2LOAD 1F0 2F0 2B0 2UNLOAD 0LOAD 1B0 1UNLOAD 0B0 0UNLOAD

With room for all of them every stage comes once, all before the first one computes, and goes when its last
backward is over: then only gradients and updated weights move (ZeRO-Offload, Ren et al., arXiv 2101.06840):

    cell   1     2     3     4   5   6   7   8       9   10      11  12
    rank 0 0LOAD 1LOAD 2LOAD 0F0 1F0 2F0 2B0 2UNLOAD 1B0 1UNLOAD 0B0 0UNLOAD

It takes any row of compute actions. With room for k stages those stay that are wanted next (Belady 1966).
`places` colours stages, two that are there together differ: a stage has the same place whenever it comes,
so what autograd has saved of its weights is there again in the backward.
Complexity: O(actions x room + stages^2). Oracles: tests/unit/schedules/test_offload_schedule.py re-draws the
pictures, counts what moves, and breaks schedules that `check_loads` must refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.schedules.grid import window

# The stage at work and the next one.
ROOM = 2


def with_loads(schedule: Schedule, room: int = ROOM) -> Schedule:
    """The lowered schedule with the loads and unloads of every stage, of which `room` >= 2 are there."""
    rows = tuple(tuple(_loaded(row, room)) for row in schedule.actions)
    return Schedule(schedule.name, schedule.microbatches, rows)


def places(row: Sequence[Action]) -> dict[int, int]:
    """Stage -> the number of its place on the device, of as few as `check_loads` allows where it can be."""
    beside: dict[int, set[int]] = {a.stage: set() for a in row if a.kind is Kind.LOAD}
    for there in _there(row):
        for stage in there:
            beside[stage] |= there - {stage}
    found: dict[int, int] = {}
    for stage, others in beside.items():
        taken = {found[other] for other in others if other in found}
        found[stage] = next(place for place in range(len(beside)) if place not in taken)
    return found


def check_loads(schedule: Schedule, room: int = ROOM) -> None:
    """Every stage is there while it computes, at most `room` are, none stays. Raises InvalidSchedule."""
    for rank, row in enumerate(schedule.actions):
        there: set[int] = set()
        for column, action in enumerate(row):
            fault = _fault(action, there, room)
            if fault:
                raise InvalidSchedule(
                    fault[0],
                    numbers=f"rank {rank}, cell {column + 1}; loaded: {sorted(there) or 'none'}",
                    next_step=fault[1],
                    picture=window(schedule, rank, column),
                )
            _move(action, there)
        if there:
            raise InvalidSchedule(
                f"stage {min(there)} is not unloaded",
                numbers=f"rank {rank}; loaded at its end: {sorted(there)}",
                next_step=f"add {min(there)}UNLOAD",
            )


def _fault(action: Action, there: set[int], room: int) -> tuple[str, str] | None:
    stage, here = action.stage, action.stage in there
    if action.kind in COMPUTE and not here:
        return f"{action} runs while stage {stage} is not loaded", f"put {stage}LOAD before it"
    if action.kind is Kind.LOAD and here:
        return f"{action} loads what is there", "keep the first one"
    if action.kind is Kind.LOAD and len(there) == room:
        return f"{action} finds no place: there are {room}", f"unload stage {min(there)} before it"
    if action.kind is Kind.UNLOAD and not here:
        return f"{action} unloads what is not there", f"drop it, or put {stage}LOAD before it"
    return None


def _move(action: Action, there: set[int]) -> None:
    if action.kind is Kind.LOAD:
        there.add(action.stage)
    elif action.kind is Kind.UNLOAD:
        there.discard(action.stage)


def _there(row: Iterable[Action]) -> Iterator[set[int]]:
    """Which stages are loaded, after each action."""
    there: set[int] = set()
    for action in row:
        _move(action, there)
        yield set(there)


def _loaded(row: Sequence[Action], room: int) -> Iterator[Action]:
    ahead, runs = _runs(row)
    order = [stage for stage, _ in runs]
    yield from ahead
    there: list[int] = []
    for at, (_, actions) in enumerate(runs):
        for wanted in [s for s in _next(order, at, room) if s not in there]:
            there.append(wanted)
            yield Action(wanted, Kind.LOAD)
        yield from actions
        staying = _next(order, at + 1, room)
        for gone in [s for s in there if s not in staying]:
            there.remove(gone)
            yield Action(gone, Kind.UNLOAD)


def _runs(row: Iterable[Action]) -> tuple[list[Action], list[tuple[int, list[Action]]]]:
    """Neighbouring compute actions of a stage with what is sent and received among them and behind them, for
    which no weights are needed; and what there is before the first.
    """
    ahead, runs = list[Action](), list[tuple[int, list[Action]]]()
    for action in row:
        if action.kind in COMPUTE and (not runs or runs[-1][0] != action.stage):
            runs.append((action.stage, []))
        (runs[-1][1] if runs else ahead).append(action)
    return ahead, runs


def _next(order: Sequence[int], at: int, room: int) -> dict[int, None]:
    """The stages that are wanted from there on, the first `room` of them."""
    found = dict[int, None]()
    for stage in islice(order, at, None):
        if len(found) == room:
            break
        found[stage] = None
    return found
