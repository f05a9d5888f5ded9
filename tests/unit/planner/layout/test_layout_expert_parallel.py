"""The graph of one rank that has some of the experts, and where the search looks for such ranks."""

from __future__ import annotations

import pytest
import torch
from tiny_transformers import SMALL, transformers
from torch import Tensor, nn

import outsize
from outsize.capture.graph.build import build_graph
from outsize.capture.graph.experts import with_experts
from outsize.capture.recording.fallbacks import record
from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import ModelGraph, Unit
from outsize.ir.plan import EXPERT_MARGIN
from outsize.planner.costs.roofline import roofline
from outsize.planner.layout.expert_parallel import expert_sizes, of_expert_rank, sent_bytes

DEVICE = parse_cluster("1xh100-80gb").devices[0]


def mixtral() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.MixtralConfig(**{**SMALL, "num_hidden_layers": 2, "num_local_experts": 5})
    tokens = torch.zeros(2, 9, dtype=torch.long)
    return transformers.MixtralForCausalLM(config).train(), {"input_ids": tokens, "labels": tokens}


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    model, given = mixtral()
    captured = build_graph(record(model, (), given), model)
    return with_experts(captured, model, captured.graph)


def test_weights_of_experts_are_marked_and_what_their_units_send(graph: ModelGraph) -> None:
    marked = [p for p in graph.parameters if p.experts]
    assert len(marked) == 4
    assert {p.experts for p in marked} == {5}
    (first, _) = [unit for unit in graph.units if unit.routed_bytes]
    assert (first.routed_bytes, first.choices) == (2 * 9 * 16 * 4, 2)


@pytest.mark.parametrize("ep", [2, 3, 5])
def test_the_first_rank_has_the_largest_block(graph: ModelGraph, ep: int) -> None:
    own, costs = of_expert_rank((graph, roofline(graph, DEVICE)), ep)
    block = -(-5 // ep)
    for whole, part in zip(graph.parameters, own.parameters, strict=True):
        assert part.size_bytes == (whole.size_bytes // 5 * block if whole.experts else whole.size_bytes)
        assert part.numel * 4 == part.size_bytes
    for whole, part, cost in zip(graph.units, own.units, costs.units, strict=True):
        factor = EXPERT_MARGIN if whole.routed_bytes else 1
        assert part.saved_bytes == int(factor * whole.saved_bytes)
        assert cost.saved_bytes == part.saved_bytes


def experts_unit(experts: int) -> tuple[ModelGraph, Unit]:
    """Of a layer that gives a token two of so many experts, in the implementation for many of them."""
    fields = {**SMALL, "num_hidden_layers": 1, "num_local_experts": experts, "intermediate_size": 256}
    config = transformers.MixtralConfig(**fields, experts_implementation="grouped_mm")
    model = transformers.MixtralForCausalLM(config).train()
    tokens = torch.zeros(2, 9, dtype=torch.long)
    given = {"input_ids": tokens, "labels": tokens}
    captured = build_graph(record(model, (), given), model)
    graph = with_experts(captured, model, captured.graph)
    return graph, next(unit for unit in graph.units if unit.routed_bytes)


@pytest.mark.parametrize("ep", [4, 16])
def test_temporaries_are_those_of_a_model_with_the_experts_of_a_rank(ep: int) -> None:
    """Gradients of weights are made whole before they are added: of 32 experts they are nearly all of it. The
    same tokens in a model that has only as many experts as a rank need no more than is counted.
    """
    graph, whole = experts_unit(32)
    own = next(u for u in of_expert_rank((graph, roofline(graph, DEVICE)), ep)[0].units if u.routed_bytes)
    _, recorded = experts_unit(32 // ep)
    sent = 2 * sent_bytes(whole, ep)
    assert recorded.backward_workspace_bytes <= own.backward_workspace_bytes - sent
    assert own.backward_workspace_bytes - sent < whole.backward_workspace_bytes / (ep / 2)


def test_the_form_that_sends_less_is_priced(graph: ModelGraph) -> None:
    unit = next(unit for unit in graph.units if unit.routed_bytes)
    assert [sent_bytes(unit, ep) // unit.routed_bytes for ep in (2, 3, 5)] == [2, 2, 2]
    four = unit.model_copy(update={"choices": 4})
    assert [sent_bytes(four, ep) // unit.routed_bytes for ep in (2, 5)] == [2, 4]


def test_each_rank_has_an_expert(graph: ModelGraph) -> None:
    assert expert_sizes(graph, 12) == [2, 3]
    assert expert_sizes(graph, 5) == [5]


def test_a_plan_with_ep_needs_less_memory_than_one_of_replicas() -> None:
    """Of four devices each has a quarter of 16 experts."""
    fields = {**SMALL, "num_hidden_layers": 1, "num_local_experts": 16, "hidden_size": 64}
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**{**fields, "intermediate_size": 512})
    )
    tokens = torch.zeros(8, 16, dtype=torch.long)
    given = {"input_ids": tokens, "labels": tokens}
    plan = outsize.plan(model, (), given, cluster="4xh100-80gb", axes={"ep": 4})
    whole = outsize.plan(model, (), given, cluster="4xh100-80gb", axes={"dp_replicate": 4})
    assert plan.axes.ep == 4
    assert plan.expected is not None
    assert whole.expected is not None
    assert plan.expected.stages[0].p95_bytes < whole.expected.stages[0].p95_bytes
