"""Zero-bubble in a V where the bubble is large: four ranks, four microbatches, stages of F = I = W."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from planner_graphs import chain

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import make_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan, ScheduleName
from outsize.ir.profile import Profile
from outsize.planner.search.search import search

RANKS, COUNT = 4, 4
VALUE = 8


@cache
def planned(schedule: ScheduleName, count: int = COUNT) -> Plan:
    """Eight equal layers, so that a chunk of a V is one; a layer keeps ten times what it weighs."""
    model = chain([1.0] * 8, saved_bytes=1000, value_bytes=VALUE)
    request = PlanRequest(
        exact=True, batch_size=count, microbatches=count, schedule=schedule, optimizer="sgd"
    )
    return search(request, {count: model}, make_cluster("4xcpu", "cpu", 1, RANKS, 10**9))


def step_s(schedule: ScheduleName) -> float:
    found = planned(schedule).expected
    assert found is not None
    return found.step_s


def fullest_bytes(schedule: ScheduleName, count: int, *, all_causes: bool = True) -> int:
    plan, held = planned(schedule, count), [0] * RANKS
    assert plan.expected is not None
    for rank, stage in zip(plan.ranks, plan.expected.stages, strict=True):
        held[rank] += stage.peak_bytes if all_causes else stage.activations_bytes
    return max(held)


def test_it_is_that_much_faster() -> None:
    """Work of 24 s a rank; 1F1B's bubble is 18 s, the interleaved one's 9, a V's 3."""
    assert step_s("1f1b") == pytest.approx(6 * (COUNT + RANKS - 1), rel=1e-3)
    assert step_s("zero-bubble-v") == pytest.approx(6 * COUNT + RANKS - 1, rel=1e-3)
    assert step_s("1f1b") >= 1.25 * step_s("zero-bubble-v")
    assert step_s("interleaved") >= 1.10 * step_s("zero-bubble-v")
    assert step_s("1f1b") > step_s("zero-bubble") > step_s("zero-bubble-v")


def test_it_holds_no_more_than_1f1b() -> None:
    """By the account, on the fullest device; interleaved, which is slower, holds more.

    The activations are the same; a V has twice as many values between stages, here 16 bytes beside 1000, and
    with four microbatches one chunk's gradients when 1F1B has none yet.
    """
    for count in (COUNT, 8):
        v, plain = (fullest_bytes(name, count, all_causes=False) for name in ("zero-bubble-v", "1f1b"))
        assert v <= plain + VALUE * 2 * RANKS, "what each chunk in flight has received"
        assert fullest_bytes("zero-bubble-v", count) <= 1.02 * fullest_bytes("1f1b", count)
    assert fullest_bytes("interleaved", 8) > fullest_bytes("zero-bubble-v", 8)


def test_the_last_rank_turns_back() -> None:
    plan = planned("zero-bubble-v")
    assert plan.ranks == (0, 1, 2, 3, 3, 2, 1, 0)
    assert [stage.device for stage in plan.stages][RANKS - 1 : RANKS + 1] == ["cpu:3", "cpu:3"]
    assert all(a.units != b.units for a, b in pairwise(plan.stages))


def test_auto_is_no_slower_than_any() -> None:
    names: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-v")
    assert step_s("auto") <= min(map(step_s, names)) * (1 + 1e-9)


# -- whether it is taken ------------------------------------------------------------------------------


def measured(each_s: float, waiting_bytes: int = 0) -> tuple[ModelGraph, Profile]:
    """The layers as if they had been timed; so many bytes of gradients of each wait for its weights' turn."""
    graph, profile = chain([each_s] * 8, saved_bytes=1000, value_bytes=VALUE)
    units = (unit.model_copy(update={"source": "measured"}) for unit in profile.units)
    profile = profile.model_copy(update={"units": tuple(units)})
    waiting = (unit.model_copy(update={"waiting_bytes": waiting_bytes}) for unit in graph.units)
    return graph.model_copy(update={"units": tuple(waiting)}), profile


def taken(
    model: tuple[ModelGraph, Profile], memory_bytes: int = 10**9, schedule: ScheduleName | None = None
) -> Plan:
    request = PlanRequest(exact=True, batch_size=8, microbatches=8, schedule=schedule, optimizer="sgd")
    return search(request, {8: model}, make_cluster("4xcpu", "cpu", 1, RANKS, memory_bytes))


def is_split(plan: Plan) -> bool:
    return plan.schedule.startswith("zero") or any("I" in row for row in plan.actions)


def test_the_default_splits_where_that_pays_and_times_are_measured() -> None:
    assert is_split(taken(measured(1e-2)))
    assert not is_split(taken(chain([1e-2] * 8, saved_bytes=1000, value_bytes=VALUE)))


def test_neither_the_default_nor_auto_splits_where_that_does_not_pay() -> None:
    """A layer's passes take 0.1 ms each, and so does what splitting its backward costs."""
    assert not is_split(taken(measured(1e-4)))
    assert not is_split(taken(measured(1e-4), schedule="auto"))
    assert is_split(taken(measured(1e-2), schedule="auto"))


def test_gradients_that_wait_are_in_the_account() -> None:
    """W of rank s comes s microbatches behind I: s + 1 of them wait, for the weights of two layers each."""
    held = [taken(measured(1e-2, size), schedule="zero-bubble").expected for size in (0, 1000)]
    few, many = ([s.peak_bytes for s in found.stages] for found in held if found is not None)
    assert [b - a for a, b in zip(few, many, strict=True)] == [2000, 4000, 6000, 8000]


def test_what_does_not_fit_for_them_is_not_taken() -> None:
    plain = taken(measured(1e-2, 1000), schedule="1f1b").expected
    assert plain is not None
    tight = taken(measured(1e-2, 1000), round(1.05 * max(s.peak_bytes for s in plain.stages)))
    assert tight.schedule == "1f1b"


def interleaved_on_cpus(each_s: float, count: int) -> Plan:
    """Eight equal layers over two CPUs, by estimates."""
    model = chain([each_s] * 8, saved_bytes=1000, value_bytes=VALUE)
    request = PlanRequest(exact=True, batch_size=count, microbatches=count, stages=2, optimizer="sgd")
    return search(request, {count: model}, make_cluster("2xcpu", "cpu", 1, 2, 10**9))


def test_cpus_have_several_stages_where_these_are_longer_than_messages() -> None:
    many, few = interleaved_on_cpus(1e-2, 4), interleaved_on_cpus(1e-6, 4)
    assert many.schedule == "interleaved"
    assert many.ranks == (0, 1) * 4
    assert few.schedule != "interleaved"


def test_of_plans_that_are_as_fast_that_with_fewer_stages_on_a_rank_is_taken() -> None:
    """The bubbles of one, two and four stages on a rank are 1/60, 1/120 and 1/240 of the work."""
    assert len(interleaved_on_cpus(1e-1, 60).stages) == 4
