"""Stacks of experts in four bits of bitsandbytes: plans need no library, and runs are bit-equal."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.api.problem import adapted
from outsize.capture.models.imports import import_transformers
from outsize.errors import BadOption

transformers: Any = import_transformers()
peft: Any = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
IDS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(3))
BATCH: dict[str, Any] = {"input_ids": IDS, "labels": IDS, "use_cache": False}
ASKED = outsize.Request(
    quantize=outsize.Quantize("nf4", experts=True, skip=["q_proj", "k_proj", "v_proj", "o_proj"]),
    lora=outsize.Lora(4, ["q_proj", "v_proj"]),
)


def plain(experts: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES, experts_implementation=experts)
    return transformers.Qwen3MoeForCausalLM(config)


def real(experts: str) -> nn.Module:
    """The model whose stacks the library has in four bits, with adapters on attention."""
    warnings.simplefilter("ignore")
    store: Any = importlib.import_module("bitsandbytes.nn.parametrize").replace_parameter_4bit
    model: Any = plain(experts)
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            store(layer.mlp.experts, name, compress_statistics=True, quant_type="nf4")
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return made


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_a_plan_counts_what_the_library_makes(experts: str) -> None:
    """Bytes of stacks with their scales, numbers, what units save, and their memory while they compute."""
    library = outsize.capture(real(experts), (), BATCH)
    alone = outsize.capture(adapted(plain(experts), ASKED), (), BATCH)
    assert alone.fingerprint == library.fingerprint
    for one, other in zip(alone.parameters, library.parameters, strict=True):
        assert (one.names, one.size_bytes, one.count) == (other.names, other.size_bytes, other.count)
    for unit, other_unit in zip(alone.units, library.units, strict=True):
        assert (unit.saved_bytes, unit.workspace_bytes) == (
            other_unit.saved_bytes,
            other_unit.workspace_bytes,
        )


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_stages_have_the_bits_of_the_plain_loop(experts: str) -> None:
    assert outsize.check(real(experts), (), BATCH, stages=2, microbatches=2).bit_equal


def test_stacks_that_the_host_computes_have_the_bits_of_the_plain_loop() -> None:
    """On the CPU, which is device and host; the plan is made without the library."""
    asked = ASKED.joined({"weights": "host-computed", "microbatches": 4, "cluster": "1xrtx4090-24gb"})
    plan = outsize.plan(plain("grouped_mm"), (), BATCH, request=asked)
    assert plan.host_stages
    assert outsize.check(real("grouped_mm"), (), BATCH, plan=plan).bit_equal


def test_what_no_library_stores_is_refused() -> None:
    with pytest.raises(BadOption, match=r"int8 stores no stacks .*4 stacks of weights; .*nf4, fp4"):
        adapted(plain("eager"), outsize.Request(quantize=outsize.Quantize("int8", experts=True)))
    with pytest.raises(BadOption, match=r"Linear has no stack of experts; .*leave out experts"):
        adapted(nn.Linear(64, 64), outsize.Request(quantize=outsize.Quantize("nf4", experts=True)))
