"""`save_merged`: the folder is that of peft's own merge of a dequantized model; the plain class loads it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))

from forked import on_ranks
from test_quantized_plans import TARGETS, batch, llama, of_eight_bits, of_four_bits, of_hqq, peft, swapped

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.errors import BadOption

LAYERS = {"16 bits": None, "nf4": of_four_bits, "int8": of_eight_bits, "hqq4": of_hqq}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"stages": 1}, "pp": {"stages": 2},
    "dp_shard": {"axes": {"dp_shard": 2, "others": 1}, "stages": 1},
}  # fmt: skip


def trained_alike(model: nn.Module) -> nn.Module:
    """The model with adapters that change it, in bfloat16."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    made = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=TARGETS))
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape).to(torch.bfloat16) / 16
    return made.train()


def made(name: str) -> nn.Module:
    warnings.simplefilter("ignore")
    make = LAYERS[name]
    return trained_alike(llama() if make is None else swapped(make))


def values_of(layer: Any) -> Tensor:
    """What the library itself says of a layer's weight."""
    if "HQQ" in type(layer).__name__:
        return layer.dequantize()
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    if hasattr(layer.weight, "quant_state"):
        return functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
    return layer.weight.data.to(torch.bfloat16).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


def merged_by_peft(name: str) -> dict[str, Tensor]:
    """The state of peft's merge, where the layers have the values of the library's."""
    model = LAYERS[name]
    plain = llama()
    if model is not None:
        for fqn, layer in swapped(model).named_modules():
            if hasattr(layer, "in_features") and fqn != "lm_head":
                plain.get_parameter(f"{fqn}.weight").data = values_of(layer).to(torch.bfloat16)
    return trained_alike(plain).merge_and_unload().state_dict()


def saved(name: str, folder: Path, layout: dict[str, Any]) -> None:
    engine = outsize.parallelize(
        made(name), (), batch(), microbatches=2 if "axes" not in layout else 1, **layout
    )
    engine.weights.save_merged(folder, shard_bytes=4_000_000)


@pytest.mark.sample("16 bits-pp", "nf4-pp", "nf4-dp_shard", "int8-one", "hqq4-one")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("16 bits", "pp"), ("nf4", "one"), ("nf4", "pp"), ("nf4", "dp_shard"), ("int8", "one"),
        ("hqq4", "one"), ("hqq4", "pp"),
    ],
)  # fmt: skip
def test_the_folder_is_that_of_pefts_merge(name: str, layout: str, tmp_path: Path) -> None:
    if layout == "one":
        saved(name, tmp_path / "merged", LAYOUTS[layout])
    else:
        on_ranks(tmp_path, 2, lambda group: saved(name, tmp_path / "merged", LAYOUTS[layout]))
    loaded = import_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    state, wanted = loaded.state_dict(), merged_by_peft(name)
    assert state.keys() == wanted.keys()
    assert [n for n, tensor in wanted.items() if not torch.equal(tensor, state[n])] == []
    assert len([*(tmp_path / "merged").glob("model-*-of-*.safetensors")]) > 1


def adapters_saved(folder: Path) -> None:
    engine = outsize.parallelize(made("nf4"), (), batch(), microbatches=2, stages=2)
    engine.weights.save_pretrained(folder)


def test_adapters_alone_are_saved_as_peft_loads_them(tmp_path: Path) -> None:
    on_ranks(tmp_path, 2, lambda group: adapters_saved(tmp_path / "adapters"))
    assert not [*(tmp_path / "adapters").glob("model*")]
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters")
    state = {n: t for n, t in loaded.state_dict().items() if "lora_" in n}
    wanted = {n: t for n, t in made("nf4").state_dict().items() if "lora_" in n}
    assert state.keys() == wanted.keys()
    assert all(torch.equal(tensor.to(state[n].dtype), state[n]) for n, tensor in wanted.items())


def refused(name: str) -> str:
    with pytest.raises(BadOption) as caught:
        outsize.parallelize(made(name), (), batch(), microbatches=1, **LAYOUTS["dp_shard"])
    return str(caught.value)


def test_codes_that_a_layer_keeps_twice_are_not_sharded(tmp_path: Path) -> None:
    for said in on_ranks(tmp_path, 2, lambda group: refused("int8")):
        assert "keeps the same codes as 'CB'" in said
        assert "--stages 2" in said
