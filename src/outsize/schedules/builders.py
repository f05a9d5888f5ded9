"""Problem: in which order does each stage run the forwards and backwards of its microbatches?

    naive        one microbatch at a time: what accumulation over a model spread on devices does anyway
    gpipe        all forwards, then all backwards              Huang et al., arXiv 1811.06965, sec. 2.3
    1f1b         a backward as soon as one is there            PipeDream-flush: Narayanan et al., arXiv
                 (same bubble as gpipe, fewer in flight)       2006.09503 sec. 3.2, arXiv 2104.04473 sec. 2.2
    interleaved  several stages on a rank, rank r has          Narayanan et al., arXiv 2104.04473 sec. 2.2
                 r, r + p, ...: a bubble as much smaller
    zero-bubble  the weight's gradient (W) waits until         ZB-H1: Qi et al., arXiv 2401.10241 sec. 2.1
                 there is nothing better to do
    zero-bubble-v  the same with two stages on a rank, in a    ZB-V: Qi et al., arXiv 2405.15362 sec. 4,
                 V: the last rank turns back                   arXiv 2401.10241 sec. 6

Symbols: p -> ranks, v -> stages on a rank, m -> microbatches; p = stages and v = 1 but for interleaved and
zero-bubble-v.
With equal stages of f + b seconds a step lasts m p (f + b) under naive, (m + p - 1)(f + b) under gpipe and
1f1b, v m (f + b) + (p - 1)(f + b) under interleaved if p divides m, and with b = i + w under zero-bubble
m (f + i + w) + (p - 1)(f + i - w) if f, i >= w and m >= 2 p - 1. Microbatches whose activations are alive
at once on rank s: 1, m, min(p - s, m), (v - 1) p + 2 (p - s) - 1 chunks, min(p, m), and at most v p chunks.
Deviation: GPipe runs its backwards from the last microbatch to the first. Ours run from the first to
the last, as those of every schedule here: on each stage forwards and backwards both run in ascending
microbatch order, so that `.grad` accumulates in the order of the plain loop and is bit-equal to it.
The makespan is the same. Complexity: O(p m). Oracles: the pictures below, re-drawn by
tests/unit/schedules/test_builders.py, and the closed forms in tests/unit/planner/test_simulate.py.

The rows hold compute actions only. `lower` adds the sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise
from typing import Final

from outsize.errors import BadOption
from outsize.ir.schedule import ZERO_BUBBLE_V, Action, Kind, Schedule, placed
from outsize.schedules.compose import IN_A_V, listed
from outsize.schedules.job import Job, StageCost


def build(name: str, stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
    """The compute-only schedule `name` (one of NAMES) for so many stages and microbatches.

    `ranks` is the number of stages unless the schedule has several stages on a rank (ir.schedule.placed).
    Raises BadOption when the name is not known, a count is less than one or the ranks do not divide the
    stages.
    """
    row = _ROWS.get(name)
    if row is None:
        raise _unknown(name)
    places = stages if ranks is None else ranks
    for what, count in (("stages", stages), ("microbatches", microbatches), ("ranks", places)):
        _at_least_one(what, count)
    _check_ranks(name, stages, places)
    rows = (row(rank, stages, microbatches, places) for rank in range(places))
    return Schedule(name, microbatches, tuple(tuple(row) for row in rows))


def row_of(name: str, rank: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """One row of a schedule with a stage on each rank."""
    return tuple(_ROWS[name](rank, stages, microbatches, stages))


def naive_row(rank: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
    """F and B of a microbatch, then the next one; nothing overlaps in a chain of stages.

    time   0   1   2   3   4   5   6   7   8   9   10  11
    rank 0 0F0 .   .   .   .   0B0 0F1 .   .   .   .   0B1
    rank 1 .   1F0 .   .   1B0 .   .   1F1 .   .   1B1 .
    rank 2 .   .   2F0 2B0 .   .   .   .   2F1 2B1 .   .
    """
    own = range(rank, stages, ranks)
    for microbatch in range(microbatches):
        yield from (Action(stage, Kind.F, microbatch) for stage in own)
        yield from (Action(stage, Kind.B, microbatch) for stage in reversed(own))


def gpipe_row(rank: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
    """All forwards, then all backwards, both in ascending order (GPipe's own backwards descend).

    Where one rank has all stages this is layer by layer, for weights that come and go (offload.py).

    time   0   1   2   3   4   5   6   7   8   9   10  11
    rank 0 0F0 0F1 0F2 0F3 .   .   .   .   0B0 0B1 0B2 0B3
    rank 1 .   1F0 1F1 1F2 1F3 .   .   1B0 1B1 1B2 1B3 .
    rank 2 .   .   2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 .   .

    Several stages on each rank, breadth first (Lamy-Poirier, arXiv 2211.05953; torch's LoopedBFS): a rank's
    weights move once a pass there, too, and the bubble is that of interleaved.

    time   0   1   2   3   4   5   6   7   8   9   10  11  12  13
    rank 0 0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B0 2B1 2B2 0B0 0B1 0B2
    rank 1 .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2 .
    """
    own = range(rank, stages, ranks)
    yield from (Action(stage, Kind.F, microbatch) for stage in own for microbatch in range(microbatches))
    backwards = ((stage, mb) for stage in reversed(own) for mb in range(microbatches))
    yield from (Action(stage, Kind.B, microbatch) for stage, microbatch in backwards)


def one_f_one_b_row(stage: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
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


def interleaved_row(rank: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
    """1f1b over chunks: p microbatches through the rank's first stage, the same through its second, ...

    Forwards take the stages in ascending order, backwards in descending order. Where p does not divide m
    the groups are larger. Two stages on each of two ranks, four microbatches:

    time   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    rank 0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
    rank 1 .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .
    """
    own = range(rank, stages, ranks)
    rounds = max(1, microbatches // ranks)
    starts = [-(-microbatches * r // rounds) for r in range(rounds + 1)]
    groups = [range(*pair) for pair in pairwise(starts)]
    forwards = [Action(stage, Kind.F, mb) for group in groups for stage in own for mb in group]
    backwards = [Action(stage, Kind.B, mb) for group in groups for stage in reversed(own) for mb in group]
    ahead = min((len(own) - 1) * len(groups[0]) + 2 * (ranks - rank) - 1, len(forwards))
    yield from forwards[:ahead]
    for count, backward in enumerate(backwards):
        yield backward
        yield from forwards[ahead + count : ahead + count + 1]


def zero_bubble_row(stage: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
    """1f1b whose backward is split: I hands the gradient on at once, W of stage s comes s microbatches later.

    So every stage holds at most p microbatches, as stage 0 of 1f1b does, and W fills what were bubbles.

    time   0   1   2   3   4   5   6   7   8   9   10  11  12  13
    rank 0 0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    in_flight = min(stages - stage, microbatches)
    yield from (Action(stage, Kind.F, microbatch) for microbatch in range(in_flight))
    for microbatch in range(microbatches):
        yield Action(stage, Kind.I, microbatch)
        if microbatch >= stage:
            yield Action(stage, Kind.W, microbatch - stage)
        if microbatch + in_flight < microbatches:
            yield Action(stage, Kind.F, microbatch + in_flight)
    late = range(max(0, microbatches - stage), microbatches)
    yield from (Action(stage, Kind.W, microbatch) for microbatch in late)


def zero_bubble_v_row(rank: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
    """Stage s of the V is on rank s, and from stage p on they turn back: rank 0 has the first and the last.

    A list schedule (compose.py) for stages of F = I = W: backwards first, W in the gaps, at most v p chunks
    in flight, as many bytes as rank 0 of 1f1b holds. Two ranks, four stages, three microbatches:

    time   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18
    rank 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 .   0I2 0W2
    rank 1 .   1F0 2F0 1F1 2F1 2I0 1I0 1W0 1F2 2I1 1I1 1W1 2F2 2W0 2W1 2I2 1I2 1W2 2W2
    """
    yield from _in_a_v(stages, microbatches, ranks)[rank]


@lru_cache(maxsize=64)
def _in_a_v(stages: int, microbatches: int, ranks: int) -> tuple[tuple[Action, ...], ...]:
    down = dict.fromkeys(pairwise(range(stages)), 0.0)
    up = dict.fromkeys(pairwise(reversed(range(stages))), 0.0)
    places, costs = placed(ZERO_BUBBLE_V, stages, ranks), (StageCost(1.0, 2.0, 1.0),) * stages
    return listed(Job(places, microbatches, costs, down, up, (1,) * stages, (stages,) * ranks), IN_A_V)


_ROWS: dict[str, Callable[[int, int, int, int], Iterable[Action]]] = {
    "naive": naive_row,
    "gpipe": gpipe_row,
    "1f1b": one_f_one_b_row,
    "interleaved": interleaved_row,
    "zero-bubble": zero_bubble_row,
    ZERO_BUBBLE_V: zero_bubble_v_row,
}
NAMES = tuple(_ROWS)
# Those that gain by several stages on a rank; gpipe can have them, for weights that come and go.
SEVERAL: Final = ("interleaved", ZERO_BUBBLE_V)
_CHUNKED: Final = ("gpipe", *SEVERAL)


def _unknown(name: str) -> BadOption:
    if name in ("auto", "custom"):
        return BadOption(
            f"schedule {name!r} is made for one plan, and this plan holds no actions",
            numbers="0 rows in `actions`",
            next_step="outsize plan MODEL --schedule auto, or --schedule FILE.csv",
        )
    return BadOption(
        f"schedule {name!r} is not known",
        numbers=f"known schedules: {', '.join(NAMES)}",
        next_step="--schedule 1f1b",
    )


def _check_ranks(name: str, stages: int, ranks: int) -> None:
    """Only some schedules have several stages on a rank, and as many on each."""
    one = name == "naive" and ranks == 1
    if stages == ranks or one or (name in _CHUNKED and stages % ranks == 0):
        return
    raise BadOption(
        f"{stages} stages cannot be put on {ranks} ranks under {name}",
        numbers=f"as many stages on each rank, and one but for {', '.join(_CHUNKED)}",
        next_step=f"--stages {-(-stages // ranks) * ranks} --schedule interleaved",
    )


def _at_least_one(what: str, count: int) -> None:
    if count < 1:
        raise BadOption(
            f"a schedule needs at least one of its {what}",
            numbers=f"{what} = {count}",
            next_step=f"--{what} 1",
        )
