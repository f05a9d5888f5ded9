"""Laws of the search: what may never make a step longer, and what may not change a plan."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import patience
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain

from outsize.errors import NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster, parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.planner.search.search import search

Models = dict[int, tuple[ModelGraph, Profile]]
BATCH = 8
# Steps within one percent count as equal; the one that needs less memory is chosen.
TIE = 1.01
few = settings(max_examples=8, derandomize=True, deadline=None)
rows = st.lists(st.integers(1, 9), min_size=4, max_size=7)


def models(seconds: list[int], *counts: int, value_bytes: int = 64) -> Models:
    """A row whose seconds and bytes shrink with the microbatch."""
    return {
        m: chain([s / m for s in seconds], value_bytes // m, 100, saved_bytes=800 // m, batch_size=BATCH // m)
        for m in counts
    }


def small(memory_bytes: int = 10**6, devices: int = 2, bytes_per_s: float = 64.0) -> Cluster:
    """Devices that memory makes small, on links that can be felt."""
    cluster = make_cluster(f"{devices}xcpu", "cpu", 1, devices, memory_bytes)
    link = cluster.inner.model_copy(update={"latency_s": 0.0, "bytes_per_s": bytes_per_s})
    return cluster.model_copy(update={"inner": link})


def step_s(plan: Plan) -> float:
    assert plan.expected is not None
    return plan.expected.step_s


def found_s(models: Models, cluster: Cluster, all_axes: bool = False) -> float:
    """Seconds of the step; infinite when nothing fits."""
    try:
        return step_s(
            search(
                PlanRequest(batch_size=BATCH, optimizer="sgd", exact=not all_axes),
                models,
                cluster,
            )
        )
    except NoFeasiblePlan:
        return float("inf")


def no_longer(times: list[float]) -> bool:
    return all(after <= before * TIE * (1 + 1e-9) for before, after in pairwise(times))


@few
@given(rows)
def test_more_memory_never_makes_a_step_longer(seconds: list[int]) -> None:
    found = [found_s(models(seconds, 2, 4), small(size)) for size in (600, 900, 1500, 10**6)]
    assert no_longer(found)
    assert found[-1] < float("inf")


@few
@given(rows)
def test_one_more_number_of_microbatches_never_makes_a_step_longer(seconds: list[int]) -> None:
    assert no_longer([found_s(models(seconds, *counts), small()) for counts in ((1,), (1, 4), (1, 2, 4, 8))])


@few
@given(rows, st.integers(2, 3))
def test_faster_links_never_make_a_step_longer(seconds: list[int], devices: int) -> None:
    clusters = [small(devices=devices, bytes_per_s=speed) for speed in (1.0, 4.0, 16.0, 1e9)]
    found = [found_s(models(seconds, 4), cluster) for cluster in clusters]
    assert no_longer(found)
    assert found[-1] < found[0]


@few
@given(rows)
def test_a_faster_device_never_makes_a_step_longer(seconds: list[int]) -> None:
    """The second of two is exchanged for a faster one; the model is timed on the first."""
    names = ("2xv100-16gb", "1xv100-16gb+1xa100-40gb", "1xv100-16gb+1xh100-80gb")
    network = parse_cluster(names[0]).inner
    clusters = [parse_cluster(name).model_copy(update={"outer": network}) for name in names]
    graph, profile = models(seconds, 4)[4]
    heavy = tuple(u.model_copy(update={"flops": 10**13}) for u in graph.units)
    given_models = {4: (graph.model_copy(update={"units": heavy}), profile)}
    found = [found_s(given_models, cluster) for cluster in clusters]
    assert no_longer(found)
    assert found[-1] < found[0]


@few
@given(rows, st.integers(2, 3), st.sampled_from((900, 10**6)))
def test_three_times_the_seconds_make_three_times_the_step(
    seconds: list[int], devices: int, memory_bytes: int
) -> None:
    """Links as well; the cuts stay."""
    request = PlanRequest(batch_size=BATCH, optimizer="sgd", exact=True)
    thrice = [3 * s for s in seconds]
    try:
        one = search(request, models(seconds, 2, 4), small(memory_bytes, devices, 64.0))
    except NoFeasiblePlan:
        assert found_s(models(thrice, 2, 4), small(memory_bytes, devices, 64.0 / 3)) == float("inf")
        return
    three = search(request, models(thrice, 2, 4), small(memory_bytes, devices, 64.0 / 3))
    assert abs(step_s(three) / step_s(one) - 3) < 1e-6
    assert three.stages == one.stages
    assert (three.schedule, three.microbatches) == (one.schedule, one.microbatches)


def renamed(found: Models) -> Models:
    """Other names for units, in another order of the alphabet."""
    return {
        count: (
            graph.model_copy(
                update={
                    "units": tuple(u.model_copy(update={"name": f"z.{9 - u.index}"}) for u in graph.units)
                }
            ),
            profile.model_copy(
                update={
                    "units": tuple(
                        c.model_copy(update={"name": f"z.{9 - i}"}) for i, c in enumerate(profile.units)
                    )
                }
            ),
        )
        for count, (graph, profile) in found.items()
    }


@few
@given(rows, st.integers(2, 3))
def test_names_change_nothing_but_names(seconds: list[int], devices: int) -> None:
    request, given_models = PlanRequest(batch_size=BATCH, exact=True), models(seconds, 2, 4)
    one = search(request, given_models, small(devices=devices))
    other = search(request, renamed(given_models), small(devices=devices))
    assert one.expected is not None
    assert other.expected is not None
    unnamed = {"limited_by": None}
    assert other.expected.model_copy(update=unnamed) == one.expected.model_copy(update=unnamed)
    assert other.bounds(renamed(given_models)[one.microbatches][0]) == one.bounds(
        given_models[one.microbatches][0]
    )
    assert (other.schedule, other.alternatives) == (one.schedule, one.alternatives)


@few
@given(rows, st.sampled_from((600, 1500, 10**6)))
def test_more_axes_never_make_a_step_longer(seconds: list[int], memory_bytes: int) -> None:
    given_models, cluster = models(seconds, 2, 4), small(memory_bytes)
    assert no_longer([found_s(given_models, cluster), found_s(given_models, cluster, all_axes=True)])


HASHED = """
from planner_graphs import chain
from outsize.ir.cluster import make_cluster
from outsize.ir.answers.request import PlanRequest
from outsize.planner.search.search import search
models = {m: chain([s / m for s in (3, 1, 4, 1, 5, 9)], saved_bytes=800 // m) for m in (2, 4)}
cluster = make_cluster("4xcpu", "cpu", 2, 2, 2000)
for exact in (True, False):
    print(search(PlanRequest(batch_size=8, exact=exact), models, cluster).to_json())
"""


def test_equal_input_gives_equal_bytes_in_every_process() -> None:
    """Whatever the order of sets and dictionaries by hash is."""
    path = os.pathsep.join([*filter(None, sys.path)])
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", HASHED],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    first, second = (run.communicate(timeout=patience.PATIENCE_S)[0] for run in runs)
    assert first.count(b'"schedule"') > 1
    assert first == second
    assert [run.returncode for run in runs] == [0, 0]
