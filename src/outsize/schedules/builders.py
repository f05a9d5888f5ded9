"""Builds a compute-only schedule by its name: the rows of its record (families.py), one for each rank.

The schedule of a plan is built so, or read from the rows of actions that the plan holds (`planned`).
A row is what a rank computes, in torch's grammar: `0F0,0F1,2F0,2I0,...`. Rows are of a whole step; a step of
fewer microbatches leaves out the actions of the last ones. The rest is a valid schedule too: no action waits
for one of another microbatch except through the order of its rank, and leaving out keeps that order.
"""

from __future__ import annotations

from outsize.errors import BadOption, InvalidSchedule
from outsize.ir.schedule import COMPUTE, CUSTOM_NAME, Action, Schedule, parse_row
from outsize.schedules.check import check_compute
from outsize.schedules.families import CHUNKED, COMPOSED, DEFAULT, families, family_of, sliced
from outsize.schedules.family import Family, RowBuilder


def build(name: str, stages: int, microbatches: int, ranks: int | None = None, slices: int = 1) -> Schedule:
    """Returns the schedule `name` for `stages` stages and `microbatches` microbatches.

    `ranks` is the number of stages unless the schedule has several stages on a rank. With `slices` each
    microbatch's sequences go through the stages in so many. Raises BadOption when the name is not known, a
    count is less than one, the stages cannot be put on the ranks, or the schedule knows no slices.
    """
    family = family_of(name)
    row = _row_builder(family) if slices == 1 else _sliced_row_builder(family, slices)
    rank_count = stages if ranks is None else ranks
    for what, count in (("stages", stages), ("microbatches", microbatches), ("ranks", rank_count)):
        _at_least_one(what, count)
    if not family.allows(stages, rank_count):
        raise _not_placed(name, stages, rank_count)
    rows = (row(rank, stages, microbatches, rank_count) for rank in range(rank_count))
    return Schedule(name, microbatches * slices, tuple(tuple(row) for row in rows), slices)


def row_of(name: str, rank: int, stages: int, microbatches: int, slices: int = 1) -> tuple[Action, ...]:
    """Returns one row of a schedule with a stage on each rank, as `build`."""
    family = family_of(name)
    row = _row_builder(family) if slices == 1 else _sliced_row_builder(family, slices)
    return tuple(row(rank, stages, microbatches, stages))


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


def _row_builder(family: Family) -> RowBuilder:
    if family.row is None:
        raise BadOption(
            f"schedule {family.name!r} is made for one plan, and this plan holds no actions",
            numbers="0 rows in `actions`",
            next_step=f"outsize plan MODEL --schedule {COMPOSED.name}, or --schedule FILE.csv",
        )
    return family.row


def _sliced_row_builder(family: Family, slices: int) -> RowBuilder:
    row = family.sliced_row
    if row is None:
        raise BadOption(
            f"schedule {family.name!r} knows no slices of sequences",
            numbers=f"slices={slices}; schedules that do: {', '.join(sliced())}",
            next_step=f"--schedule {DEFAULT.name}",
        )
    return lambda rank, stages, microbatches, ranks: row(rank, stages, microbatches, ranks, slices)


def _not_placed(name: str, stages: int, ranks: int) -> BadOption:
    several = ", ".join(family.name for family in families() if family.several_stages)
    return BadOption(
        f"{stages} stages cannot be put on {ranks} ranks under {name}",
        numbers=f"as many stages on each rank, and one but for {several}",
        next_step=f"--stages {-(-stages // ranks) * ranks} --schedule {CHUNKED.name}",
    )


def _at_least_one(what: str, count: int) -> None:
    if count < 1:
        raise BadOption(
            f"a schedule needs at least one of its {what}",
            numbers=f"{what} = {count}",
            next_step=f"--{what} 1",
        )
