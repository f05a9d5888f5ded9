"""`save_pretrained` of two ranks: what transformers and peft read back is the whole model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("parity", "unit"))

from forked import on_ranks

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.errors import BadOption
from outsize.run.weights.load import load_weights
from outsize.run.weights.safetensors import WeightFiles
from outsize.train.engine.engine import Engine

transformers = import_transformers()
peft = pytest.importorskip("peft")
diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.dist
IDS = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(0))


def language_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes, **heads))


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return peft.get_peft_model(language_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


class Mixed(nn.Module, PyTorchModelHubMixin):
    """A model with the Hub's mixin, and a part that several ranks have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, width), nn.Linear(width, 32, bias=False)
        self.inner = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inner(self.embed(input_ids))).flatten(0, 1), labels.flatten())


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed(width=8)


def denoiser() -> nn.Module:
    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"sample_size": 8, "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
    return diffusers.UNet2DModel(in_channels=3, out_channels=3, **sizes, **kinds)


def denoising(model: nn.Module) -> Engine:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return outsize.parallelize(
        model,
        (images, torch.arange(4)),
        target=images,
        loss_fn=lambda out, y: F.mse_loss(out.sample, y),
        stages=2,
        microbatches=2,
    )


def trained(model: nn.Module) -> Engine:
    engine = outsize.parallelize(
        model,
        kwargs={"input_ids": IDS, "labels": IDS},
        stages=2,
        microbatches=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )
    engine.step(input_ids=IDS, labels=IDS)
    return engine


def exported(root: Path, group: dist.ProcessGroup) -> list[str]:
    said = []
    denoising(denoiser()).save_pretrained(root / "denoiser")
    for name, model in (("whole", language_model()), ("adapters", adapted()), ("mixed", mixed())):
        engine = trained(model)
        engine.weights.save_pretrained(root / name)
        try:
            model.save_pretrained(root / "part")
        except BadOption as error:
            said.append(str(error))
    return said


def test_two_ranks_write_what_one_process_would(tmp_path: Path) -> None:
    said = on_ranks(tmp_path, 2, lambda group: exported(tmp_path, group))
    assert all(len(each) == 3 and "has a part of the weights" in each[0] for each in said)
    assert not (tmp_path / "part").exists()
    alone = trained(language_model()).weights.full_state_dict()
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    assert alone.keys() == read.keys()
    assert all(torch.equal(read[name], value) for name, value in alone.items())
    whole = trained(adapted())
    whole.save_pretrained(tmp_path / "alone")
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("alone", "adapters"))
    assert len(one) == 16
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "adapters" / "adapter_config.json").exists()
    state = trained(mixed()).weights.full_state_dict()
    read = Mixed.from_pretrained(tmp_path / "mixed").state_dict()
    assert all(torch.equal(read[name], value) for name, value in state.items())
    state, read = (
        denoiser().state_dict(),
        diffusers.UNet2DModel.from_pretrained(tmp_path / "denoiser").state_dict(),
    )
    assert all(torch.equal(read[name], value) for name, value in state.items())
    with torch.device("meta"):
        empty = diffusers.UNet2DModel.from_config(denoiser().config)
    load_weights(empty, WeightFiles(tmp_path / "denoiser"), torch.device("cpu"), set())
    assert all(torch.equal(empty.state_dict()[name], value) for name, value in state.items())


def test_another_model_has_no_such_folder(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    engine = outsize.parallelize(
        model, (torch.ones(4, 2),), target=torch.ones(4, 2), loss_fn=nn.functional.mse_loss
    )
    with pytest.raises(BadOption, match="Linear has no save_pretrained"):
        engine.weights.save_pretrained(tmp_path)
