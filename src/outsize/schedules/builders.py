"""Builds a compute-only schedule by its name: the rows of its record (families.py), one for each rank."""

from __future__ import annotations

from outsize.errors import BadOption
from outsize.ir.schedule import Action, Schedule
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


def row_of(name: str, rank: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """Returns one row of a schedule with a stage on each rank."""
    return tuple(_row_builder(family_of(name))(rank, stages, microbatches, stages))


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
