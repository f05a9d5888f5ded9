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

`with_activation_copies` adds the copies of what autograd saves in stages that offload: OFFLOAD_F begins when
the next compute does, and FETCH_B one compute before the backward (vDNN, Rhu et al., arXiv 1602.08124). A
microbatch whose backward comes within two computes stays on the device. One stage, three microbatches:

    cell   1   2           3   4           5         6   7           8         9   10        11  12
    rank 0 0F0 0OFFLOAD_F0 0F1 0OFFLOAD_F1 0FETCH_B0 0F2 0OFFLOAD_F2 0FETCH_B1 0B0 0FETCH_B2 0B1 0B2

`with_value_copies` adds the copies of what stages pass on, around every compute; the runtime leaves out
values that a near compute needs. Two stages, one microbatch:

    cell   1         2   3           4         5   6           7         8   9           10
    rank 0 1FETCH_F0 0F0 0OFFLOAD_F0 1FETCH_B0 1F0 1OFFLOAD_F0 0FETCH_B0 1B0 1OFFLOAD_B0 0B0

It takes any row of compute actions. With room for k stages those stay that are wanted next (Belady 1966).
`places` colours stages, two that are there together differ: a stage has the same place whenever it comes,
so what autograd has saved of its weights is there again in the backward.
Complexity: O(actions x room + stages^2). Oracles: tests/unit/schedules/test_offload_schedule.py re-draws the
pictures, counts what moves, and breaks schedules that `check_loads` must refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.schedules.grid import window

# Two stages are loaded at a time: the one that computes and the next one.
ROOM: Final = 2
Key = tuple[int, int]
"""Is a stage and a microbatch."""
_BACKWARD: Final = frozenset({Kind.B, Kind.I})


def with_loads(schedule: Schedule, room: int = ROOM) -> Schedule:
    """Returns the lowered schedule with LOAD and UNLOAD of every stage; at most `room` >= 2 stages are
    loaded.
    """
    rows = tuple(tuple(_loaded(row, room)) for row in schedule.actions)
    return schedule.with_rows(rows)


def with_activation_copies(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Returns the schedule with OFFLOAD_F and FETCH_B of what autograd saves in these stages; forwards
    without a backward save nothing.
    """
    rows = tuple(tuple(_with_activation_copies(row, stages)) for row in schedule.actions)
    return schedule.with_rows(rows)


def with_value_copies(schedule: Schedule) -> Schedule:
    """Returns the schedule with an OFFLOAD behind each compute action, when the next one begins, and a FETCH
    one compute before the next one that needs anything.
    """
    rows = tuple(tuple(_with_value_copies(row)) for row in schedule.actions)
    return schedule.with_rows(rows)


def computed(copy: Action) -> Action:
    """Returns the compute action that has left or needs what an OFFLOAD or a FETCH copies."""
    kind = Kind.F if copy.kind in (Kind.OFFLOAD_F, Kind.FETCH_F) else Kind.B
    return Action(copy.stage, kind, copy.microbatch)


def places(row: Sequence[Action]) -> dict[int, int]:
    """Returns the place (a number) of each stage on the device, using as few places as possible."""
    loaded_together: dict[int, set[int]] = {a.stage: set() for a in row if a.kind is Kind.LOAD}
    for loaded in _loaded_after_each(row):
        for stage in loaded:
            loaded_together[stage] |= loaded - {stage}
    place_of: dict[int, int] = {}
    for stage, others in loaded_together.items():
        taken_places = {place_of[other] for other in others if other in place_of}
        place_of[stage] = next(place for place in range(len(loaded_together)) if place not in taken_places)
    return place_of


def check_loads(schedule: Schedule, room: int = ROOM) -> None:
    """Checks that every stage is loaded while it computes, at most `room` are, and none stays. Raises
    InvalidSchedule.
    """
    for rank, row in enumerate(schedule.actions):
        loaded: set[int] = set()
        for column, action in enumerate(row):
            fault = _fault(action, loaded, room)
            if fault:
                raise InvalidSchedule(
                    fault[0],
                    numbers=f"rank {rank}, cell {column + 1}; loaded: {sorted(loaded) or 'none'}",
                    next_step=fault[1],
                    picture=window(schedule, rank, column),
                )
            _move(action, loaded)
        if loaded:
            raise InvalidSchedule(
                f"stage {min(loaded)} is not unloaded",
                numbers=f"rank {rank}; loaded at its end: {sorted(loaded)}",
                next_step=f"add {min(loaded)}UNLOAD",
            )


def _fault(action: Action, loaded: set[int], room: int) -> tuple[str, str] | None:
    stage, is_loaded = action.stage, action.stage in loaded
    if action.kind in COMPUTE and not is_loaded:
        return f"{action} runs while stage {stage} is not loaded", f"put {stage}LOAD before it"
    if action.kind is Kind.LOAD and is_loaded:
        return f"{action} loads what is there", "keep the first one"
    if action.kind is Kind.LOAD and len(loaded) == room:
        return f"{action} finds no place: there are {room}", f"unload stage {min(loaded)} before it"
    if action.kind is Kind.UNLOAD and not is_loaded:
        return f"{action} unloads what is not there", f"drop it, or put {stage}LOAD before it"
    return None


def _move(action: Action, loaded: set[int]) -> None:
    if action.kind is Kind.LOAD:
        loaded.add(action.stage)
    elif action.kind is Kind.UNLOAD:
        loaded.discard(action.stage)


def _loaded_after_each(row: Iterable[Action]) -> Iterator[set[int]]:
    """Yields which stages are loaded, after each action."""
    loaded: set[int] = set()
    for action in row:
        _move(action, loaded)
        yield set(loaded)


def _loaded(row: Sequence[Action], room: int) -> Iterator[Action]:
    ahead, runs = _runs(row)
    order = [stage for stage, _ in runs]
    yield from ahead
    loaded: list[int] = []
    for position, (_, actions) in enumerate(runs):
        for missing in [s for s in _next(order, position, room) if s not in loaded]:
            loaded.append(missing)
            yield Action(missing, Kind.LOAD)
        yield from actions
        staying = _next(order, position + 1, room)
        for unneeded in [s for s in loaded if s not in staying]:
            loaded.remove(unneeded)
            yield Action(unneeded, Kind.UNLOAD)


def _runs(row: Iterable[Action]) -> tuple[list[Action], list[tuple[int, list[Action]]]]:
    """Returns what precedes the first compute action, and the runs of one stage's compute actions.

    Sends and receives among them and after them belong to the run; they need no weights.
    """
    ahead, runs = list[Action](), list[tuple[int, list[Action]]]()
    for action in row:
        if action.kind in COMPUTE and (not runs or runs[-1][0] != action.stage):
            runs.append((action.stage, []))
        (runs[-1][1] if runs else ahead).append(action)
    return ahead, runs


def _with_activation_copies(row: Sequence[Action], stages: Collection[int]) -> Iterator[Action]:
    awaited, away = {_key(a) for a in row if a.kind in _BACKWARD and a.stage in stages}, set[Key]()
    for action, before, after in _with_neighbours(row):
        near = {_key(a) for a in (action, *after) if a.kind in _BACKWARD}
        for left in before:
            if left.kind is Kind.F and _key(left) in awaited - near:
                away.add(_key(left))
                yield Action(left.stage, Kind.OFFLOAD_F, left.microbatch)
        for needing in after:
            if needing.kind in _BACKWARD and _key(needing) in away:
                yield Action(needing.stage, Kind.FETCH_B, needing.microbatch)
        yield action


def _with_value_copies(row: Sequence[Action]) -> Iterator[Action]:
    for action, before, after in _with_neighbours(row):
        for left in before:
            kind = Kind.OFFLOAD_F if left.kind is Kind.F else Kind.OFFLOAD_B
            yield Action(left.stage, kind, left.microbatch)
        for needing in after:
            kind = Kind.FETCH_F if needing.kind is Kind.F else Kind.FETCH_B
            yield Action(needing.stage, kind, needing.microbatch)
        yield action


def _with_neighbours(row: Sequence[Action]) -> Iterator[tuple[Action, Sequence[Action], Sequence[Action]]]:
    """Yields each action with the compute actions before and after it: at most one each, none for actions
    that do not compute.
    """
    computes, done = [action for action in row if action.kind in COMPUTE], 0
    for action in row:
        if action.kind in COMPUTE:
            yield action, computes[max(done - 1, 0) : done], computes[done + 1 : done + 2]
            done += 1
        else:
            yield action, (), ()


def _key(action: Action) -> Key:
    return action.stage, action.microbatch


def _next(order: Sequence[int], position: int, room: int) -> dict[int, None]:
    """Returns the next `room` different stages from position `at` on."""
    stages = dict[int, None]()
    for stage in islice(order, position, None):
        if len(stages) == room:
            break
        stages[stage] = None
    return stages
