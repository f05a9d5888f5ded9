"""Every schedule, compute-only and lowered, as the CSV that is in tests/golden/schedules.

Regenerate with `pytest tests/golden/test_golden_schedules.py --update-golden`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outsize.ir.schedule import Schedule
from outsize.schedules.builders import build
from outsize.schedules.check import check, check_compute
from outsize.schedules.compose import compose
from outsize.schedules.families import built
from outsize.schedules.job import Job, StageCost
from outsize.schedules.lower import lower

SIZES = [(2, 4), (4, 4), (3, 6)]
# A value of stage 0 used by 1 and 3: its gradient goes from 3 to 1 and from there to 0.
SKIP_FORWARD = frozenset({(0, 1), (1, 2), (2, 3), (0, 3)})
SKIP_BACKWARD = frozenset({(3, 2), (2, 1), (1, 0), (3, 1)})
# A parameter that stages 0 and 2 share: a step edge down, gradients each microbatch back.
TIED_STEP = frozenset({(0, 2)})
TIED_BACKWARD = frozenset({(3, 2), (2, 1), (1, 0), (2, 0)})

Golden = Callable[[str, str], None]


def chain(stages: int) -> frozenset[tuple[int, int]]:
    return frozenset((s, s + 1) for s in range(stages - 1))


def flipped(edges: frozenset[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    return frozenset((b, a) for a, b in edges)


@pytest.mark.parametrize("name", built())
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_compute(name: str, stages: int, microbatches: int, golden: Golden) -> None:
    schedule = build(name, stages, microbatches)
    check_compute(schedule)
    golden(f"schedules/{name}-p{stages}-m{microbatches}.csv", schedule.to_csv())


@pytest.mark.parametrize("name", built())
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_chain(name: str, stages: int, microbatches: int, golden: Golden) -> None:
    forward, backward = chain(stages), flipped(chain(stages))
    schedule = lower(build(name, stages, microbatches), forward, backward)
    check(schedule, forward, backward)
    golden(f"schedules/{name}-p{stages}-m{microbatches}-chain.csv", schedule.to_csv())


@pytest.mark.parametrize("microbatches", [4, 5])
def test_two_stages_on_a_rank(microbatches: int, golden: Golden) -> None:
    schedule = lower(build("interleaved", 4, microbatches, ranks=2), chain(4), flipped(chain(4)))
    check(schedule, chain(4), flipped(chain(4)))
    golden(f"schedules/interleaved-p2-v2-m{microbatches}-chain.csv", schedule.to_csv())


@pytest.mark.parametrize("name", ["zero-bubble-v", "dualpipe-v"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (3, 7)])
def test_a_v(name: str, ranks: int, microbatches: int, golden: Golden) -> None:
    stages = 2 * ranks
    pairs = chain(stages), flipped(chain(stages))
    schedule = lower(build(name, stages, microbatches, ranks), *pairs)
    check(schedule, *pairs)
    golden(f"schedules/{name}-p{ranks}-v2-m{microbatches}-chain.csv", schedule.to_csv())


def test_composed(golden: Golden) -> None:
    """Three uneven stages, the last one twice as long, with room for three microbatches each."""
    costs = (StageCost(1.0, 2.0, 1.0), StageCost(1.0, 2.0, 1.0), StageCost(2.0, 4.0, 2.0))
    down, up = (dict.fromkeys(sorted(edges), 0.0) for edges in (chain(3), flipped(chain(3))))
    best = compose(Job((0, 1, 2), 4, costs, down, up, (1,) * 3, (3,) * 3))[0]
    schedule = lower(best.schedule, chain(3), flipped(chain(3)))
    check(schedule, chain(3), flipped(chain(3)))
    golden("schedules/auto-p3-m4-uneven-chain.csv", schedule.to_csv())


@pytest.mark.parametrize("name", built())
def test_skip(name: str, golden: Golden) -> None:
    schedule = lower(build(name, 4, 4), SKIP_FORWARD, SKIP_BACKWARD)
    check(schedule, SKIP_FORWARD, SKIP_BACKWARD)
    golden(f"schedules/{name}-p4-m4-skip.csv", schedule.to_csv())


@pytest.mark.parametrize("name", built())
def test_tied(name: str, golden: Golden) -> None:
    schedule = lower(build(name, 4, 4), chain(4), TIED_BACKWARD, TIED_STEP)
    check(schedule, chain(4), TIED_BACKWARD, TIED_STEP)
    golden(f"schedules/{name}-p4-m4-tied.csv", schedule.to_csv())


def test_golden_reads_back() -> None:
    schedule = lower(build("1f1b", 4, 4), SKIP_FORWARD, SKIP_BACKWARD)
    assert Schedule.from_csv(schedule.to_csv(), "1f1b") == schedule
