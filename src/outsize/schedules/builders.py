"""Builds a compute-only schedule by its name: the rows of its record (families.py), one for each rank."""

from __future__ import annotations

from outsize.errors import BadOption
from outsize.ir.schedule import Action, Schedule
from outsize.schedules.families import CHUNKED, COMPOSED, families, family_of
from outsize.schedules.family import Family, RowBuilder


def build(name: str, stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
    """Returns the schedule `name` for `stages` stages and `microbatches` microbatches.

    `ranks` is the number of stages unless the schedule has several stages on a rank. Raises BadOption when
    the name is not known, a count is less than one or the stages cannot be put on the ranks.
    """
    family = family_of(name)
    row = _row_builder(family)
    rank_count = stages if ranks is None else ranks
    for what, count in (("stages", stages), ("microbatches", microbatches), ("ranks", rank_count)):
        _at_least_one(what, count)
    if not family.allows(stages, rank_count):
        raise _not_placed(name, stages, rank_count)
    rows = (row(rank, stages, microbatches, rank_count) for rank in range(rank_count))
    return Schedule(name, microbatches, tuple(tuple(row) for row in rows))


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
