"""Schedules that somebody has written: planned and priced, or the cell that is wrong."""

from __future__ import annotations

import pytest
from planner_graphs import chain

from outsize.errors import InvalidSchedule, TooManyStages
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import make_cluster
from outsize.ir.plan import Plan, ScheduleName
from outsize.planner.search.search import search
from outsize.planner.strategies.parallel_branches import even_runs
from outsize.schedules.builders import build, written

V = ("0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1", "1F0,1F1,2F0,2B0,1B0,2F1,2B1,1B1")


def planned(*rows: str, units: int = 8, count: int = 2) -> Plan:
    model, cluster = chain([1.0] * units), make_cluster("2xcpu", "cpu", 1, 2, 10**9)
    how = {"batch_size": count, "microbatches": count, "stages": 2}
    return search(PlanRequest(**how, schedule="custom", actions=rows), {count: model}, cluster)  # pyright: ignore[reportArgumentType]


def test_two_stages_on_a_rank() -> None:
    plan = planned(*V)
    assert (plan.schedule, plan.actions, plan.ranks) == ("custom", V, (0, 1, 1, 0))
    assert [stage.device for stage in plan.stages] == ["cpu:0", "cpu:1", "cpu:1", "cpu:0"]
    assert [stage.units for stage in plan.stages] == [("h.0-1",), ("h.2-3",), ("h.4-5",), ("h.6-7",)]
    assert plan.expected is not None
    assert plan.expected.step_s > 24.0


def test_a_named_schedule_as_a_file_is_that_schedule() -> None:
    names: tuple[ScheduleName, ...] = ("1f1b", "gpipe")
    for name in names:
        custom = planned(*written(build(name, 2, 4)), count=4)
        model, cluster = chain([1.0] * 8), make_cluster("2xcpu", "cpu", 1, 2, 10**9)
        known = search(
            PlanRequest(batch_size=4, microbatches=4, stages=2, schedule=name), {4: model}, cluster
        )
        assert custom.expected is not None
        assert known.expected is not None
        assert custom.stages == known.stages
        assert custom.expected.step_s == pytest.approx(known.expected.step_s)


def test_sends_and_receives_of_the_file_are_made_anew() -> None:
    assert planned("0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0", count=1).actions == (
        "0F0,0B0",
        "1F0,1B0",
    )


@pytest.mark.parametrize(
    ("rows", "what", "where"),
    [
        (("0F0,0X0,0B0", "1F0,1B0"), "'0X0' is no action", "row 1, cell 2 of 3"),
        (("0F0,0B0", "1B0,1F0"), "1B0 runs before 1F0", "rank 1, cell 1 of 2"),
        (("0F0,0B0,0F0", "1F0,1B0"), "0F0 appears twice", "rank 0, cell 3 of 3"),
        (("0F0,0B0", "1F0"), "1B0 is missing", "rank 1, cell 2 of 1"),
        (("0F0,0B0,2F0,2B0", "1F0,1B0"), "0B0 waits for 1B0, which never runs", "rank 0, cell 2 of 4"),
    ],
)
def test_the_cell_that_is_wrong_is_named(rows: tuple[str, ...], what: str, where: str) -> None:
    with pytest.raises(InvalidSchedule) as caught:
        planned(*rows, count=1)
    assert what in str(caught.value)
    assert where in (caught.value.numbers or "")
    assert caught.value.next_step


def test_who_waits_for_whom_is_said() -> None:
    with pytest.raises(InvalidSchedule) as caught:
        planned("0F0,0B0,2F0,2B0", "1F0,1B0", count=1)
    assert "rank 0 waits in 0B0 for 1B0, rank 1 waits in 1B0 for 2B0" in (caught.value.numbers or "")
    assert "<-- HERE" in str(caught.value)


def test_more_stages_than_units() -> None:
    with pytest.raises(TooManyStages, match="the schedule has 4 stages, the model 3 units"):
        planned(*V, units=3)


def test_even_runs_leave_none_empty() -> None:
    assert even_runs([1.0] * 6, 3) == [0, 0, 1, 1, 2, 2]
    assert even_runs([9.0, 1.0, 1.0], 3) == [0, 1, 2]
    assert even_runs([1.0, 1.0, 9.0, 9.0], 2) == [0, 0, 0, 1]
    assert even_runs([0.0, 0.0], 2) == [0, 1]
    for seconds in ([5.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 5.0]):
        assert sorted(set(even_runs(seconds, 4))) == [0, 1, 2, 3]
