"""`quantize`: plans for frozen weights in few bits need no library, and name what a library would swap."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from coded_tensors import network
from shared_captures import each_model_captured_once
from tiny_transformers import GPT2, SMALL, transformers
from torch import nn
from torch.nn import functional

import outsize
from outsize.capture.models.quantized import with_stored_layers
from outsize.cli import options
from outsize.errors import BadOption
from outsize.policies.storage_formats import NF4, storage_formats
from outsize.program.values.stored_linear import StoredLinear
from outsize.train.batch.checks import insist_on_model

pytest.importorskip("peft")
IDS = torch.arange(32).reshape(4, 8)
BATCH = {"input_ids": IDS, "labels": IDS, "use_cache": False}


@pytest.fixture(autouse=True, scope="module")
def _shared_captures() -> Iterator[None]:
    with each_model_captured_once():
        yield


def llama(device: str = "meta", **more: Any) -> Any:
    with torch.device(device):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **more}))


def stored_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, StoredLinear)}


def test_linear_layers_but_the_head_are_stored_and_the_model_stays() -> None:
    model = llama("cpu")
    stored = with_stored_layers(model, NF4)
    assert {n.rpartition(".")[2] for n in stored_names(stored)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert not stored_names(model)
    assert all(p.requires_grad for p in model.parameters())
    assert stored.get_parameter("lm_head.weight").data_ptr() == model.lm_head.weight.data_ptr()


def test_layers_of_gpt2_are_stored_too() -> None:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    stored = with_stored_layers(model, NF4)
    layer = stored.get_submodule("transformer.h.0.attn.c_attn")
    assert isinstance(layer, StoredLinear)
    assert (layer.in_features, layer.out_features, layer.bias is not None) == (16, 48, True)


def test_layers_that_are_skipped_stay() -> None:
    names = stored_names(with_stored_layers(llama(), NF4, ["down_proj", "model.layers.0.mlp.up_proj"]))
    assert "model.layers.0.mlp.up_proj" not in names
    assert "model.layers.1.mlp.up_proj" in names
    assert not any(name.endswith("down_proj") for name in names)


@pytest.mark.parametrize("stored", storage_formats(), ids=lambda each: each.name)
def test_every_format_fits_in_less(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("bitsandbytes", "torchao", "hqq"):
        monkeypatch.setitem(sys.modules, package, None)
    asked: dict[str, Any] = {"cluster": "1x2GB", "precision": "bf16", "microbatches": 2}
    wide = llama(hidden_size=128, intermediate_size=256)
    plain, few = (
        outsize.fit(wide, (), BATCH, request=outsize.Request(lora=4, quantize=name), **asked)
        for name in (None, stored.name)
    )
    assert few.answer == plain.answer == "YES"
    assert few.trained == plain.trained > 0
    assert few.parameters == plain.parameters
    assert few.devices[0].weights_bytes < plain.devices[0].weights_bytes
    assert few.devices[0].optimizer_bytes == plain.devices[0].optimizer_bytes


def test_a_plan_has_stages_of_codes() -> None:
    asked = outsize.Request(lora=4, quantize=outsize.Quantize("nf4", block=128, nested=False))
    wide = llama(hidden_size=128, intermediate_size=256)
    plan = outsize.plan(wide, (), BATCH, cluster="2x2GB", stages=2, precision="bf16", request=asked)
    assert len(plan.stages) == 2


def test_a_plan_is_for_as_many_numbers_in_another_type() -> None:
    wide = llama(hidden_size=128, intermediate_size=256)
    asked = outsize.Request(quantize="nf4")
    plan = outsize.plan(wide, (), BATCH, cluster="2x2GB", stages=2, microbatches=2, request=asked)
    graph = outsize.capture(with_stored_layers(wide.bfloat16(), NF4), (), BATCH)
    assert plan.fingerprint != graph.fingerprint
    insist_on_model(plan, graph)


def test_errors_say_what_to_type() -> None:
    def fit(**fields: Any) -> Any:
        return outsize.fit(llama(), (), BATCH, cluster="1x1GB", request=outsize.Request(**fields))

    with pytest.raises(BadOption, match=r"quantize='nf5' is no format .*known: nf4, fp4, .*--quantize nf4"):
        fit(quantize="nf5")
    with pytest.raises(BadOption, match=r"no linear layer is called q_prj; .*q_proj, k_proj"):
        fit(quantize=outsize.Quantize("nf4", skip=["q_prj"]))
    with pytest.raises(BadOption, match=r"quantize has block and no format"):
        fit(quantize=outsize.Quantize(block=64))
    with pytest.raises(BadOption, match=r"block=0 makes no sense"):
        outsize.Quantize("nf4", block=0)
    with pytest.raises(BadOption, match=r"Sequential has no layer to store so; .*there are none"):
        with_stored_layers(nn.Sequential(nn.ReLU()), NF4)


def test_flags_say_the_same() -> None:
    keys = options.QuantizeKeys(format="nf4", skip="up_proj+down_proj")
    assert options.quantize_asked(keys) == outsize.Quantize("nf4", skip=["up_proj", "down_proj"])
    lora = options.lora_asked(options.LoraKeys(r=16, targets="q_proj+v_proj"), None, None)
    assert lora == outsize.Lora(16, ("q_proj", "v_proj"))
    assert options.lora_asked(options.NO_LORA, 8, "all-linear") == outsize.Lora(8, "all-linear")
    with pytest.raises(BadOption, match="--lora and --lora-rank both say"):
        options.lora_asked(options.LoraKeys(r=16), 8, None)


def test_tp_is_refused_for_formats_that_it_cannot_divide_and_left_out_of_a_search() -> None:
    wide = llama(hidden_size=128, intermediate_size=256)
    asked: dict[str, Any] = {"cluster": "4xcpu", "request": outsize.Request(quantize="int8", lora=4)}
    said = r"tp would divide .*q_proj.* few bits: int8, where .*tp divides nf4, fp4.*dp_shard=2"
    with pytest.raises(BadOption, match=said):
        outsize.plan(wide, (), BATCH, axes={"tp": 2}, **asked)
    assert outsize.plan(wide, (), BATCH, **asked).axes.tp == 1


def test_tp_divides_whole_blocks_of_four_bits() -> None:
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    wide = llama(hidden_size=256, intermediate_size=512, **sizes)
    asked: dict[str, Any] = {"request": outsize.Request(quantize="nf4", lora=4)}
    whole, divided = (
        outsize.fit(wide, (), BATCH, cluster=f"{tp}x2GB", axes={"tp": tp, "others": 1}, **asked)
        for tp in (1, 2)
    )
    codes = sum(
        NF4.code_bytes(m.weight.numel()) + NF4.beside_bytes(m.weight.numel(), m.weight.shape[0])
        for name, m in wide.named_modules()
        if type(m) is nn.Linear and name != "lm_head"
    )
    one, other = (answer.devices[0].weights_bytes for answer in (whole, divided))
    assert one - other >= codes // 2
    odd = llama(hidden_size=256, intermediate_size=384, **sizes)
    with pytest.raises(BadOption, match=r"blocks of 64 along down_proj=6 is not divided by tp=4; 2 divides"):
        outsize.plan(odd, (), BATCH, axes={"tp": 4}, cluster="4x2GB", **asked)


def test_tp_is_refused_for_weights_that_are_made_of_others() -> None:
    x = torch.randn(8, 16)
    asked: dict[str, Any] = {"target": x, "loss_fn": functional.mse_loss, "cluster": "4xcpu"}
    with pytest.raises(BadOption, match=r"tp would divide .*, and 2\.weight is .*; 2 weights of codes, tp 2"):
        outsize.plan(network(), (x,), axes={"tp": 2}, **asked)
    assert outsize.plan(network(), (x,), **asked).axes.tp == 1
