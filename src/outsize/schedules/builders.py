"""Problem: in which order does each stage run the forwards and backwards of its microbatches?

    naive   one microbatch at a time: what accumulation over a model spread on devices does anyway
    gpipe   all forwards, then all backwards              Huang et al., arXiv 1811.06965, sec. 2.3
    1f1b    a backward as soon as one is there             PipeDream-flush: Narayanan et al., arXiv
            (same bubble as gpipe, fewer in flight)        2006.09503 sec. 3.2, arXiv 2104.04473 sec. 2.2

Symbols: p -> stages, m -> microbatches. With equal stages of f + b seconds a step lasts
m p (f + b) under naive and (m + p - 1)(f + b) under the two others; microbatches whose activations
are alive at once on stage s: 1, m and min(p - s, m).
Deviation: GPipe runs its backwards from the last microbatch to the first. Ours run from the first to
the last, as those of every schedule here: on each stage forwards and backwards both run in ascending
microbatch order, so that `.grad` accumulates in the order of the plain loop and is bit-equal to it.
The makespan is the same. Complexity: O(p m). Oracles: the pictures below, re-drawn by
tests/unit/schedules/test_builders.py, and the closed forms in tests/unit/planner/test_simulate.py.

The rows hold compute actions only; stage s lives on rank s. `lower` adds the sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outsize.errors import BadOption
from outsize.ir.schedule import Action, Kind, Schedule


def build(name: str, stages: int, microbatches: int) -> Schedule:
    """The compute-only schedule `name` ('naive', 'gpipe', '1f1b') for p stages and m microbatches.

    Raises BadOption when the name is not known or a count is less than one.
    """
    row = _ROWS.get(name)
    if row is None:
        raise BadOption(
            f"schedule {name!r} is not known",
            numbers=f"known schedules: {', '.join(NAMES)}",
            next_step="--schedule 1f1b",
        )
    _at_least_one("stages", stages)
    _at_least_one("microbatches", microbatches)
    return Schedule(name, microbatches, tuple(tuple(row(s, stages, microbatches)) for s in range(stages)))


def naive_row(stage: int, stages: int, microbatches: int) -> Iterable[Action]:
    """F and B of a microbatch, then the next one; nothing overlaps in a chain of stages.

    time   0   1   2   3   4   5   6   7   8   9   10  11
    rank 0 0F0 .   .   .   .   0B0 0F1 .   .   .   .   0B1
    rank 1 .   1F0 .   .   1B0 .   .   1F1 .   .   1B1 .
    rank 2 .   .   2F0 2B0 .   .   .   .   2F1 2B1 .   .
    """
    for microbatch in range(microbatches):
        yield Action(stage, Kind.F, microbatch)
        yield Action(stage, Kind.B, microbatch)


def gpipe_row(stage: int, stages: int, microbatches: int) -> Iterable[Action]:
    """All forwards, then all backwards, both in ascending order (GPipe's own backwards descend).

    time   0   1   2   3   4   5   6   7   8   9   10  11
    rank 0 0F0 0F1 0F2 0F3 .   .   .   .   0B0 0B1 0B2 0B3
    rank 1 .   1F0 1F1 1F2 1F3 .   .   1B0 1B1 1B2 1B3 .
    rank 2 .   .   2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 .   .
    """
    yield from (Action(stage, Kind.F, microbatch) for microbatch in range(microbatches))
    yield from (Action(stage, Kind.B, microbatch) for microbatch in range(microbatches))


def one_f_one_b_row(stage: int, stages: int, microbatches: int) -> Iterable[Action]:
    """Fill with p - s forwards, then one backward and one forward in turn, then the last backwards.

    time   0   1   2   3   4   5   6   7   8   9   10  11
    rank 0 0F0 0F1 0F2 .   .   0B0 0F3 0B1 .   0B2 .   0B3
    rank 1 .   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 .   1B3 .
    rank 2 .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 .   .
    """
    in_flight = min(stages - stage, microbatches)
    yield from (Action(stage, Kind.F, microbatch) for microbatch in range(in_flight))
    for microbatch in range(microbatches):
        yield Action(stage, Kind.B, microbatch)
        if microbatch + in_flight < microbatches:
            yield Action(stage, Kind.F, microbatch + in_flight)


_ROWS: dict[str, Callable[[int, int, int], Iterable[Action]]] = {
    "naive": naive_row,
    "gpipe": gpipe_row,
    "1f1b": one_f_one_b_row,
}
NAMES = tuple(_ROWS)


def _at_least_one(what: str, count: int) -> None:
    if count < 1:
        raise BadOption(
            f"a schedule needs at least one of its {what}",
            numbers=f"{what} = {count}",
            next_step=f"--{what} 1",
        )
