"""A step of very many microbatches, played in part, against the same played in full."""

from __future__ import annotations

import random

import pytest
from planner_graphs import chain

from outsize.ir.cluster import Cluster, make_cluster, parse_cluster
from outsize.ir.plan import Axes, ScheduleName
from outsize.planner.evaluate import played_step as module
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.played_step import is_message, simulated_microbatches
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.policies.weights import Weights


def priced(schedule: ScheduleName, stages: int, microbatches: int, seed: int) -> Candidate:
    """One unit a stage; units and messages of one to ten times the least, all in one order of magnitude."""
    rng = random.Random(seed)
    graph, profile = chain([rng.uniform(0.5, 3.0) for _ in range(stages)])
    values = [v.model_copy(update={"size_bytes": rng.randrange(1, 11)}) for v in graph.values]
    layout = Layout(Axes(pp=stages), stages, schedule, microbatches, microbatches)
    model = graph.model_copy(update={"values": tuple(values)}), profile
    pipeline = Pricing({microbatches: model}, slowly_joined(stages), "sgd").pipeline(layout, ("none",))
    assert pipeline is not None
    return Candidate.of(pipeline, range(stages + 1), [0] * stages)


def slowly_joined(count: int) -> Cluster:
    """A byte a second."""
    cluster = make_cluster(f"{count}xcpu", "cpu", 1, count)
    slow = cluster.inner.model_copy(update={"latency_s": 0.0, "bytes_per_s": 1.0})
    return cluster.model_copy(update={"inner": slow, "outer": slow})


@pytest.mark.parametrize(
    ("schedule", "stages", "most"),
    [("1f1b", 3, 1e-3), ("1f1b", 4, 1e-3), ("1f1b", 7, 2e-3), ("zero-bubble", 4, 1e-3), ("1f1b", 40, 2e-3)],
)
def test_what_follows_from_a_part_is_what_the_whole_takes(
    schedule: ScheduleName, stages: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    microbatches = 4 * module.PLAYED // stages + 1
    seeds = range(7, 10)
    parts = [priced(schedule, stages, microbatches, seed) for seed in seeds]
    assert simulated_microbatches(parts[0].layout) < microbatches / 2
    monkeypatch.setattr(module, "PLAYED", stages * microbatches)
    assert simulated_microbatches(parts[0].layout) == microbatches
    whole = [priced(schedule, stages, microbatches, seed) for seed in seeds]
    for part, full in zip(parts, whole, strict=True):
        assert part.pipeline_s == pytest.approx(full.pipeline_s, rel=most)


@pytest.mark.parametrize(("axes", "cp"), [(Axes(pp=2), 1), (Axes(pp=2, tp=2), 1), (Axes(pp=2, cp=2), 2)])
def test_a_rank_sends_the_next_stage_all_that_it_has(axes: Axes, cp: int) -> None:
    """80 bytes there and 80 back, of which only cp gives each rank a part; counted: test_tensor_plans.py."""
    model, layout = chain([1.0, 1.0], value_bytes=80), Layout(axes, 2, "naive", 1, 1)
    pipeline = Pricing({1: model}, slowly_joined(axes.world_size), "sgd").pipeline(layout, ("none",))
    assert pipeline is not None
    found = Candidate.of(pipeline, (0, 1, 2), (0, 0))
    assert found.step.exposed_s(is_message) == pytest.approx(2 * 80 / cp)
    spans = found.step.timeline().spans
    sent_s = [span.end_s - span.start_s for span in spans if span.lane == "send"]
    assert sent_s == pytest.approx([80 / cp, 80 / cp])


@pytest.mark.parametrize(
    ("axes", "weights", "shares"),
    [
        ({}, "resident", 1),
        ({"dp_replicate": 2}, "resident", 1),
        ({"dp_shard": 2}, "resident", 2),
        ({"dp_shard": 2}, "sharded", 2),
    ],
)
def test_the_optimizer_of_an_accelerator_moves_its_bytes_after_the_last_backward(
    axes: dict[str, int], weights: Weights, shares: int
) -> None:
    graph, profile = chain([0.5, 0.5, 0.5], weight_bytes=10**9)
    layout = Layout(Axes(pp=2, **axes), 2, "1f1b", 4, 4, weights=weights)
    cluster = parse_cluster(f"{layout.axes.world_size}xa100-80gb")
    model = graph, profile.model_copy(update={"device": "a100-80gb"})
    estimates = {}
    for optimizer in ("adamw", "sgd"):
        pipeline = Pricing({4: model}, cluster, optimizer).pipeline(layout, ("none",))
        assert pipeline is not None
        estimates[optimizer] = Candidate.of(pipeline, (0, 1, 3), [0, 0])
    # The second stage has two units of 10^9 bytes; foreach accesses each element 20 times, sgd 3 times.
    bandwidth = cluster.devices[0].bytes_per_s * 0.85
    update_s = {name: times * 2e9 / shares / bandwidth for name, times in (("adamw", 20), ("sgd", 3))}
    for name, each in estimates.items():
        assert each.update_s == pytest.approx(update_s[name], rel=1e-3)
        assert each.step_s == each.pipeline_s + each.after_s + each.update_s
    assert estimates["adamw"].pipeline_s == estimates["sgd"].pipeline_s


def test_a_step_of_cpus_is_without_the_optimizer() -> None:
    assert priced("1f1b", 3, 4, 1).update_s == 0
