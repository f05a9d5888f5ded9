"""What devices hold at least: against the tables of a small Llama in autocast, run by run."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from tiny_transformers import SMALL, transformers

from outsize.capture.fakes.precision import casting
from outsize.capture.graph.build import build_graph
from outsize.capture.graph.tensor_parallel import with_styles
from outsize.capture.recording.fallbacks import record
from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes
from outsize.ir.profile import Profile
from outsize.planner.bounds.memory import EACH, MemoryBounds
from outsize.planner.costs.cache import Cache
from outsize.planner.costs.roofline import roofline
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.layout.tensor_parallel import SavedBytes, of_rank
from outsize.planner.memory.account import InFlightState, Phase, peak_table
from outsize.planner.memory.optimizer_states import optimizer_bytes

CLUSTER = parse_cluster("1x8xh100-80gb")
WAYS = list(product((1, 2), (1, 2), (False, True)))


@cache
def model() -> tuple[ModelGraph, Profile]:
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 3})
    llama, tokens = transformers.LlamaForCausalLM(config).train(), torch.zeros(2, 9, dtype=torch.long)
    with casting("bf16-mixed"):
        captured = build_graph(record(llama, (), {"input_ids": tokens, "labels": tokens}), llama)
    graph = with_styles(captured, llama)
    return graph, roofline(graph, CLUSTER.devices[0])


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_saves_what_its_graph_says(tp: int, sequence: bool) -> None:
    graph, profile = of_rank(model(), tp, sequence)
    saved = [c.saved_bytes - u.saved_input_bytes for c, u in zip(profile.units, graph.units, strict=True)]
    assert SavedBytes.of(*model(), sequence).of_rank(tp).tolist() == saved
    assert any(unit.cast_bytes for unit in model()[0].units)


@pytest.mark.parametrize(("tp", "shard", "sequence"), WAYS)
def test_no_run_holds_less(tp: int, shard: int, sequence: bool) -> None:
    pp = 8 // tp // shard
    weights = "sharded" if shard > 1 else "resident"
    layout = Layout(Axes(pp=pp, tp=tp, dp_shard=shard), pp, "1f1b", 4, 4, weights, sequence=sequence)
    tables = Pricing({4: model()}, CLUSTER, "adamw")
    ranges = tables.stages.case(layout, CLUSTER.devices[0], "none").ranges
    bounds = MemoryBounds({4: model()}, optimizer_bytes("adamw"), Cache(), together=True)
    least = bounds.bytes_of(layout, EACH)
    runs = np.triu(np.ones(ranges.saved.shape, bool), 1)
    for in_flight in (1, 3):
        state = InFlightState(in_flight, 0, 0, 0, Phase.BACKWARD)
        held = least.fixed + least.gradients + in_flight * least.saved
        assert (peak_table(ranges, [state]) >= np.floor(held - held[:, None]))[runs].all()
    held = least.fixed + least.gradients - least.casts
    updating = peak_table(ranges, [InFlightState(0, 0, 0, 0, Phase.UPDATE)])
    assert (updating >= np.floor(held - held[:, None]))[runs].all()
