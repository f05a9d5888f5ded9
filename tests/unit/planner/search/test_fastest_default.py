"""The fastest of all axes is the default; `exact` keeps the bits of one device, and the plan says what they
cost.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from findings_of import findings
from planner_graphs import chain
from torch import nn

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.errors import BadOption
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.findings import NotChosen
from outsize.ir.formatting import seconds_text
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan
from outsize.ir.profile import Profile
from outsize.ir.units.tensor_styles import TensorStyles
from outsize.planner.evaluate.ranking import BITS, CLOSE, faster
from outsize.planner.search.search import search
from outsize.report.tables.plan_tables import bits_text

BATCH = 8


def models() -> dict[int, tuple[ModelGraph, Profile]]:
    """A row that tp finds nothing to divide in."""
    found = {m: chain([1 / m] * 6, 8, 400, saved_bytes=800 // m, batch_size=BATCH // m) for m in (2, 4)}
    nothing = {"tensor": TensorStyles(modules=(), divided=())}
    return {count: (graph.model_copy(update=nothing), profile) for count, (graph, profile) in found.items()}


def cluster(bytes_per_s: float = 1e9) -> Cluster:
    found = make_cluster("2xcpu", "cpu", 1, 2, 10**6)
    link = found.inner.model_copy(update={"latency_s": 0.0, "bytes_per_s": bytes_per_s})
    return found.model_copy(update={"inner": link})


def planned(where: Cluster, *, exact: bool = False) -> Plan:
    return search(PlanRequest(batch_size=BATCH, optimizer="sgd", exact=exact), models(), where)


def step_s(plan: Plan) -> float:
    assert plan.expected is not None
    return plan.expected.step_s


def test_the_default_is_the_fastest_and_says_what_the_bits_of_one_device_cost() -> None:
    fastest, exact = planned(cluster()), planned(cluster(), exact=True)
    assert (fastest.axes.pp, fastest.bit_identical) == (1, False)
    assert (exact.axes, exact.bit_identical) == (Axes(pp=2), True)
    assert step_s(fastest) * BITS < step_s(exact)
    (other,) = [found for found in findings(fastest, NotChosen) if found.bit_identical]
    assert other.step_s == step_s(exact)
    text = bits_text(fastest, step_s(fastest))
    assert seconds_text(step_s(fastest)) in text
    assert text.endswith(f"{seconds_text(step_s(exact))} with one device's bits: --exact")
    assert bits_text(exact, step_s(exact)) == "those of one device"


def test_exact_is_as_fast_as_any_number_of_microbatches_and_as_what_the_default_names() -> None:
    """Launches take longer than layers of an eighth of this batch, so eight stages want four microbatches."""
    layers = (nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(16))
    model, x = nn.Sequential(*layers).to("meta"), torch.zeros(64, 64, 1024)

    def plan(**options: Any) -> Plan:
        return outsize.plan(model, (x,), loss_fn=torch.sum, cluster="8xh100-80gb", **options)

    exact = plan(exact=True)
    asked = {count: step_s(plan(exact=True, microbatches=count)) for count in (1, 2, 4, 8, 16)}
    assert min(asked, key=asked.__getitem__) == exact.microbatches == 4
    assert step_s(exact) <= asked[4] * CLOSE
    (named,) = [found for found in findings(plan(), NotChosen) if found.bit_identical]
    assert named.step_s == pytest.approx(step_s(exact), rel=CLOSE - 1)


def test_a_pipeline_stays_where_links_are_slow() -> None:
    """Each gradient has 400 bytes, and a value between stages 8."""
    assert planned(cluster(20.0)).axes == planned(cluster(20.0), exact=True).axes == Axes(pp=2)


def test_the_bits_are_not_given_up_for_less_than_predictions_err() -> None:
    mesh, exact = planned(cluster()), planned(cluster(), exact=True)

    def taking(seconds: float) -> Plan:
        assert mesh.expected is not None
        return mesh.model_copy(update={"expected": mesh.expected.model_copy(update={"step_s": seconds})})

    assert not faster(exact, taking(step_s(exact) / BITS * 0.999)).bit_identical
    kept = faster(exact, taking(step_s(exact) / BITS * 1.001))
    assert kept.bit_identical
    (near,) = [found for found in findings(kept, NotChosen) if "axes" in found.differs]
    assert near.step_s < near.chosen_step_s


@pytest.mark.parametrize("options", [{"tp": 2}, {"dp_shard": 2}])
def test_exact_contradicts_axes_that_add_in_another_order(options: dict[str, int]) -> None:
    with pytest.raises(BadOption, match="exact=True keeps the bits of one device"):
        PlanRequest(batch_size=BATCH, exact=True, **options)  # pyright: ignore[reportArgumentType]


def test_a_schedule_by_name_asks_for_a_pipeline() -> None:
    request = PlanRequest(batch_size=BATCH, optimizer="sgd", schedule="gpipe")
    assert search(request, models(), cluster()).axes == Axes(pp=2)


def test_one_process_alone_plans_a_pipeline_for_itself() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.zeros(8, 8)
    engine = outsize.parallelize(model, (x,), loss_fn=torch.sum, cluster="2xcpu")
    assert engine.plan.axes == Axes(pp=2)


@pytest.mark.full
def test_a_llama_of_70b_on_sixteen_h100_is_cut_between_blocks_and_beats_shared_weights() -> None:
    """Not a pipeline of 64 stages that are cut inside attention."""
    library = import_transformers()
    config = library.LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
        use_cache=False,
    )
    with torch.device("meta"):
        model = library.LlamaForCausalLM(config)
    ids = torch.zeros(16, 4096, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}

    def planned_with(**options: Any) -> Plan:
        return outsize.plan(model, (), batch, cluster="2x8xh100-80gb", precision="bf16", **options)

    plan, shared = planned_with(), planned_with(axes={"dp_shard": 16})
    assert shared.weights == "sharded"
    assert step_s(plan) <= step_s(shared) < 1.05 * step_s(plan)
    assert not any("self_attn" in pattern for stage in plan.stages for pattern in stage.units)
    (exact,) = [found for found in findings(plan, NotChosen) if found.bit_identical]
    assert exact.step_s > 1.05 * step_s(plan)
