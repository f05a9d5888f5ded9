"""Oracle: stages whose units are all recomputed, as memory/recomputed_blocks.py and sharded.py count them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_transformers import SMALL, transformers

from outsize.capture.graph.build import build_graph
from outsize.capture.graph.tensor_parallel import with_styles
from outsize.capture.recording.fallbacks import record
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster, parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Expected
from outsize.ir.profile import Profile
from outsize.planner.costs.roofline import roofline
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.headroom import least, room_bytes
from outsize.planner.search.search import search
from outsize.planner.strategies.selective_recompute import UnitLevelModel, saving_case
from outsize.policies.activations import WHOLE_STAGE, Recompute

LAYERS, BATCH = 6, 4


@cache
def subject() -> tuple[ModelGraph, Profile]:
    """A Llama of many tokens, so that activations are many times the weights."""
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": LAYERS})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
        tokens = torch.zeros(BATCH, 256, dtype=torch.long)
    captured = build_graph(record(model, (), {"input_ids": tokens, "labels": tokens}), model)
    graph = with_styles(captured, model)
    return graph, roofline(graph, parse_cluster("1xcpu").devices[0])


LAYOUTS = {
    "alone": Layout(Axes(), 1, "1f1b", 1, 1),
    "tp": Layout(Axes(tp=2), 1, "1f1b", 1, 1),
    "sequence": Layout(Axes(tp=2), 1, "1f1b", 1, 1, sequence=True),
    "stages of tp": Layout(Axes(pp=2, tp=2), 2, "1f1b", 1, 1),
    "sharded": Layout(Axes(dp_shard=2), 1, "1f1b", 1, 1, "sharded"),
    "sharded tp": Layout(Axes(dp_shard=2, tp=2), 1, "1f1b", 1, 1, "sharded"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_units_are_as_many_bytes_as_block_by_block(name: str) -> None:
    layout = LAYOUTS[name]
    pricing = Pricing({1: subject()}, parse_cluster("4xcpu"), "adamw", most=10**6)
    pipeline = pricing.pipeline(layout, WHOLE_STAGE)
    assert pipeline is not None
    device, n = pipeline.device(0), len(subject()[0].units)
    blocks = pricing.stages.case(layout, device, "selective")
    units = UnitLevelModel.of(pricing, pipeline, 0, "adamw")
    run = 0, n
    chosen = units.case(saving_case(pipeline, 0), run, frozenset(range(n)))
    for table in ("saved", "forward", "backward"):
        assert getattr(chosen.ranges, table)[run] == getattr(blocks.ranges, table)[run], table
    assert chosen.ranges.first_backward[run] >= blocks.ranges.first_backward[run]
    assert chosen.seconds.total.sum() == pytest.approx(blocks.seconds.total.sum())


def planned(cluster: Cluster, *, sequence: bool, recompute: Recompute | None = None) -> Expected:
    request = PlanRequest(
        batch_size=BATCH,
        microbatches=1,
        schedule="1f1b",
        sequence_parallel=sequence,
        recompute=recompute,
    )
    found = search(request.on(Axes(tp=2)), {1: subject()}, cluster)
    assert found.axes == Axes(tp=2)
    assert found.expected is not None
    return found.expected


def two(memory_bytes: int) -> Cluster:
    return make_cluster("2xcpu", "cpu", 1, 2, memory_bytes)


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sequence"])
def test_a_divided_stage_recomputes_what_memory_wants_and_no_more(*, sequence: bool) -> None:
    """More seconds the less memory there is, from nothing on."""
    most = planned(two(10**12), sequence=sequence, recompute="none").stages[0].peak_bytes
    counts, seconds = list[int](), list[float]()
    for share in (1.0, 0.9, 0.7, 0.5):
        cluster = two(least(int(share * most) + 1, parse_cluster("1xcpu").devices[0]))
        found = planned(cluster, sequence=sequence)
        assert found.stages[0].peak_bytes <= room_bytes(cluster.devices[0])
        counts.append(found.stages[0].recomputed)
        seconds.append(found.step_s)
    assert counts[0] == 0 < counts[1] < counts[2] < len(subject()[0].units)
    assert seconds == sorted(seconds)
