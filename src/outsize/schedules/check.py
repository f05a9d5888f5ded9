"""Problem: is this list of actions a training step that ends?

Nothing here trusts a builder: a schedule may come from a CSV that someone edited. `check_compute` looks
at F, B, I and W alone; `check` takes a lowered schedule with the edges it has to serve and also
    pairs       every SEND has its RECV and every RECV its SEND, and an edge needs them
    places      a SEND is after the compute action that produces, a RECV before the one that needs it
    fifo        a rank receives from another in the order in which that one sends; activations and
                gradients are separate (NCCL has no tags; each of the two has its own communicator)
    deadlock    plays the rows: SEND and RECV (which posts) never block, compute waits until the
                sends it needs have been executed; if no rank can continue, the schedule hangs
    queues      no circle of messages that wait behind each other in ordered queues (queues.py)
The first fault is raised as InvalidSchedule with the numbers and the grid around the cell.
Complexity: O(ranks x actions). Oracle: tests/unit/schedules/test_schedule_check.py breaks good
schedules in each of these ways, and random edits of good ones agree with a brute-force player.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple, final

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import COMPUTE, TRANSFER, Action, Kind, Schedule, together
from outsize.schedules.grid import window
from outsize.schedules.message import SENDS, Edges, Ends, Message, message_of, messages
from outsize.schedules.queues import QueueOf, circle_of, pairs


@final
class Cell(NamedTuple):
    """A place in the grid; columns count from 0 within a rank's row."""

    rank: int
    column: int


Cells = Mapping[Action, Cell]


def check_compute(schedule: Schedule) -> None:
    """Checks that each stage, on one rank, runs F and then B, or F, I and W, of all microbatches in order.

    Of a microbatch in slices, backwards come from the last slice to the first. Raises InvalidSchedule;
    transfers in the schedule are ignored.
    """
    cells = _cells(schedule)
    _check_placement(schedule)
    _check_complete(schedule, cells)
    _check_order(schedule, cells)


def check(
    schedule: Schedule, forward_edges: Edges, backward_edges: Edges, step_edges: Edges = frozenset()
) -> None:
    """Checks that a lowered schedule is complete, in order, serves exactly these edges and does not deadlock.

    Edges are (source stage, destination stage), as for `lower`. Raises InvalidSchedule.
    """
    check_compute(schedule)
    cells = _cells(schedule)
    needed = messages(schedule, forward_edges, backward_edges, step_edges)
    ends = Ends(schedule)
    for message in needed:
        _check_places(schedule, cells, message, ends)
    rank_of = schedule.rank_of
    crossing = frozenset(m for m in needed if rank_of[m.source] != rank_of[m.destination])
    _check_pairs(schedule, cells, crossing)
    _check_fifo(schedule, cells)
    _check_progress(schedule)
    check_queues(schedule)


def check_queues(schedule: Schedule, queue_of: QueueOf = pairs) -> None:
    """Checks that a lowered schedule ends where messages wait in these queues; raises InvalidSchedule."""
    circle = circle_of(schedule, queue_of)
    if not circle:
        return
    first = circle[0]
    cell = Cell(first.rank, schedule.actions[first.rank].index(first.action))
    waits = ", ".join(
        f"rank {one.rank}'s {one.action} waits for rank {other.rank}'s {other.action}"
        for one, other in zip(circle, (*circle[1:], first), strict=True)
    )
    step = "give each pair of ranks a queue for each direction and kind"
    raise _fault(schedule, cell, "messages wait for each other in their queues", waits, step)


def check_waits(schedule: Schedule, forward_edges: Edges, backward_edges: Edges) -> None:
    """Checks that a compute-only schedule ends along these edges; raises InvalidSchedule where a rank waits
    forever.

    `check` does so after lowering; here errors name the cells of the file that somebody has written.
    """
    check_compute(schedule)
    needs, ends = defaultdict[Action, set[Action]](set), Ends(schedule)
    for message in messages(schedule, forward_edges, backward_edges, frozenset()):
        needs[ends.consumer(message)].add(ends.producer(message))
    done, moving = set[Action](), True
    rows = [deque(together(row)) for row in schedule.actions]
    while moving:
        moving = False
        for row in rows:
            while row and all(needs[action] <= done for action in row[0]):
                done.update(row.popleft())
                moving = True
    stuck = [next(a for a in row[0] if not needs[a] <= done) for row in rows if row]
    if stuck:
        cells = [_cell_of(schedule, action) for action in stuck]
        missing = [min(needs[action] - done, key=str) for action in stuck]
        waits = (f"rank {c.rank} waits in {a} for {m}" for c, a, m in zip(cells, stuck, missing, strict=True))
        what = f"{stuck[0]} waits for {missing[0]}, which never runs"
        step = f"put {stuck[0]} after what {missing[0]} needs from rank {cells[0].rank}"
        raise _fault(schedule, cells[0], what, ", ".join(waits), step)


def _cell_of(schedule: Schedule, action: Action) -> Cell:
    rank = schedule.rank_of[action.stage]
    return Cell(rank, schedule.actions[rank].index(action))


def _cells(schedule: Schedule) -> dict[Action, Cell]:
    """Returns the cell of each compute action and transfer.

    Raises InvalidSchedule when one appears twice.
    """
    cells: dict[Action, Cell] = {}
    for cell, action in _walk(schedule):
        if action in cells:
            first = cells[action]
            where = f"first at rank {first.rank}, cell {first.column + 1}"
            raise _fault(schedule, cell, f"{action} appears twice", where, "keep one of them")
        cells[action] = cell
    return cells


def _walk(schedule: Schedule) -> Iterator[tuple[Cell, Action]]:
    for rank, row in enumerate(schedule.actions):
        for column, action in enumerate(row):
            if action.kind in COMPUTE | TRANSFER:
                yield Cell(rank, column), action


def _check_placement(schedule: Schedule) -> None:
    rank_of: dict[int, int] = {}
    for cell, action in _walk(schedule):
        rank = rank_of.setdefault(action.stage, cell.rank)
        if rank != cell.rank:
            what = f"stage {action.stage} acts on ranks {rank} and {cell.rank}"
            raise _fault(schedule, cell, what, "", f"move {action} to rank {rank}")
        if action.microbatch >= schedule.microbatches:
            what = f"{action} names a microbatch that the step does not have"
            numbers = f"microbatches 0 to {schedule.microbatches - 1}"
            raise _fault(schedule, cell, what, numbers, f"take {action} out")


def _check_complete(schedule: Schedule, cells: Cells) -> None:
    rank_of = schedule.rank_of
    if schedule.microbatches % schedule.slices:
        what = f"a step of {schedule.microbatches} slices is none of whole microbatches"
        numbers = f"{schedule.slices} slices in each"
        raise _fault(schedule, Cell(0, 0), what, numbers, "add the missing slices of the last one")
    for stage in range(max(rank_of, default=-1) + 1):
        rank = rank_of.get(stage, schedule.ranks - 1)
        for microbatch in range(schedule.microbatches):
            whole, split = (Action(stage, kind, microbatch) for kind in (Kind.B, Kind.I))
            if whole in cells and split in cells:
                why = "a backward is whole (B) or split (I and W)"
                raise _fault(schedule, cells[split], f"{split} repeats {whole}", why, f"drop {split}")
            backward = (Kind.I, Kind.W) if split in cells else (Kind.B,)
            for kind in (Kind.F, *backward):
                action = Action(stage, kind, microbatch)
                if action not in cells:
                    end = Cell(rank, len(schedule.actions[rank]))
                    raise _fault(schedule, end, f"{action} is missing", "", f"add {action} to rank {rank}")


def _check_order(schedule: Schedule, cells: Cells) -> None:
    last: dict[tuple[int, Kind], Action] = {}
    why = "gradients accumulate in microbatch order"
    if schedule.slices > 1:
        why = f"the {schedule.slices} slices of a microbatch go forward in order, and back from the last one"
    for cell, action in _walk(schedule):
        if action.kind not in COMPUTE:
            continue
        for kind in _ORDERED[action.kind]:
            before = last.setdefault((action.stage, kind), action)
            if _turn(schedule, before, kind) > _turn(schedule, action, kind):
                raise _fault(schedule, cell, f"{action} runs after {before}", why, f"put it before {before}")
            last[action.stage, kind] = action
        first = Action(action.stage, _BEFORE[action.kind], action.microbatch)
        if cells.get(first, Cell(cell.rank, -1)) > cell:
            where = f"{first} is cell {cells[first].column + 1}"
            raise _fault(schedule, cell, f"{action} runs before {first}", where, f"put it after {first}")


def _turn(schedule: Schedule, action: Action, kind: Kind) -> int:
    """Returns the place of an action among those of this kind."""
    is_forward = kind is Kind.F
    return action.microbatch if is_forward else schedule.backward_place(action.microbatch)


# The orders that an action is part of: B adds to weight gradients as W does, to input gradients as I does.
_ORDERED = {Kind.F: (Kind.F,), Kind.B: (Kind.I, Kind.W), Kind.I: (Kind.I,), Kind.W: (Kind.W,)}
_BEFORE = {Kind.F: Kind.F, Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}


def _check_places(schedule: Schedule, cells: Cells, message: Message, ends: Ends) -> None:
    """Checks the cells of one message: producer < SEND, RECV < consumer; or producer < consumer on one
    rank.
    """
    producer, consumer = ends.producer(message), ends.consumer(message)
    if cells[producer].rank == cells[consumer].rank:
        _check_before(schedule, cells, producer, consumer)
        return
    if message.receive not in cells:
        what = f"{consumer} needs {message.receive}, which is missing"
        step = "lower the schedule with the edges of its plan"
        raise _fault(schedule, cells[consumer], what, "", step)
    _check_before(schedule, cells, message.receive, consumer)
    if message.send in cells:
        _check_before(schedule, cells, producer, message.send)


def _check_before(schedule: Schedule, cells: Cells, first: Action, second: Action) -> None:
    if cells[first] > cells[second]:
        what = f"{second} needs {first}, which comes after it"
        where = f"{first} is cell {cells[first].column + 1}"
        raise _fault(schedule, cells[second], what, where, f"put {first} before {second}")


def _check_pairs(schedule: Schedule, cells: Cells, crossing: frozenset[Message]) -> None:
    for cell, action in _walk(schedule):
        if action.kind not in TRANSFER:
            continue
        message = message_of(action)
        partner = message.receive if action.kind in SENDS else message.send
        if partner not in cells:
            raise _fault(schedule, cell, f"{action} has no {partner}", "", f"add {partner} or drop {action}")
        if message not in crossing:
            what = f"{action} moves nothing"
            why = f"no edge {message.source} -> {message.destination} between two ranks needs it"
            raise _fault(schedule, cell, what, why, f"drop {action} and {partner}")


def _check_fifo(schedule: Schedule, cells: Cells) -> None:
    """Checks that the k-th send of a kind from rank a to rank b is the k-th receive of b from a."""
    sent: defaultdict[tuple[int, int, Kind], list[Message]] = defaultdict(list)
    received: defaultdict[tuple[int, int, Kind], list[Message]] = defaultdict(list)
    for _, action in _walk(schedule):
        if action.kind in TRANSFER:
            message = message_of(action)
            pair = cells[message.send].rank, cells[message.receive].rank, message.kind
            (sent if action.kind in SENDS else received)[pair].append(message)
    for pair, queue in sent.items():
        for number, (out, back) in enumerate(zip(queue, received[pair], strict=True), start=1):
            if out != back:
                what = f"rank {pair[1]} posts {back.receive} where rank {pair[0]} sends {out.send}"
                numbers = f"message {number} of {len(queue)} from rank {pair[0]} to rank {pair[1]}"
                step = f"put {out.receive} before {back.receive}"
                raise _fault(schedule, cells[back.receive], what, numbers, step)


def _check_progress(schedule: Schedule) -> None:
    """Plays the rows as far as they go; a circular wait (Coffman) shows as ranks that never finish."""
    needs: defaultdict[Action, set[Message]] = defaultdict(set)
    ends = Ends(schedule)
    for _, action in _walk(schedule):
        if action.kind in TRANSFER and action.kind not in SENDS:
            needs[ends.consumer(message_of(action))].add(message_of(action))
    next_column, sent = [0] * schedule.ranks, set[Message]()
    while any(_advance(row, next_column, rank, sent, needs) for rank, row in enumerate(schedule.actions)):
        pass
    stuck = [Cell(r, next_column[r]) for r, row in enumerate(schedule.actions) if next_column[r] < len(row)]
    if stuck:
        waits = ", ".join(_wait(schedule.actions[c.rank][c.column], c.rank, sent, needs) for c in stuck)
        raise _fault(schedule, stuck[0], "the schedule deadlocks", waits, "break the circle of waits")


def _advance(
    row: tuple[Action, ...],
    next_column: list[int],
    rank: int,
    sent: set[Message],
    needs: dict[Action, set[Message]],
) -> bool:
    start = next_column[rank]
    while next_column[rank] < len(row) and needs.get(row[next_column[rank]], set()) <= sent:
        action = row[next_column[rank]]
        if action.kind in SENDS:
            sent.add(message_of(action))
        next_column[rank] += 1
    return next_column[rank] > start


def _wait(action: Action, rank: int, sent: set[Message], needs: dict[Action, set[Message]]) -> str:
    missing = min(needs[action] - sent)
    return f"rank {rank} waits in {action} for {missing.send}"


def _fault(schedule: Schedule, cell: Cell, what: str, numbers: str, next_step: str) -> InvalidSchedule:
    rank, column = cell
    place = f"rank {rank}, cell {column + 1} of {len(schedule.actions[rank])}"
    return InvalidSchedule(
        what,
        numbers=f"{place}; {numbers}" if numbers else place,
        next_step=next_step,
        picture=window(schedule, rank, column),
    )
