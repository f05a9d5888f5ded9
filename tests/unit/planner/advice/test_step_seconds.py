"""Where the seconds of a step go: the parts add up to it, and each is what its mechanism says by itself."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import pytest

from outsize.api import outlook
from outsize.api.records import Request
from outsize.cli.model_input import ModelInput, make_model_input
from outsize.ir.answers.utilisation import StepSeconds
from outsize.ir.cluster import parse_cluster
from outsize.ir.graph import MATMULS, OpFamily
from outsize.ir.plan import Kernels
from outsize.planner.advice.constant_sources import sources_of
from outsize.planner.advice.overview import Outlook
from outsize.planner.advice.step_seconds import SPENT_ON, coarse_seconds
from outsize.planner.costs.kernel_stacks import kernel_stack
from outsize.planner.costs.roofline import seconds

GPT = "transformers:GPT2Config?n_layer=4&n_embd=512&n_head=8&vocab_size=1024"
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one device": ("1xh100-80gb", {"microbatches": 2}),
    "replicas": ("4xa100-80gb", {"axes": {"dp_replicate": 4}, "stages": 1}),
    "sharded": ("2x2xh100-80gb", {"axes": {"dp_shard": 4}, "stages": 1, "weights": "sharded"}),
    "tensors and a pipeline": ("4xh100-80gb", {"axes": {"tp": 2}, "stages": 2, "microbatches": 4}),
    "recompute": (
        "2x2xv100-32gb",
        {"stages": 4, "microbatches": 8, "schedule": "1f1b", "recompute": "full", "axes": "pp"},
    ),
    "offload": ("2xa100-80gb", {"stages": 2, "microbatches": 4, "recompute": "offload", "axes": "pp"}),
    "eight bits": ("1xh100-80gb", {"microbatches": 2, "precision": "fp8"}),
    "processes": ("2xcpu", {"stages": 2, "microbatches": 4, "axes": "pp"}),
}


@cache
def subject() -> ModelInput:
    return make_model_input(GPT, "16x128", 16, meta=True)


@cache
def seen(layout: str) -> Outlook:
    """A plan of the layout, with all that is known of it."""
    cluster, asked = LAYOUTS[layout]
    call = subject()
    return outlook(*call.call, **call.loss, cluster=cluster, request=Request(batch_size=16, **asked))


def parts(layout: str) -> dict[str, float]:
    found = seen(layout).seconds
    assert found is not None
    return {part.spent: part.seconds for part in found.parts}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_add_up_to_the_step_of_the_plan(layout: str) -> None:
    found, expected = seen(layout).seconds, seen(layout).plan.expected
    assert found is not None
    assert expected is not None
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-12)
    assert sum(part.seconds for part in found.parts) == pytest.approx(expected.step_s, rel=1e-9)
    assert all(part.seconds > -1e-9 * found.step_s for part in found.parts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_constants_have_sources(layout: str) -> None:
    found = seen(layout).seconds
    assert found is not None
    for part in found.parts:
        if part.spent in {"products", "normalisations", "elementwise", "launching"}:
            assert part.sources, part.spent
            assert all(source.strip() for source in part.sources)


def test_products_are_the_works_of_all_units() -> None:
    """On one device nothing is divided: products take what the roofline says of each of them."""
    look = seen("one device")
    device = look.cluster.devices[0]
    passes = (works for u in look.graph.units for works in (u.forward, u.backward_input, u.backward_weight))
    products_s = sum(seconds([w], device) for works in passes for w in works if w.family in MATMULS)
    assert parts("one device")["products"] == pytest.approx(look.plan.microbatches * products_s)
    assert parts("one device").keys() <= {
        "products", "attention", "normalisations", "elementwise", "optimizer", "launching",
    }  # fmt: skip


def test_what_is_sent_is_told_by_kind() -> None:
    assert parts("replicas").keys() & {"weights", "messages", "within-layers"} == {"weights"}
    assert parts("sharded").keys() & {"weights", "messages", "within-layers"} == {"weights"}
    assert parts("tensors and a pipeline").keys() >= {"messages", "within-layers", "waits"}
    assert "weights" not in parts("tensors and a pipeline")


def test_recompute_is_a_second_forward() -> None:
    """The stage that computes most runs each forward twice."""
    look = seen("recompute")
    assert look.plan.expected is not None
    slowest = max(look.plan.expected.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    again_s = parts("recompute")["again"]
    assert 0 < again_s <= look.plan.microbatches * slowest.forward_s * (1 + 1e-9)
    assert "again" not in parts("tensors and a pipeline")


def test_a_file_alone_says_what_computes_and_what_waits() -> None:
    plan = seen("tensors and a pipeline").plan
    found = coarse_seconds(plan)
    assert found is not None
    assert found.coarse
    assert plan.expected is not None
    assert sum(part.seconds for part in found.parts) == pytest.approx(plan.expected.step_s)
    assert {part.spent for part in found.parts} == {"computing", "optimizer", "waits"}
    assert coarse_seconds(plan.model_copy(update={"expected": None})) is None


def test_the_record_is_written_and_read() -> None:
    found = seen("replicas").seconds
    assert found is not None
    assert StepSeconds.model_validate(found.model_dump(mode="json")) == found


def test_each_family_of_work_is_spent_on_something() -> None:
    assert SPENT_ON.keys() == {*get_args(OpFamily)}


def test_the_source_of_attention_is_that_of_the_stack() -> None:
    assert "FlashAttention-2, which" in attention_sources("eager")
    assert "FlashAttention-3 reaches" in attention_sources("fused")


def attention_sources(kernels: Kernels) -> str:
    cluster = kernel_stack(kernels).on(parse_cluster("1xh100-80gb"))
    look = seen("one device")
    return " ".join(sources_of("attention", cluster.devices[0], look.profile, cluster, kernels))
