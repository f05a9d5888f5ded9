"""Folders as `save_pretrained` writes them, with the names that models were published under, against
`from_pretrained`. All classes: benchmarks/ecosystem/hub_weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_transformers import GPT2, MODELS, SMALL, transformers
from torch import nn

from outsize.errors import BadWeights
from outsize.run.weights.load import load_weights, source_for
from outsize.run.weights.pretrained_names import PretrainedWeights
from outsize.run.weights.safetensors import WeightFiles
from outsize.run.weights.source import TensorPart, WeightSource, copy_weight

CPU = torch.device("cpu")
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
# Saved class, class that is filled, config class, its fields: stacked experts; a body's prefix added, and
# taken away; renamed blocks; parts of two models, each with its own renames.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "experts": ("MixtralForCausalLM", "MixtralForCausalLM", "MixtralConfig", MODELS["mixtral"][2]),
    "a body": ("GPT2Model", "GPT2LMHeadModel", "GPT2Config", GPT2),
    "without the head": ("GPT2LMHeadModel", "GPT2Model", "GPT2Config", GPT2),
    "blocks": ("ViTForImageClassification", "ViTForImageClassification", "ViTConfig", VISION),
    "two models": (
        "LlavaForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "text_config": {"model_type": "llama", **SMALL},
            "image_token_index": 5,
        },
    ),
}


def saved(case: str, folder: Path) -> tuple[Any, Any]:
    """Writes random weights; returns the class to fill and its config."""
    cls, filled, config_class, fields = CASES[case]
    config = getattr(transformers, config_class)(**fields)
    torch.manual_seed(0)
    getattr(transformers, cls)(config).save_pretrained(folder)
    return getattr(transformers, filled), config


def on_meta(cls: Any, config: Any) -> Any:
    with torch.device("meta"):
        return cls(config)


def loaded(model: nn.Module, folder: Path) -> nn.Module:
    load_weights(model, source_for(model, WeightFiles(folder)), CPU, set())
    return model


@pytest.mark.parametrize("case", CASES)
def test_it_is_loaded_as_from_pretrained_does(tmp_path: Path, case: str) -> None:
    cls, config = saved(case, tmp_path)
    wanted, found = (
        cls.from_pretrained(tmp_path).state_dict(),
        loaded(on_meta(cls, config), tmp_path).state_dict(),
    )
    assert list(wanted) == list(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_the_model_and_the_files_of_another_rank_are_left_alone(tmp_path: Path) -> None:
    cls, config = saved("experts", tmp_path)
    model = cls(config)
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    source_for(model, WeightFiles(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])


class Counted:
    """Files that write down what is read of them."""

    def __init__(self, files: WeightSource) -> None:
        self.path, self.names, self.notes, self._files = files.path, files.names, files.notes, files
        self.read: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def described(self, names: Any) -> Any:
        return self._files.described(names)

    def divides(self, name: str) -> bool:
        return self._files.divides(name)

    def box(self, name: str, offsets: Any = None, sizes: Any = None) -> Any:
        found = self._files.box(name, offsets, sizes)
        self.read[name] = self.read.get(name, 0) + found.numel()
        return found


def test_of_a_divided_weight_only_the_part_is_read(tmp_path: Path) -> None:
    cls, config = saved("experts", tmp_path)
    files = Counted(WeightFiles(tmp_path))
    source = PretrainedWeights(files, on_meta(cls, config))
    assert files.read == {}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    experts, inner, outer = source.described([name])[name].shape
    whole = source.box(name)
    files.read.clear()
    into = torch.empty(1, inner, outer)
    copy_weight(source, name, into, TensorPart(0, experts, [(2, 3)]))  # one expert of four
    assert torch.equal(into, whole[2:3])
    assert sum(files.read.values()) == into.numel()
    files.read.clear()
    into = torch.empty(experts, inner // 2, outer)
    half, quarter = inner // 2, inner // 4
    copy_weight(source, name, into, TensorPart(1, inner, [(0, quarter), (half, half + quarter)]))
    assert torch.equal(into, torch.cat([whole[:, :quarter], whole[:, half : half + quarter]], 1))
    assert sum(files.read.values()) == into.numel()


def test_what_the_files_lack_is_said(tmp_path: Path) -> None:
    _, config = saved("a body", tmp_path)
    config.num_labels = 3
    model = on_meta(transformers.GPT2ForSequenceClassification, config)
    with pytest.raises(BadWeights, match=r"E107.*lacks weights of GPT2For.*; 1 missing: score.weight"):
        loaded(model, tmp_path)


def test_other_shapes_are_said_before_anything_is_read(tmp_path: Path) -> None:
    cls, config = saved("experts", tmp_path)
    config.intermediate_size *= 2
    said = r"down_proj has another shape .*\[4, 16, 24\] in the file, \[4, 16, 48\] in the model; 8 such"
    with pytest.raises(BadWeights, match=said):
        loaded(on_meta(cls, config), tmp_path)


def test_a_conversion_that_fails_is_said(tmp_path: Path) -> None:
    cls, config = saved("experts", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(n for n in tensors if "experts.1.w1" in n)
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadWeights, match=r"the loader of MixtralForCausalLM cannot make .*gate_up_proj"):
        loaded(on_meta(cls, config), tmp_path)
