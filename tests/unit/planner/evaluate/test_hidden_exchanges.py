"""What ranks exchange hides where a schedule brings two microbatches together, and is priced so."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.capture.graph.build import build_graph
from outsize.capture.graph.tensor_parallel import with_styles
from outsize.capture.recording.fallbacks import record
from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.ir.schedule import Kind
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.search.evaluate_plan import candidate_of
from outsize.schedules.job import StageCost

OVERLAPPED = ("1f1b-overlap", "dualpipe-v")


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(block(512) for _ in range(8)))


def batch(tokens: int) -> Tensor:
    return torch.empty(16, tokens, 512, device="meta")


def planned(schedule: str, cluster: str, tokens: int = 8192, **more: Any) -> tuple[Plan, Candidate]:
    """A plan over 2 ranks of a pipeline, each of tp 2, and its candidate as it is priced by itself."""
    wishes = {"stages": 2, "microbatches": 16, "axes": {"tp": 2}, "recompute": "none", **more}
    plan = outsize.plan(model(), (batch(tokens),), cluster=cluster, schedule=schedule, **wishes)
    devices = parse_cluster(cluster)
    return plan, candidate_of(plan, *subject(cluster, tokens), devices)


def subject(cluster: str, tokens: int) -> tuple[ModelGraph, Profile]:
    """The model of a microbatch, with what ranks of tp divide."""
    made, inputs = model(), batch(tokens)[:1]
    graph = with_styles(build_graph(record(made, (inputs,), {}), made), made)
    return graph, outsize.estimate(graph, parse_cluster(cluster))


@pytest.mark.parametrize(
    ("forward", "backward", "beside_s"),
    [
        (StageCost(4.0, 8.0), StageCost(4.0, 8.0), 8.0),  # nothing waits
        (StageCost(4.0, 8.0, 0.0, 0.0, 1.0, 2.0), StageCost(4.0, 8.0, 0.0, 0.0, 1.0, 2.0), 5.0),  # all hides
        (StageCost(4.0, 8.0, 0.0, 0.0, 4.0, 0.0), StageCost(4.0, 8.0), 4.0),  # the forward does nothing else
        (StageCost(2.0, 0.0, 0.0, 0.0, 1.5, 0.0), StageCost(0.0, 6.0, 0.0, 0.0, 0.0, 5.5), 5.0),  # the wire
    ],
)
def test_a_pair_lasts_as_long_as_by_hand(forward: StageCost, backward: StageCost, beside_s: float) -> None:
    """The most of what both compute, of what both exchange, and of either by itself."""
    assert backward.beside_s(Kind.B, forward) == pytest.approx(beside_s)
    f, b, waits = forward.forward_s, backward.backward_s, forward.forward_wait_s + backward.backward_wait_s
    assert f + beside_s == pytest.approx(max(f + b - waits, waits, f, b))


@pytest.mark.parametrize("schedule", OVERLAPPED)
def test_exchanges_of_accelerators_hide(schedule: str) -> None:
    """By as much as each pair may hide at most, and not in a schedule without pairs."""
    plan, candidate = planned(schedule, "4xa100-80gb")
    assert plan.expected is not None
    assert plan.expected.step_s == pytest.approx(candidate.step_s)
    seen = replace(
        candidate, costs=tuple(replace(c, forward_wait_s=0.0, backward_wait_s=0.0) for c in candidate.costs)
    )
    waits_s = [cost.forward_wait_s + cost.backward_wait_s for cost in candidate.costs]
    assert min(waits_s) > 0
    count, ranks = plan.microbatches, plan.axes.pp
    assert seen.step_s - count * sum(waits_s) <= candidate.step_s < seen.step_s
    fewest = count - (2 * ranks - 1)
    assert seen.step_s - candidate.step_s >= 0.5 * fewest * min(waits_s)


def test_waits_are_those_of_the_units_of_each_stage() -> None:
    _, candidate = planned("1f1b-overlap", "4xa100-80gb")
    for cost, case, run in zip(candidate.costs, candidate.cases, pairwise(candidate.bounds), strict=True):
        assert case.seconds.waits is not None
        forward, backward = (float(np.sum(each[slice(*run)])) for each in case.seconds.waits)
        assert (cost.forward_wait_s, cost.backward_wait_s) == pytest.approx((forward, backward))
        assert forward < cost.forward_s
        assert backward < cost.backward_s


@pytest.mark.parametrize(
    ("schedule", "cluster", "more"),
    [
        ("1f1b-overlap", "4xcpu", {}),  # the core that would compute copies what ranks exchange
        ("1f1b-overlap", "4xa100-80gb", {"recompute": "full"}),  # a second forward may have to run alone
        ("1f1b", "4xa100-80gb", {}),
    ],
)
def test_what_does_not_hide(schedule: str, cluster: str, more: dict[str, Any]) -> None:
    plan, candidate = planned(schedule, cluster, **more)
    seen = Candidate.of(candidate.pipeline, candidate.bounds, candidate.choices)
    assert plan.expected is not None
    assert plan.expected.step_s == pytest.approx(seen.step_s) == pytest.approx(candidate.step_s)


def test_what_a_slow_host_hides_already_does_not_hide_again() -> None:
    """With few tokens devices wait for launches, and exchanges take none of their time."""
    _, candidate = planned("1f1b-overlap", "4xa100-80gb", tokens=16)
    seen = Candidate.of(candidate.pipeline, candidate.bounds, candidate.choices)
    assert 0.995 * seen.step_s < candidate.step_s <= seen.step_s
