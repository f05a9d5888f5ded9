"""Works, bytes and parameters from dimensions: published closed forms, and captures of real modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from tiny_transformers import transformers
from torch import nn
from transformer import (
    Passes,
    Sharding,
    Transformer,
    boundary_bytes,
    embedding_ops,
    head_ops,
    layer_ops,
    layer_parameters,
    layer_passes,
    layer_saved_bytes,
    parameters,
    passes,
)

import outsize
from outsize.ir.graph import Work

GPT = Transformer(layers=2, hidden=1024, heads=16, seq_len=2048, vocabulary=51200)
STATISTICS = 2 * 8 * 2048  # of two norms, in float32, which the paper leaves out
SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 256, "resid_pdrop": 0.1}
SMALL_GPT = Transformer(layers=2, hidden=64, heads=4, seq_len=32, vocabulary=256)
NARROW = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 160, "vocab_size": 256, "max_position_embeddings": 32,
}  # fmt: skip
SMALL_LLAMA = Transformer(
    layers=2, hidden=64, heads=4, kv_heads=2, ffn=160, seq_len=32, vocabulary=256,
    positions="rotary", norm="rmsnorm", gated=True, bias=False, tied=False, dropout=False,
)  # fmt: skip


def flops(works: Iterable[Work]) -> int:
    """Of matmuls and attention."""
    return sum(work.flops for work in works if work.family in ("matmul", "attention"))


def whole(model: Transformer, sharding: Sharding) -> list[int]:
    """FLOPs of all layers and the head: forward, input gradient, weight gradient."""
    parts = [layer_passes(model, sharding)] * model.layers
    parts.append(passes(head_ops(model, sharding), sharding.dtype))
    names = ("forward", "backward_input", "backward_weight")
    return [sum(flops(getattr(part, name)) for part in parts) for name in names]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, Transformer, bool]:
    """A real module on meta, the same in dimensions, and whether torch fuses its attention."""
    with torch.device("meta"):
        if request.param == "gpt2":
            config = transformers.GPT2Config(**SMALL, bos_token_id=0, eos_token_id=0)
            return transformers.GPT2LMHeadModel(config).train(), SMALL_GPT, False
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**NARROW)), SMALL_LLAMA, True


def test_the_capture_of_a_real_module_says_the_same(pair: tuple[nn.Module, Transformer, bool]) -> None:
    module, model, fused = pair
    tokens = torch.zeros(3, model.seq_len, dtype=torch.long, device="meta")
    graph = outsize.capture(module, (), {"input_ids": tokens, "use_cache": False})
    assert sum(p.numel for p in graph.parameters) == parameters(model)
    names = ("forward", "backward_input", "backward_weight")
    captured = [sum(flops(getattr(unit, name)) for unit in graph.units) for name in names]
    assert captured == whole(model, Sharding(microbatch=3, fused=fused, dtype="float32"))


@pytest.mark.parametrize("tp", [1, 4])
def test_saved_bytes_are_those_of_the_paper(tp: int) -> None:
    """Korthikanti et al., equations 1, 2 and 4 and table 2."""
    sbh, scores = 2048 * 3 * 1024, 5 * 16 * 2048 / 1024
    plain, sp = Sharding(microbatch=3, tp=tp), Sharding(microbatch=3, tp=tp, sequence_parallel=True)
    assert layer_saved_bytes(GPT, plain) - 3 * STATISTICS == sbh * (10 + 24 / tp + scores / tp)
    assert layer_saved_bytes(GPT, sp) - 3 * STATISTICS // tp == sbh * (34 + scores) / tp
    selective = sp.model_copy(update={"recompute": "selective"})
    assert layer_saved_bytes(GPT, selective) - 3 * STATISTICS // tp == sbh * 34 / tp
    assert layer_saved_bytes(GPT, plain.model_copy(update={"recompute": "full"})) == 2 * sbh


def test_fused_attention_saves_no_scores() -> None:
    sbh, sums = 2048 * 1024, 4 * 16 * 2048
    assert layer_saved_bytes(GPT, Sharding(fused=True)) == 34 * sbh + STATISTICS + sums


def test_flops_of_a_layer_are_those_of_the_paper() -> None:
    """Appendix A: 24 s h^2 (1 + s / 6 h) forward, twice that backward; full recompute repeats it."""
    forward = 24 * 2048 * 1024**2 + 4 * 2048**2 * 1024
    once = layer_passes(GPT, Sharding())
    assert flops(once.forward) == forward
    assert flops((*once.backward_input, *once.backward_weight)) == 2 * forward
    assert flops(layer_passes(GPT, Sharding(recompute="full")).recompute) == forward
    assert flops(layer_passes(GPT, Sharding(recompute="selective")).recompute) == 4 * 2048**2 * 1024
    assert once.flops > 3 * forward


def test_tensor_parallelism_shares_the_matmuls() -> None:
    one, four = (layer_passes(GPT, Sharding(tp=tp)) for tp in (1, 4))
    assert flops(one.forward) == 4 * flops(four.forward)
    norms = [Counter(w.family for w in p.forward)["normalisation"] for p in (one, four)]
    assert norms == [2, 2]


def test_parameters_of_known_models() -> None:
    gpt3 = Transformer(layers=96, hidden=12288, heads=96, seq_len=2048, vocabulary=50257)
    assert parameters(gpt3) / 174.6e9 == pytest.approx(1, abs=1e-3)
    llama = Transformer(
        layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, seq_len=4096, vocabulary=128256,
        positions="rotary", norm="rmsnorm", gated=True, bias=False, tied=False,
    )  # fmt: skip
    assert parameters(llama) == 70_553_706_496
    mixtral = llama.model_copy(
        update={"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, "vocabulary": 32000, "experts": 8}
    )
    assert parameters(mixtral) == 46_702_792_704


def test_experts_are_shared_by_ep_and_work_on_active_copies() -> None:
    model = GPT.model_copy(update={"experts": 8, "active": 2, "bias": False})
    mlp = 8 * 1024**2
    one, four = (layer_parameters(model, Sharding(ep=ep)) for ep in (1, 4))
    assert one - four == 6 * mlp
    dense = flops(layer_passes(GPT, Sharding()).forward)
    router = 2 * 2048 * 1024 * 8
    assert flops(layer_passes(model, Sharding()).forward) == dense + 2 * 2048 * mlp + router


def test_the_ends_have_embedding_and_loss() -> None:
    ends: list[Passes] = [passes(ops(GPT, Sharding()), "bfloat16") for ops in (embedding_ops, head_ops)]
    assert {work.family for work in ends[0].forward} == {"embedding", "elementwise"}
    assert flops(ends[1].forward) == 2 * 2048 * 1024 * 51200
    assert not any(work.flops for work in ends[0].backward_weight)


def test_a_boundary_is_one_hidden_state() -> None:
    assert boundary_bytes(GPT, Sharding(microbatch=3)) == 3 * 2048 * 1024 * 2
    assert boundary_bytes(GPT, Sharding(microbatch=3, tp=4, sequence_parallel=True)) == 3 * 2048 * 1024 // 2


def test_without_dropout_there_are_no_masks() -> None:
    dry = GPT.model_copy(update={"dropout": False})
    saved = [layer_saved_bytes(model, Sharding()) for model in (GPT, dry)]
    assert saved[0] - saved[1] == 2 * 2048 * 1024 + 3 * 16 * 2048**2
    assert len(layer_ops(dry, Sharding())) == len(layer_ops(GPT, Sharding()))
