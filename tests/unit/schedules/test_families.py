"""One record holds all of a schedule: once it is entered, the schedule is planned, priced and run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import outsize
from outsize.errors import BadOption, BadPlan
from outsize.ir.cluster import parse_cluster
from outsize.ir.plan import Plan
from outsize.ir.schedule import SCHEDULES, Action, Kind
from outsize.planner.search.evaluate_plan import price
from outsize.schedules.builders import build
from outsize.schedules.check import check_compute
from outsize.schedules.families import (
    GPIPE,
    ONE_F_ONE_B,
    built,
    families,
    family_of,
    offered,
    preferred,
    round_robin,
    searched,
)
from outsize.schedules.family import Family


def two_in_flight_row(stage: int, stages: int, microbatches: int, ranks: int) -> Iterable[Action]:
    """1f1b with at most two microbatches in flight: less memory, and a larger bubble."""
    ahead = min(2, stages - stage, microbatches)
    yield from (Action(stage, Kind.F, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        yield Action(stage, Kind.B, microbatch)
        if microbatch + ahead < microbatches:
            yield Action(stage, Kind.F, microbatch + ahead)


# All that somebody writes who adds a schedule.
TOY = Family(
    name="two-in-flight",
    paper="this test",
    row=two_in_flight_row,
    placement=round_robin,
    preference=9,
    in_flight=lambda depth, microbatches: min(2, depth, microbatches),
    path_s=lambda path: path.microbatches * path.once,
    searched=lambda on_cpu, measured: False,
    chunk_counts=lambda ranks, microbatches: (1,),
)


@pytest.fixture(params=[TOY, replace(GPIPE, name="gpipe-again")], ids=lambda family: family.name)
def added(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family:
    """A schedule that is entered in the one table, and nowhere else."""
    family: Family = request.param
    monkeypatch.setitem(SCHEDULES, family.name, family)
    return family


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))


def test_a_schedule_that_is_added_is_offered_and_built(added: Family) -> None:
    assert {added.name} < set(offered()) & set(built())
    schedule = build(added.name, 4, 6)
    check_compute(schedule)
    assert schedule.name == added.name


def test_a_schedule_that_is_added_is_planned_priced_and_written(added: Family, tmp_path: Path) -> None:
    inputs = torch.randn(24, 16)
    how = {"cluster": "4xp40-24gb", "batch_size": 24, "stages": 4, "microbatches": 6}
    plan = outsize.plan(model(), (inputs,), **how, schedule=added.name)
    assert (plan.schedule, len(plan.stages), plan.ranks) == (added.name, 4, (0, 1, 2, 3))
    assert plan.expected is not None
    assert plan.expected.step_s > 0
    graph = outsize.capture(model(), (inputs[: plan.microbatch_size],))
    cluster = parse_cluster("4xp40-24gb")
    priced = price(plan, graph, outsize.estimate(graph, cluster), cluster).expected
    assert priced is not None
    assert priced.step_s == pytest.approx(plan.expected.step_s)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_schedule_that_is_added_gives_the_bits_of_one_device(added: Family) -> None:
    inputs, target = torch.randn(24, 16), torch.randn(24, 16)
    how = {"loss_fn": nn.functional.mse_loss, "target": target, "schedule": added.name}
    verdict = outsize.check(model(), (inputs,), stages=4, microbatches=6, **how)
    assert (verdict.bit_equal, verdict.schedule) == (True, added.name)


def test_a_plan_file_with_a_schedule_that_nobody_added_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(SCHEDULES, TOY.name, TOY)
        plan = outsize.plan(model(), (torch.randn(8, 16),), cluster="2xcpu", schedule=TOY.name)
        plan.save(tmp_path / "plan.json")
    with pytest.raises(BadPlan, match=r"schedule: Input should be 'naive', .* or 'forward-only'"):
        Plan.load(tmp_path / "plan.json")


def test_names_are_those_of_the_records() -> None:
    assert all(family_of(family.name) is family for family in families())
    assert len({family.preference for family in families()}) == len(families())
    with pytest.raises(BadOption, match="'1f2b' is not known; known schedules: naive, gpipe, 1f1b"):
        family_of("1f2b")


def test_what_is_searched_unasked() -> None:
    in_pairs = "1f1b-overlap", "dualpipe-v"
    assert searched(on_cpu=False, measured=True) == ("1f1b", "gpipe", "naive", "interleaved", *in_pairs)
    assert searched(on_cpu=True, measured=False) == ("1f1b", "gpipe", "naive", "interleaved")
    assert searched(on_cpu=True, measured=True) == ("1f1b", "gpipe", "naive", "interleaved", "zero-bubble")
    assert preferred(("gpipe", "interleaved")) == "gpipe"


@pytest.mark.parametrize("name", built())
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (3, 2), (4, 9)])
def test_bounds_of_memory_are_below_what_rows_hold(name: str, stages: int, microbatches: int) -> None:
    """`in_flight` says what a stage holds at least at its fullest moment; the bounds count on it."""
    family = family_of(name)
    ranks = stages // 2 if family.interleaves and stages % 2 == 0 else stages
    schedule = build(name, stages, microbatches, ranks)
    for rank, row in enumerate(schedule.actions):
        held, most = 0, 0
        for action in row:
            held += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
            most = max(most, held)
        assert most >= family.in_flight(ranks - rank, microbatches)


def test_a_schedule_that_dominates_holds_no_more() -> None:
    worse = [family for family in families() if family.dominated_by is not None]
    assert worse == [GPIPE]
    assert GPIPE.dominated_by == ONE_F_ONE_B.name
    for depth in range(1, 6):
        for microbatches in range(1, 9):
            assert ONE_F_ONE_B.in_flight(depth, microbatches) <= GPIPE.in_flight(depth, microbatches)
