"""Returns the schedule of a plan: built by its name, or read from the rows of actions that the plan holds.

A row is what a rank computes, in torch's grammar: `0F0,0F1,2F0,2I0,...`. Rows are of a whole step; a step of
fewer microbatches leaves out the actions of the last ones. The rest is a valid schedule too: no action waits
for one of another microbatch except through the order of its rank, and leaving out keeps that order.
"""

from __future__ import annotations

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import COMPUTE, CUSTOM_NAME, Schedule, parse_row
from outsize.schedules.builders import build
from outsize.schedules.check import check_compute


def planned(
    name: str, stages: int, microbatches: int, ranks: int, actions: tuple[str, ...] = (), slices: int = 1
) -> Schedule:
    """Returns the compute-only schedule, as `build` makes it where there are no actions.

    Raises InvalidSchedule when the actions are no step of `stages` stages and `microbatches` microbatches on
    these ranks, BadOption as `build`.
    """
    if not actions:
        return build(name, stages, microbatches, ranks, slices)
    whole = read(actions, name, slices)
    if (whole.stages, whole.ranks) != (stages, ranks) or whole.microbatches < microbatches:
        actual = f"{whole.stages} stages on {whole.ranks} ranks with {whole.microbatches} microbatches"
        raise InvalidSchedule(
            "the actions of the schedule are none of this plan",
            numbers=f"{actual}, the plan has {stages} on {ranks} with {microbatches}",
            next_step="--stages, --microbatches as the schedule has them, or another schedule",
        )
    return first(whole, microbatches)


def read(rows: tuple[str, ...], name: str = CUSTOM_NAME, slices: int = 1) -> Schedule:
    """Returns the schedule of these rows without sends and receives, which `lower` makes again; microbatches
    of the rows are slices where each has several.

    Raises InvalidSchedule, which marks the cell.
    """
    parsed = []
    for rank, row in enumerate(rows):
        try:
            parsed.append(parse_row(row))
        except ValueError as error:
            cells = [cell.strip() for cell in row.split(",")]
            bad = next((n for n, cell in enumerate(cells, 1) if repr(cell) in str(error)), len(cells))
            raise InvalidSchedule(
                str(error),
                numbers=f"row {rank + 1}, cell {bad} of {len(cells)}",
                next_step="correct the cell; outsize schedule grammar: 0F0, 0B0, or 0I0 and 0W0",
            ) from None
    actions = tuple(tuple(a for a in row if a.kind in COMPUTE) for row in parsed)
    counts = [a.microbatch for row in actions for a in row]
    schedule = Schedule(name, max(counts, default=-1) + 1, actions, slices)
    check_compute(schedule)
    return schedule


def first(schedule: Schedule, microbatches: int) -> Schedule:
    """Returns the schedule of the first `microbatches` microbatches."""
    rows = (tuple(a for a in row if a.microbatch < microbatches) for row in schedule.actions)
    return Schedule(schedule.name, microbatches, tuple(rows), schedule.slices)


def written(schedule: Schedule) -> tuple[str, ...]:
    """Returns the rows of a compute-only schedule, as a plan holds them."""
    return tuple(schedule.to_csv().splitlines())
