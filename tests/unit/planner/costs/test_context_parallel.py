"""Which models may share the tokens of a sequence, and at which sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planner_graphs import graph_of, parameter, unit, value
from tiny_transformers import SMALL, transformers
from torch import nn

import outsize
from outsize.ir.findings import NoContextParallel, NoContextReason
from outsize.ir.graph import ModelGraph, OpFamily, Unit, Value, Work
from outsize.planner.costs.context_parallel import Context, context, key_value_bytes

TOKENS, WIDE = 12, 4


def op(index: int, family: OpFamily, flops: int = 0, kind: str = "Op", weight: bool = False) -> Unit:
    works = (Work(family=family, dtype="float32", flops=flops, moved_bytes=0),)
    made = unit(index, (f"w{index}",) if weight else ())
    return made.model_copy(update={"forward": works, "kind": kind})


def made(index: int, users: tuple[int, ...], *shape: int, size: int = 8) -> Value:
    return value(index, index, users, size).model_copy(update={"shape": shape})


def layer(batch: int = 1, **changed: Any) -> ModelGraph:
    """embedding -> q, k, v -> attention -> something (`changed`) -> the loss."""
    by_token = 2 * batch * TOKENS * WIDE * WIDE
    middle = op(5, "matmul", by_token, "Linear", weight=True).model_copy(update=changed)
    units = [
        op(0, "embedding", weight=True),
        *(op(at, "matmul", by_token, "Linear", weight=True) for at in (1, 2, 3)),
        op(4, "attention", 99, "scaled_dot_product_attention"),
        middle,
        op(6, "reduction", 0, "cross_entropy"),
    ]
    values = [
        made(0, (1, 2, 3), batch, TOKENS, WIDE),
        *(made(at, (4,), batch, heads, TOKENS, 2, size=heads * 10) for at, heads in ((1, 4), (2, 2), (3, 2))),
        made(4, (5,), batch, TOKENS, WIDE),
        made(5, (6,), batch * TOKENS, WIDE),
    ]
    weights = [
        parameter(f"w{at}", size_bytes=64).model_copy(update={"shape": (WIDE, WIDE)})
        for at in (0, 1, 2, 3, 5)
    ]
    return graph_of(units, values, weights, batch_size=batch)


def works(*families: OpFamily, flops: int = 0) -> tuple[Work, ...]:
    return tuple(Work(family=f, dtype="float32", flops=flops, moved_bytes=0) for f in families)


def test_products_by_the_token_and_attention_may_be_split() -> None:
    assert context(layer()) == Context(TOKENS)
    assert context(layer(forward=works("elementwise"), parameters=())) == Context(TOKENS)


@pytest.mark.parametrize(
    ("changed", "why_not"),
    [
        ({"forward": works("convolution")}, "convolution"),
        ({"kind": "LSTM"}, "recurrent"),
        ({"forward": works("normalisation"), "kind": "BatchNorm1d", "parameters": ()}, "unknown-reduction"),
        (
            {"forward": works("normalisation"), "kind": "LayerNorm"},
            "unknown-reduction",
        ),  # a weight of two dims
        ({"forward": works("reduction"), "parameters": ()}, "unknown-reduction"),
        ({"forward": works("other")}, "unknown-op"),
        ({"forward": works("matmul", flops=2 * TOKENS * WIDE)}, "product-not-by-token"),
    ],
)
def test_what_may_look_at_other_tokens_may_not(changed: dict[str, Any], why_not: NoContextReason) -> None:
    found = context(layer(**changed))
    assert found.tokens == 0
    assert found.why_not == NoContextParallel(reason=why_not, unit="h.5")
    assert found.refusal == found.why_not


def test_a_norm_over_features_may() -> None:
    norm = {"forward": works("normalisation"), "kind": "LlamaRMSNorm", "parameters": ()}
    assert context(layer(**norm)) == Context(TOKENS)


def test_values_must_have_the_tokens() -> None:
    graph = layer()
    pooled = made(5, (6,), 1, WIDE)
    short = graph.model_copy(update={"values": (*graph.values[:-1], pooled)})
    refused = NoContextParallel(reason="no-token-dim", unit="h.5", shape=(1, WIDE), tokens=TOKENS)
    assert context(short).why_not == refused


def test_what_cannot_be_told_apart_may_not() -> None:
    assert context(layer(batch=TOKENS)).why_not == NoContextParallel(
        reason="tokens-are-samples", tokens=TOKENS
    )
    graph = layer()
    other = made(3, (4,), 1, 2, TOKENS + 1, 2)
    two = graph.model_copy(update={"values": (*graph.values[:3], other, *graph.values[4:])})
    assert context(two).why_not == NoContextParallel(reason="several-lengths", lengths=2)
    none = graph.model_copy(update={"units": graph.units[:4], "values": graph.values[:1]})
    assert context(none).why_not == NoContextParallel(reason="no-attention")


def test_keys_and_values_are_counted() -> None:
    assert key_value_bytes(layer()) == {4: 40}
    graph = layer()
    packed = graph.model_copy(
        update={"values": (graph.values[0], made(3, (4,), 1, TOKENS, 3 * WIDE, size=30))}
    )
    assert key_value_bytes(packed) == {4: 60}


@pytest.mark.parametrize(
    ("tokens", "devices", "ways"),
    [
        (4096, 8, (1,)),
        (8192, 16, (1, 2)),
        (131072, 8, (1, 2, 4, 8)),
        (24576, 12, (1, 2, 3, 4, 6)),
        (8194, 8, (1, 2)),
        (8193, 8, (1,)),
    ],
)
def test_each_device_keeps_its_tokens(tokens: int, devices: int, ways: tuple[int, ...]) -> None:
    assert Context(tokens).sizes(devices) == ways


def test_a_sequence_that_is_short_says_so() -> None:
    short = NoContextParallel(reason="too-few-tokens", tokens=4096, least_tokens=4096)
    assert Context(4096).refusal == short
    assert not Context(8192).refusal


def captured(model: nn.Module, **inputs: object) -> ModelGraph:
    return outsize.capture(model, (), inputs)


def test_a_captured_llama_may_be_split() -> None:
    tokens = torch.zeros(2, TOKENS, dtype=torch.long)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    graph = captured(model, input_ids=tokens, labels=tokens, use_cache=False)
    assert context(graph) == Context(TOKENS)
    heads, size = SMALL["num_key_value_heads"], SMALL["hidden_size"] // SMALL["num_attention_heads"]
    assert set(key_value_bytes(graph).values()) == {2 * 2 * TOKENS * heads * size * 4}
    assert len(key_value_bytes(graph)) == SMALL["num_hidden_layers"]


def test_a_captured_model_of_experts_may_not() -> None:
    tokens = torch.zeros(2, TOKENS, dtype=torch.long)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL))
    graph = captured(model, input_ids=tokens, labels=tokens, use_cache=False)
    assert context(graph).tokens == 0
