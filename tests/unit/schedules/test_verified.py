"""Work that is shown and repeated: where it goes in a row, and that the row ends and costs what is said."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest

from outsize.ir.cluster import Link
from outsize.ir.schedule import COMPUTE, VERIFICATION, Action, Kind, Schedule, parse_row
from outsize.planner.simulation.simulate import StageCost, simulate
from outsize.schedules import verified
from outsize.schedules.builders import build
from outsize.schedules.families import families, family_of
from outsize.schedules.lower import lower
from outsize.schedules.verified import Check, step_s, with_checks

FREE = Link(name="free", latency_s=0.0, bytes_per_s=float("inf"))
NAMES = [f.name for f in families() if f.trains and f.row is not None]
COST = StageCost(1.0, 2.0, 1.0)
PRICED = StageCost(1.0, 2.0, 1.0, show_s=0.25, verify_s=0.75)


def lowered(name: str, ranks: int, microbatches: int) -> Schedule:
    stages = ranks * (2 if family_of(name).interleaves else 1)
    down = frozenset(pairwise(range(stages)))
    return lower(build(name, stages, microbatches, ranks), down, frozenset((b, a) for a, b in down))


def ring(schedule: Schedule, microbatch: int, turn: int, *, replicated: bool) -> list[Check]:
    checks = []
    for rank in range(schedule.ranks):
        own = sorted(stage for stage, at in schedule.rank_of.items() if at == rank)
        checks.append(
            Check(own[turn % len(own)], microbatch, rank if replicated else (rank + 1) % schedule.ranks)
        )
    return checks


def simulated_s(schedule: Schedule, cost: StageCost = COST) -> float:
    down = dict.fromkeys(pairwise(range(schedule.stages)), 0)
    up = {(b, a): 0 for a, b in down}
    return simulate(schedule, [cost] * schedule.stages, down, up, lambda a, b: FREE).duration_s


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 4), (3, 5), (4, 8)])
def test_rows_end_and_the_simulator_agrees(
    name: str, ranks: int, microbatches: int, replicated: bool
) -> None:
    """`simulate` waits for messages one at a time, so pairs that overlap begin as they do here."""
    before = lowered(name, ranks, microbatches)
    costs = [COST] * before.stages
    for microbatch in {0, microbatches // 2, microbatches - 1}:
        for turn in range(before.stages // ranks):
            checks = ring(before, microbatch, turn, replicated=replicated)
            after = with_checks(before, checks, costs)
            assert (
                after.with_rows(tuple(a for a in row if a.kind not in VERIFICATION) for row in after.actions)
                == before
            )
            assert after.rank_of == before.rank_of
            _assert_places(after, checks)
            longer_s = step_s(after, costs) - step_s(before, costs)
            assert 0 <= longer_s <= len(checks) * (COST.forward_s + COST.backward_s)
            assert simulated_s(after) == pytest.approx(step_s(after, costs))
            _assert_priced(before, checks)


def _assert_priced(before: Schedule, checks: list[Check]) -> None:
    """A part of a stage is shown and repeated for its own price."""
    costs = [PRICED] * before.stages
    after = with_checks(before, checks, costs)
    longer_s = step_s(after, costs) - step_s(before, costs)
    assert 0 <= longer_s <= len(checks) * (PRICED.show_s + (PRICED.verify_s or 0))
    assert simulated_s(after, PRICED) == pytest.approx(step_s(after, costs))


def _assert_places(schedule: Schedule, checks: list[Check]) -> None:
    for check in checks:
        own, row = schedule.actions[schedule.rank_of[check.stage]], schedule.actions[check.checker]
        work = [at for at, a in enumerate(own) if (a.stage, a.microbatch) == (check.stage, check.microbatch)]
        shown = own.index(Action(check.stage, Kind.SHOW, check.microbatch))
        assert shown > max(at for at in work if own[at].kind in COMPUTE)
        same = schedule.rank_of[check.stage] == check.checker
        peer = -1 if same else check.stage
        (at,) = [at for at, a in enumerate(row) if a.kind is Kind.VERIFY]
        assert (row[at].microbatch, row[at].peer) == (check.microbatch, peer)
        assert not same or at > shown
        assert not (at and row[at - 1].overlaps)


@pytest.mark.parametrize("name", NAMES)
def test_no_other_place_is_better(name: str) -> None:
    """Of the gaps that are tried the best one is as good as the best place of all."""
    before = lowered(name, 3, 4)
    costs = [StageCost(1.0 + stage / 4, 2.0, 1.0) for stage in range(before.stages)]
    check = ring(before, 0, 0, replicated=False)[2]
    chosen = with_checks(before, [check], costs)
    (action,) = [a for row in chosen.actions for a in row if a.kind is Kind.VERIFY]
    bare = chosen.with_rows(tuple(a for a in row if a is not action) for row in chosen.actions)
    row = bare.actions[check.checker]
    every = [
        bare.with_rows(
            (*row[:at], action, *row[at:]) if n == check.checker else r for n, r in enumerate(bare.actions)
        )
        for at in range(len(row) + 1)
    ]
    assert step_s(chosen, costs) == min(step_s(each, costs) for each in every)


def test_a_large_gap_takes_all_of_it() -> None:
    """The first rank of 1f1b waits for its first backward, and checks the last one meanwhile, for nothing."""
    before = lowered("1f1b", 4, 8)
    after = with_checks(before, [Check(3, 0, 0)], [COST] * 4)
    assert step_s(after, [COST] * 4) == step_s(before, [COST] * 4)
    row = [str(a) for a in after.actions[0] if a.kind in COMPUTE | VERIFICATION]
    assert row[:6] == ["0F0", "0F1", "0F2", "0F3", "0VERIFY0@3", "0B0"]


def test_docstring_picture_is_the_schedule() -> None:
    before = lowered("1f1b", 3, 3)
    after = with_checks(before, ring(before, 0, 0, replicated=False), [COST] * 3)
    text = inspect.getdoc(verified) or ""
    for rank, row in enumerate(after.actions):
        drawn = next(line for line in text.splitlines() if line.strip().startswith(f"rank {rank} "))
        words = [word for word in drawn.split()[2:] if word != "."]
        assert words == [str(a) for a in row if a.kind in COMPUTE | VERIFICATION]


def test_actions_are_read_as_they_are_written() -> None:
    row = parse_row("0F0,0SHOW0,0VERIFY0,0VERIFY3@2")
    assert [str(action) for action in row] == ["0F0", "0SHOW0", "0VERIFY0", "0VERIFY3@2"]
    with pytest.raises(ValueError, match="only sends and receives"):
        parse_row("0SHOW0@1")
