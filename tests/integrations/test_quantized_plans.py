"""Plans for frozen weights in few bits against the layers of real libraries, in bytes of real steps.

`make test-integrations` installs them; without one of them its cases are skipped.
"""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.capture.models.quantized import with_stored_layers
from outsize.policies.storage_formats import FP4, FP8, HQQ4, HQQ8, INT8, NF4, StorageFormat
from outsize.program.values.stored_linear import StoredLinear
from outsize.program.values.wrapper_tensors import plain_parts
from outsize.program.weights.beside import beside_weights
from outsize.train.measure.training_case import as_batch

transformers = import_transformers()
peft = pytest.importorskip("peft")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
TARGETS = ["q_proj", "v_proj", "down_proj"]


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16)


def swapped(make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    model = llama()
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, make(module))
    return model


def of_four_bits(layer: nn.Linear, *, nested: bool = True, kind: str = "nf4") -> nn.Module:
    bnb: Any = pytest.importorskip("bitsandbytes")
    sides = layer.in_features, layer.out_features
    how: dict[str, Any] = {"compress_statistics": nested, "quant_type": kind}
    made = bnb.nn.Linear4bit(*sides, bias=False, compute_dtype=torch.bfloat16, **how)
    made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, module=made, **how)
    return made.to("cpu")


def of_eight_bits(layer: nn.Linear) -> nn.Module:
    bnb: Any = pytest.importorskip("bitsandbytes")
    made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, bias=False, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    return made.to("cpu")


def of_hqq(layer: nn.Linear, bits: int = 4) -> nn.Module:
    hqq: Any = pytest.importorskip("hqq.core.quantize")
    how = hqq.BaseQuantizeConfig(nbits=bits, group_size=64)
    return hqq.HQQLinear(layer, how, compute_dtype=torch.bfloat16, device="cpu")


def of_torchao() -> nn.Module:
    quantization: Any = pytest.importorskip("torchao.quantization")
    model = llama()

    def chosen(module: nn.Module, name: str) -> bool:
        return type(module) is nn.Linear and name != "lm_head"

    quantization.quantize_(model, quantization.Float8WeightOnlyConfig(), filter_fn=chosen)
    return model


MODELS: dict[str, tuple[StorageFormat, Callable[[], nn.Module]]] = {
    "nf4": (NF4, partial(swapped, of_four_bits)),
    "nf4, one scale each": (
        NF4.of_blocks(None, nests=False),
        partial(swapped, partial(of_four_bits, nested=False)),
    ),
    "int8": (INT8, partial(swapped, of_eight_bits)),
    "fp8": (FP8, of_torchao),
    "hqq4": (HQQ4, partial(swapped, of_hqq)),
    "fp4": (FP4, partial(swapped, partial(of_four_bits, kind="fp4"))),
    "hqq8": (HQQ8, partial(swapped, partial(of_hqq, bits=8))),
}


def adapted(model: nn.Module) -> nn.Module:
    """The model with adapters in bfloat16."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    made = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=TARGETS))
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    return made.train()


def batch() -> dict[str, Any]:
    ids = torch.randint(0, SIZES["vocab_size"], (4, 128), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark of memory, with the parts of weights of codes."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER / "prediction"))
    monkeypatch.syspath_prepend(str(FOLDER / "memory"))
    run = importlib.import_module("run")
    plain = run.held

    def held(
        model: nn.Module, weights: Any, optimizer: Any, home: dict[str, int], stage: int
    ) -> list[Tensor]:
        own = plain(model, weights, optimizer, home, stage)
        beside = (each.tensor for each in beside_weights(model) if home.get(each.owner) == stage)
        return [part for tensor in (*own, *beside) for part in plain_parts(tensor).values()]

    monkeypatch.setattr(run, "held", held)
    yield run
    for name in set(sys.modules) - before:
        if name in {"run", "meter", "cases", "models"}:
            del sys.modules[name]


# By turns.
@pytest.mark.sample("1-nf4, one scale each", "1-fp4", "1-hqq4", "1-hqq8", "2-nf4", "2-int8", "2-fp8")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [1, 2])
def test_memory_of_real_steps_is_that_of_a_plan_without_the_library(
    benchmark: Any, name: str, stages: int
) -> None:
    """Within 2 % on each stage; the plan is made of stand-ins, the steps are of the library's layers."""
    warnings.simplefilter("ignore")
    stored, make = MODELS[name]
    case_of = partial(benchmark.Case, batch=as_batch((), batch(), None), loss_fn=None)
    planned, real = case_of(adapted(with_stored_layers(llama(), stored))), case_of(adapted(make()))
    asked: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4, "optimizer": "adamw", "recompute": "none"}
    plan = outsize.plan(planned.model, (), batch(), cluster=f"{stages}xcpu", stages=stages, **asked)
    own = outsize.plan(real.model, (), batch(), cluster=f"{stages}xcpu", stages=stages, **asked)
    own = own.model_copy(update={"stages": plan.stages})  # The same cut, for the library's model.
    said = [memory.peak_bytes for memory in benchmark.predict(planned, plan)]
    found = benchmark.real(real, own, benchmark.OPTIMIZERS["adamw"]).peaks
    gc.collect()
    assert [one / other - 1 for one, other in zip(said, found, strict=True)] == pytest.approx(
        [0] * stages, abs=0.02
    )


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_a_plan_is_for_the_model_of_the_library(name: str) -> None:
    stored, make = MODELS[name]
    planned, real = (
        outsize.capture(adapted(model), (), batch())
        for model in (with_stored_layers(llama(), stored), make())
    )
    assert planned.fingerprint == real.fingerprint
    assert [p.size_bytes for p in planned.parameters] == [p.size_bytes for p in real.parameters]
    assert [p.count for p in planned.parameters] == [p.count for p in real.parameters]
    both = (planned, real)
    forward, backward = (
        [sum(work.flops for unit in graph.units for work in getattr(unit, pass_)) for graph in both]
        for pass_ in ("forward", "backward_input")
    )
    assert forward[0] == forward[1]
    assert backward[0] == backward[1]


EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_local_experts": 4, "num_experts": 4}


@pytest.mark.parametrize("kind", ["Llama", "Mixtral", "Qwen3Moe", "GPT2"])
def test_a_plan_stores_the_layers_that_transformers_swaps(kind: str) -> None:
    """Routers and stacks of experts are no linear layers: transformers leaves them in 16 bits."""
    pytest.importorskip("bitsandbytes")
    swaps: Any = importlib.import_module("transformers.integrations.bitsandbytes")
    keeps: Any = importlib.import_module("transformers.quantizers.base")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4} if kind == "GPT2" else {**SIZES, **EXPERTS}
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    with torch.device("meta"):
        model, real = (
            getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**sizes)) for _ in range(2)
        )
    how = transformers.BitsAndBytesConfig(load_in_4bit=True)
    real = swaps.replace_with_bnb_linear(real, keeps.get_keys_to_not_convert(real), how)
    swapped_names = {name for name, module in real.named_modules() if type(module).__name__ == "Linear4bit"}
    stored = with_stored_layers(model, NF4)
    assert {
        name for name, module in stored.named_modules() if isinstance(module, StoredLinear)
    } == swapped_names
    assert swapped_names


def test_a_plan_runs_with_the_bits_of_the_plain_loop() -> None:
    asked = outsize.Request(quantize="nf4", lora=outsize.Lora(8, TARGETS), stages=2, microbatches=2)
    plan = outsize.plan(llama(), (), batch(), cluster="2xcpu", schedule="1f1b", request=asked)
    model = swapped(of_four_bits).requires_grad_(False)
    real = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=TARGETS))
    assert outsize.check(real, (), batch(), plan=plan).bit_equal
