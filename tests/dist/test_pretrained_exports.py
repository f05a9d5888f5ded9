"""`engine.save_pretrained` over two ranks: what transformers and peft read back is the whole model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("parity", "unit"))

from forked import on_ranks

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.errors import BadOption
from outsize.train.engine.engine import Engine

transformers = import_transformers()
peft = pytest.importorskip("peft")
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
    for name, model in (("whole", language_model()), ("adapters", adapted())):
        engine = trained(model)
        engine.save_pretrained(root / name)
        try:
            model.save_pretrained(root / "part")
        except BadOption as error:
            said.append(str(error))
    return said


def test_two_ranks_write_what_one_process_would(tmp_path: Path) -> None:
    said = on_ranks(tmp_path, 2, lambda group: exported(tmp_path, group))
    assert all(len(each) == 2 and "has a part of the weights" in each[0] for each in said)
    assert not (tmp_path / "part").exists()
    alone = trained(language_model()).full_state_dict()
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


def test_another_model_has_no_such_folder(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    engine = outsize.parallelize(
        model, (torch.ones(4, 2),), target=torch.ones(4, 2), loss_fn=nn.functional.mse_loss
    )
    with pytest.raises(BadOption, match="Linear is no model of transformers or peft"):
        engine.save_pretrained(tmp_path)
