"""The seconds of a forward through stages are those of playing them; a token reads weights and cache once."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from planner_graphs import chain

from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import ModelGraph, Work
from outsize.planner.costs.efficiency import default_of
from outsize.planner.costs.forward_times import batch_s, token_s
from outsize.planner.costs.stage_edges import edges_between
from outsize.planner.simulation.simulate import simulate
from outsize.schedules.builders import build
from outsize.schedules.job import StageCost
from outsize.schedules.lower import lower


@pytest.mark.parametrize("seed", range(8))
def test_the_closed_form_is_what_playing_the_stages_takes(seed: int) -> None:
    draw = random.Random(seed)
    units, microbatches, stages = draw.randint(4, 9), draw.randint(1, 6), draw.randint(1, 4)
    graph, profile = chain([draw.uniform(0.1, 1.0) for _ in range(units)], draw.choice((8, 10**9, 10**10)))
    cluster = parse_cluster(f"{stages}xh100-80gb")
    bounds = (0, *sorted(draw.sample(range(1, units), stages - 1)), units)
    costs = [StageCost(sum(u.forward_s for u in profile.units[a:b]), 0.0) for a, b in pairwise(bounds)]
    edges = edges_between(graph, bounds).forward
    lowered = lower(build("forward-only", stages, microbatches), frozenset(edges), frozenset())
    played = simulate(lowered, costs, edges, {}, cluster.link)
    predicted = batch_s(graph, profile, bounds, cluster, microbatches)
    assert predicted == pytest.approx(max(span.end_s for span in played.spans), rel=1e-6)


def cached(tokens: int, weight_bytes: int, cache_bytes: int) -> ModelGraph:
    """Two products over `tokens` tokens, of which the first leaves a cache."""
    graph, _ = chain([0.0, 0.0], weight_bytes=weight_bytes)
    moved = weight_bytes + tokens * 1000
    work = Work(family="matmul", dtype="bfloat16", flops=tokens * 10**6, moved_bytes=moved)
    units = tuple(unit.model_copy(update={"forward": (work,)}) for unit in graph.units)
    whole = graph.model_copy(update={"units": units, "output_bytes": 5})
    return whole.with_lasting({"h.0": cache_bytes}, tokens)


def test_a_token_reads_the_weights_and_the_cache() -> None:
    cluster, weights, cache = parse_cluster("1xh100-80gb"), 10**9, 4 * 10**8
    graph = cached(1000, weights, cache)
    found = token_s(graph, (0, 2), cluster)
    assert found is not None
    device, shares = cluster.devices[0], default_of(cluster.devices[0]).memory
    product_s = (weights + 1000) / device.bytes_per_s / shares["matmul"].peak
    read_s = cache / device.bytes_per_s / shares["attention"].peak
    assert 2 * product_s + read_s < found[0] < 2 * (product_s + 20e-6) + read_s
    assert found[1] >= found[0]
    assert graph.cache_bytes == (cache, 0)
    assert token_s(cached(1000, weights, 0).with_lasting({}), (0, 2), cluster) is None


def test_a_host_that_launches_op_by_op_is_slower_for_small_weights() -> None:
    cluster = parse_cluster("1xh100-80gb")
    found = token_s(cached(10, 1000, 1000), (0, 2), cluster)
    assert found is not None
    assert found[1] >= 2 * default_of(cluster.devices[0]).host_s
    assert found[0] < found[1]
