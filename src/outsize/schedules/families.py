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
    1f1b-overlap, dualpipe-v  forwards inside of backwards, where ranks divide layers: overlapped.py
    auto         composed by the planner for one plan (compose.py)
    custom       written by a person
    forward-only no backwards: what evaluation and generation run

Sequences that go through the stages in slices (`Schedule.slices`) have rows of their own (SlimPipe, arXiv
2504.14519): a slice is in flight where a microbatch was. Under 1f1b stage s holds n + p - s - 1 slices, of
which n are a microbatch, so the first stage holds hardly more than one microbatch instead of p.

Each has one record (family.py) with its row builder and all that the planner needs to know of it. To add a
schedule, write both here and enter the record with `register`; then `make docs` writes its golden rows, and
its picture goes into tests/unit/schedules/test_builders.py. The smallest example is TOY in
tests/unit/schedules/test_families.py.

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
tests/unit/schedules/test_builders.py, and the closed forms in tests/unit/planner/simulation/test_simulate.py.

The rows hold compute actions only. `lower` adds the sends and receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from outsize.errors import BadOption
from outsize.ir.schedule import COMPOSED_NAME, CUSTOM_NAME, SCHEDULES, Action, Kind, last_slice_first
from outsize.schedules.compose import IN_A_V, listed
from outsize.schedules.family import ChainLaw, Family, StagePath
from outsize.schedules.job import Job, StageCost
from outsize.schedules.overlapped import dual_pipe_v_row, overlapped_row

# The numbers of stages on a rank that the search tries where several make the bubble smaller.
CHUNKS: Final = (2, 4)


def family_of(name: str) -> Family:
    """Returns the record of the schedule of this name.

    Raises BadOption when no schedule has it.
    """
    family = SCHEDULES.get(name)
    if isinstance(family, Family):
        return family
    raise BadOption(
        f"schedule {name!r} is not known",
        numbers=f"known schedules: {', '.join(built())}",
        next_step=f"--schedule {DEFAULT.name}",
    )


def families() -> tuple[Family, ...]:
    """Returns all records, in the order in which they were registered."""
    return tuple(family for family in SCHEDULES.values() if isinstance(family, Family))


def built() -> tuple[str, ...]:
    """Returns the names of the training schedules that are built by their name alone."""
    return tuple(family.name for family in families() if family.row is not None and family.trains)


def sliced() -> tuple[str, ...]:
    """Returns the names of the schedules that know slices of sequences."""
    return tuple(family.name for family in families() if family.sliced_row is not None)


def offered() -> tuple[str, ...]:
    """Returns the names that the command line offers."""
    return tuple(family.name for family in families() if family.asked_by_name)


def searched(on_cpu: bool, measured: bool) -> tuple[str, ...]:
    """Returns the schedules that the search tries by itself, the preferred one first."""
    candidates = (family for family in families() if family.searched(on_cpu, measured))
    return tuple(family.name for family in sorted(candidates, key=lambda family: family.preference))


def preferred(names: Sequence[str]) -> str:
    """Returns the schedule of these that is taken where nothing else tells them apart."""
    return min(names, key=lambda name: family_of(name).preference)


def register(family: Family) -> Family:
    """Adds a schedule: from here on it can be planned, priced, checked and run by its name."""
    SCHEDULES[family.name] = family
    return family


# -- the rows -------------------------------------------------------------------------------------------


def naive_row(rank: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
    """Yields F and B of a microbatch, then of the next one; nothing overlaps in a chain of stages.

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
    """Yields all forwards, then all backwards, both in ascending order (GPipe's own backwards descend).

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
    """Yields p - s forwards, then one backward and one forward in turn, then the last backwards.

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


def naive_sliced_row(rank: int, stages: int, microbatches: int, ranks: int, slices: int) -> Iterable[Action]:
    """Yields the slices of a microbatch forward, and backward from the last one on, then the next microbatch.

    time   0   1   2   3   4   5   6   7   8   9   10  11
    rank 0 0F0 0F1 .   .   0B1 0B0 0F2 0F3 .   .   0B3 0B2
    rank 1 .   1F0 1F1 1B1 1B0 .   .   1F2 1F3 1B3 1B2 .
    """
    own = range(rank, stages, ranks)
    for first in range(0, microbatches * slices, slices):
        units = range(first, first + slices)
        yield from (Action(stage, Kind.F, unit) for unit in units for stage in own)
        yield from (Action(stage, Kind.B, unit) for unit in reversed(units) for stage in reversed(own))


def gpipe_sliced_row(rank: int, stages: int, microbatches: int, ranks: int, slices: int) -> Iterable[Action]:
    """Yields all slices forward, then those of each microbatch backward, from its last one on.

    time   0   1   2   3   4   5   6   7   8   9
    rank 0 0F0 0F1 0F2 0F3 .   .   0B1 0B0 0B3 0B2
    rank 1 .   1F0 1F1 1F2 1F3 1B1 1B0 1B3 1B2 .
    """
    own, units = range(rank, stages, ranks), range(microbatches * slices)
    yield from (Action(stage, Kind.F, unit) for stage in own for unit in units)
    order = [last_slice_first(unit, slices) for unit in units]
    yield from (Action(stage, Kind.B, unit) for stage in reversed(own) for unit in order)


def one_f_one_b_sliced_row(
    stage: int, stages: int, microbatches: int, ranks: int, slices: int
) -> Iterable[Action]:
    """Yields n + p - s - 1 forwards, then one backward and one forward in turn, then the last backwards.

    A backward may begin when the last slice of its microbatch has gone forward. Two slices, two microbatches:

    time   0   1   2   3   4   5   6   7   8   9
    rank 0 0F0 0F1 0F2 .   0B1 0F3 0B0 .   0B3 0B2
    rank 1 .   1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2 .
    """
    count = microbatches * slices
    in_flight = min(slices + stages - stage - 1, count)
    yield from (Action(stage, Kind.F, unit) for unit in range(in_flight))
    for at in range(count):
        yield Action(stage, Kind.B, last_slice_first(at, slices))
        if at + in_flight < count:
            yield Action(stage, Kind.F, at + in_flight)


def forward_row(rank: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
    """Yields the forwards of all microbatches through a rank's stages, one stage after the other.

    time   0   1   2   3   4   5
    rank 0 0F0 0F1 0F2 0F3 .   .
    rank 1 .   1F0 1F1 1F2 1F3 .
    rank 2 .   .   2F0 2F1 2F2 2F3
    """
    own = range(rank, stages, ranks)
    yield from (Action(stage, Kind.F, microbatch) for stage in own for microbatch in range(microbatches))


def interleaved_row(rank: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
    """Yields 1f1b over chunks: p microbatches through the rank's first stage, then through its second, ...

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
    """Yields 1f1b with split backwards: I sends the gradient on at once, W of stage s runs s microbatches
    later.

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
    """Yields a row of the V: stage s is on rank s, and from stage p on they turn back to rank 0.

    A list schedule (compose.py) for stages of F = I = W: backwards first, W in the gaps, at most v p chunks
    in flight, as many bytes as rank 0 of 1f1b holds. Two ranks, four stages, three microbatches:

    time   0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18
    rank 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 .   0I2 0W2
    rank 1 .   1F0 2F0 1F1 2F1 2I0 1I0 1W0 1F2 2I1 1I1 1W1 2F2 2W0 2W1 2I2 1I2 1W2 2W2
    """
    yield from _v_rows(stages, microbatches, ranks)[rank]


@lru_cache(maxsize=64)
def _v_rows(stages: int, microbatches: int, ranks: int) -> tuple[tuple[Action, ...], ...]:
    down = dict.fromkeys(pairwise(range(stages)), 0.0)
    up = dict.fromkeys(pairwise(reversed(range(stages))), 0.0)
    places, costs = in_a_v(stages, ranks), (StageCost(1.0, 2.0, 1.0),) * stages
    return listed(Job(places, microbatches, costs, down, up, (1,) * stages, (stages,) * ranks), IN_A_V)


# -- where stages are placed, and how many of them are on a rank ----------------------------------------


def round_robin(stages: int, ranks: int) -> tuple[int, ...]:
    """Returns rank s mod p for each stage s."""
    return tuple(stage % ranks for stage in range(stages))


def in_a_v(stages: int, ranks: int) -> tuple[int, ...]:
    """Returns the ranks from the first to the last and back again."""
    turn = [*range(ranks), *reversed(range(ranks))]
    return tuple(turn[stage % len(turn)] for stage in range(stages))


def _one(ranks: int, microbatches: int) -> tuple[int, ...]:
    return (1,)


def _several(ranks: int, microbatches: int) -> tuple[int, ...]:
    """Returns several stages only when all ranks are busy with the first ones, since they help only then."""
    return CHUNKS if 1 < ranks <= microbatches else ()


def _two(ranks: int, microbatches: int) -> tuple[int, ...]:
    return (2,) if ranks > 1 else (1,)


# -- how many microbatches are in flight ----------------------------------------------------------------


def _one_in_flight(depth: int, microbatches: int) -> int:
    return 1


def _all_in_flight(depth: int, microbatches: int) -> int:
    return microbatches


def _depth_in_flight(depth: int, microbatches: int) -> int:
    return min(depth, microbatches)


def _of_each_chunk(depth: int, ranks: int, microbatches: int) -> int:
    """Returns what a rank has of each chunk before a backward of its last one: p of those before."""
    return min(2 * depth - 1, ranks, microbatches)


# -- the critical path through a stage (planner/bounds/step_time.py) ------------------------------------


def _sequential_path_s(path: StagePath) -> Any:
    return path.microbatches * (path.before + path.once + path.behind)


def _forwards_first_path_s(path: StagePath) -> Any:
    """Returns the path's seconds when all forwards run before any backward."""
    return path.before + path.microbatches * path.once + path.behind


def _one_f_one_b_path_s(path: StagePath) -> Any:
    m = path.microbatches
    paced = path.once + path.behind + (m - 1) * path.backward + (m - path.in_flight) * path.forward
    return path.before + path.larger(m * path.once, path.either(path.linked, paced, 0.0))


def _without_bubble_path_s(path: StagePath) -> Any:
    return path.before + path.microbatches * path.once


def _work_alone_s(path: StagePath) -> Any:
    return path.microbatches * path.once


SEQUENTIAL_LAW: Final = ChainLaw(
    passes=lambda m: m,
    beyond_s=lambda forward, backward, m, in_flight: 0.0 * forward,
)
FORWARDS_FIRST_LAW: Final = ChainLaw(
    passes=lambda m: 1,
    beyond_s=lambda forward, backward, m, in_flight: (m - 1) * (forward + backward),
)
ONE_F_ONE_B_LAW: Final = ChainLaw(
    passes=lambda m: 1,
    beyond_s=lambda forward, backward, m, in_flight: (m - 1) * backward + (m - in_flight) * forward,
)


# -- when the search tries a schedule that nobody asked for ---------------------------------------------


def _always(on_cpu: bool, measured: bool) -> bool:
    return True


def _not_on_cpu(on_cpu: bool, measured: bool) -> bool:
    """Excludes CPUs: what exchanges hide behind computing there has the same cores as the computing."""
    return not on_cpu


def _measured_on_cpu(on_cpu: bool, measured: bool) -> bool:
    """Requires measured times on CPUs: only they tell what splitting a backward costs there."""
    return on_cpu and measured


def _when_asked(on_cpu: bool, measured: bool) -> bool:
    return False


# -- the records ----------------------------------------------------------------------------------------


NAIVE: Final = register(
    Family(
        name="naive",
        paper="gradient accumulation over a model that is spread on devices",
        row=naive_row,
        sliced_row=naive_sliced_row,
        placement=round_robin,
        preference=2,
        in_flight=_one_in_flight,
        path_s=_sequential_path_s,
        chain=SEQUENTIAL_LAW,
        searched=_always,
        chunk_counts=_one,
        even_cut_is_best=True,
        sequential=True,
        like_last_stages=True,
        repeats_after=1,
        on_host_as="1f1b",
    )
)
GPIPE: Final = register(
    Family(
        name="gpipe",
        paper="Huang et al., arXiv 1811.06965, sec. 2.3",
        row=gpipe_row,
        sliced_row=gpipe_sliced_row,
        placement=round_robin,
        preference=1,
        in_flight=_all_in_flight,
        path_s=_forwards_first_path_s,
        chain=FORWARDS_FIRST_LAW,
        searched=_always,
        chunk_counts=_one,
        layer_by_layer=True,
        several_stages=True,
        like_last_stages=True,
        on_host_as="gpipe",
        dominated_by="1f1b",
    )
)
ONE_F_ONE_B: Final = register(
    Family(
        name="1f1b",
        paper="Narayanan et al., arXiv 2006.09503, sec. 3.2",
        row=one_f_one_b_row,
        sliced_row=one_f_one_b_sliced_row,
        placement=round_robin,
        preference=0,
        in_flight=_depth_in_flight,
        path_s=_one_f_one_b_path_s,
        chain=ONE_F_ONE_B_LAW,
        searched=_always,
        chunk_counts=_one,
        like_last_stages=True,
        repeats_after=1,
        on_host_as="1f1b",
    )
)
INTERLEAVED: Final = register(
    Family(
        name="interleaved",
        paper="Narayanan et al., arXiv 2104.04473, sec. 2.2",
        row=interleaved_row,
        placement=round_robin,
        preference=3,
        in_flight=_depth_in_flight,
        path_s=_work_alone_s,
        of_each_chunk=_of_each_chunk,
        searched=_always,
        chunk_counts=_several,
        bound_is_work=True,
        even_cut_is_best=True,
        several_stages=True,
        interleaves=True,
        repeats_after=3,
        repeats_in_rounds=True,
        refills=False,
    )
)
ZERO_BUBBLE: Final = register(
    Family(
        name="zero-bubble",
        paper="ZB-H1: Qi et al., arXiv 2401.10241, sec. 2.1",
        row=zero_bubble_row,
        placement=round_robin,
        preference=4,
        in_flight=_depth_in_flight,
        path_s=_without_bubble_path_s,
        searched=_measured_on_cpu,
        chunk_counts=_one,
        forwards_lead=True,
        splits_backward=True,
        repeats_after=2,
    )
)
ZERO_BUBBLE_V: Final = register(
    Family(
        name="zero-bubble-v",
        paper="ZB-V: Qi et al., arXiv 2405.15362, sec. 4",
        row=zero_bubble_v_row,
        placement=in_a_v,
        preference=5,
        in_flight=_depth_in_flight,
        path_s=_work_alone_s,
        searched=_when_asked,
        chunk_counts=_two,
        even_cut_is_best=True,
        splits_backward=True,
        several_stages=True,
        interleaves=True,
    )
)
OVERLAPPED: Final = register(
    Family(
        name="1f1b-overlap",
        paper="DeepSeek-V3, arXiv 2412.19437, sec. 3.2.1, with one stage on a rank",
        row=overlapped_row,
        placement=round_robin,
        preference=9,
        in_flight=lambda depth, microbatches: min(2 * depth, microbatches),
        path_s=_one_f_one_b_path_s,
        chain=ONE_F_ONE_B_LAW,
        searched=_not_on_cpu,
        chunk_counts=_one,
        overlaps=True,
        like_last_stages=True,
        repeats_after=2,
    )
)
DUAL_PIPE_V: Final = register(
    replace(
        ZERO_BUBBLE_V,
        name="dualpipe-v",
        paper="DeepSeek-V3, arXiv 2412.19437, sec. 3.2.1, its half in a V",
        row=dual_pipe_v_row,
        searched=_not_on_cpu,
        overlaps=True,
        preference=10,
        most_chunks=2,
    )
)
COMPOSED: Final = register(
    Family(
        name=COMPOSED_NAME,
        paper="list schedules by several rules, see compose.py",
        row=None,
        placement=round_robin,
        preference=6,
        in_flight=_depth_in_flight,
        path_s=_work_alone_s,
        searched=_when_asked,
        chunk_counts=_one,
    )
)
CUSTOM: Final = register(
    Family(
        name=CUSTOM_NAME,
        paper="a schedule that somebody has written",
        row=None,
        placement=round_robin,
        preference=7,
        in_flight=_depth_in_flight,
        path_s=_work_alone_s,
        searched=_when_asked,
        chunk_counts=_one,
        asked_by_name=False,
    )
)
FORWARD: Final = register(
    Family(
        name="forward-only",
        paper="the forwards of GPipe, Huang et al., arXiv 1811.06965, sec. 2.3",
        row=forward_row,
        placement=round_robin,
        preference=8,
        in_flight=_one_in_flight,
        path_s=_forwards_first_path_s,
        chain=FORWARDS_FIRST_LAW,
        searched=_when_asked,
        chunk_counts=_one,
        asked_by_name=False,
        like_last_stages=True,
        repeats_after=1,
        trains=False,
    )
)

# Other files name a schedule by its role. DEFAULT is used unless the user asks for another one.
DEFAULT: Final = ONE_F_ONE_B
# SEQUENTIAL is for models whose stages cannot overlap, and where least memory counts more than time.
SEQUENTIAL: Final = NAIVE
# LAYER_BY_LAYER is for weights that come to the device once a pass.
LAYER_BY_LAYER: Final = GPIPE
# CHUNKED puts several stages on a rank.
CHUNKED: Final = INTERLEAVED
