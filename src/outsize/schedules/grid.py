"""Draws schedules as text: time x rank for documents, a window around one cell for errors.

`draw` plays the compute actions in unit time (forward and backward take one slot each, every stage waits for
its neighbour in a chain); `window` shows cells by position, so it also works on a schedule that could never
run. Both give one line per rank and no line has trailing blanks.
"""

from __future__ import annotations

from collections.abc import Sequence

from outsize.ir.schedule import Action, Kind, Schedule

HERE = "<-- HERE"
IDLE = "."


def draw(schedule: Schedule) -> str:
    """Returns the compute actions as a grid of time x rank, one slot each.

    Raises ValueError when the actions of a chain of stages would wait for each other forever.
    """
    rows = schedule.compute().actions
    slots: list[list[str]] = [[] for _ in rows]
    done: set[Action] = set()
    next_column, last_stage = [0] * len(rows), schedule.stages - 1
    while any(column < len(row) for column, row in zip(next_column, rows, strict=True)):
        started = [_next_ready(row, next_column[rank], done, last_stage) for rank, row in enumerate(rows)]
        if not any(started):
            raise ValueError("the schedule deadlocks; check_compute and check say where")
        for rank, action in enumerate(started):
            slots[rank].append(str(action) if action else IDLE)
            next_column[rank] += action is not None
        done.update(action for action in started if action)
    return _table("time", range(len(slots[0]) if slots else 0), slots)


def listing(schedule: Schedule) -> str:
    """Returns all cells by position, transfers included; columns are numbered from 1 and are not times."""
    rows = [[str(action) for action in row] for row in schedule.actions]
    return _table("cell", range(1, max(map(len, rows), default=0) + 1), rows)


def window(schedule: Schedule, rank: int, column: int, around: int = 3) -> str:
    """Returns the cells of all ranks within `around` columns of a cell, which is marked `<-- HERE`.

    `column` may be one past the end of the row: the place where something is missing.
    """
    rows = [[str(action) for action in row] for row in schedule.actions]
    if column == len(rows[rank]):
        rows[rank].append("(end)")
    rows[rank][column] += f" {HERE}"
    low, high = max(0, column - around), column + around + 1
    shown = [row[low:high] for row in rows]
    return _table("cell", range(low + 1, low + 1 + max(map(len, shown))), shown)


def _next_ready(row: Sequence[Action], column: int, done: set[Action], last_stage: int) -> Action | None:
    if column >= len(row):
        return None
    ready = all(done & one_of for one_of in _before(row[column], last_stage))
    return row[column] if ready else None


def _before(action: Action, last_stage: int) -> list[set[Action]]:
    """Returns sets of actions; a chain of stages finishes one of each set before this action."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        return [{Action(stage - 1, Kind.F, microbatch)}] if stage else []
    if action.kind is Kind.W:
        return [{Action(stage, Kind.I, microbatch)}]
    if stage == last_stage:
        return [{Action(stage, Kind.F, microbatch)}]
    return [{Action(stage + 1, kind, microbatch) for kind in (Kind.B, Kind.I)}]


def _table(corner: str, numbers: Sequence[int], rows: Sequence[Sequence[str]]) -> str:
    lines = [[corner, *map(str, numbers)], *([f"rank {i}", *row] for i, row in enumerate(rows))]
    columns = max(map(len, lines))
    filled = [line + [""] * (columns - len(line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*filled, strict=True)]
    padded = (" ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in filled)
    return "\n".join(padded)
