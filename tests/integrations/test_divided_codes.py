"""Weights of bitsandbytes in four bits that two ranks of tensor parallelism divide, with adapters of peft."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn

import outsize
from outsize.capture.models.imports import import_transformers
from outsize.program.sharding.stored_weight import PartOfState, stored_weights
from outsize.train.engine.engine import Engine

transformers: Any = import_transformers()
peft: Any = pytest.importorskip("peft")
bnb: Any = pytest.importorskip("bitsandbytes")
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
IDS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(3))
LONGER = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(4))


def in_four_bits(layer: nn.Linear, kind: str, nested: bool) -> nn.Module:
    how: dict[str, Any] = {"compress_statistics": nested, "quant_type": kind}
    made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, compute_dtype=torch.float32, **how)
    made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, module=made, **how)
    made.bias = nn.Parameter(layer.bias.data + 0.1, requires_grad=False)
    return made.to("cpu")


def adapted(kind: str = "nf4", nested: bool = True, **more: Any) -> nn.Module:
    """A tiny Llama of four bits whose adapters are no zeros."""
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **more}))
    model.requires_grad_(False)
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear and name != "lm_head":
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, in_four_bits(module, kind, nested))
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"]))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return made.train()


def batch(ids: Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def engine_of(kind: str, nested: bool, **options: Any) -> tuple[Engine, nn.Module]:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05)

    warnings.simplefilter("ignore")
    model = adapted(kind, nested)
    given: dict[str, Any] = {"optimizer": sgd, "microbatches": 2, "stages": 1, **options}
    return outsize.parallelize(model, (), batch(IDS), **given), model


@cache
def trained(kind: str, nested: bool, **options: Any) -> tuple[list[float], dict[str, Any], nn.Module]:
    """Losses of steps, the last one of longer rows, and what is saved."""
    engine, model = engine_of(kind, nested, **options)
    steps = (IDS, IDS, LONGER)
    losses = [float(engine.step(**batch(ids)).loss) for ids in steps]
    return losses, engine.weights.full_state_dict(), model


def values_of(model: nn.Module) -> dict[str, Tensor]:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit" and hasattr(module, "quant_state"):
            weight: Any = module._parameters["weight"]
            found[f"{name}.weight"] = functional.dequantize_4bit(weight.data, weight.quant_state)
    return found


def told(kind: str, nested: bool, sequence: bool, group: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"axes": {"tp": 2, "others": 1}}
    if sequence:
        options["sequence_parallel"] = True
    engine, model = engine_of(kind, nested, **options)
    losses = [float(engine.step(**batch(ids)).loss) for ids in (IDS, IDS, LONGER)]
    whole = values_of(adapted(kind, nested))
    ranks = torch.distributed.get_rank(group)
    alike = []
    for name, part in values_of(model).items():
        dim = next(d for d in (0, 1) if part.shape[d] != whole[name].shape[d])
        alike.append(torch.equal(part, whole[name].chunk(2, dim)[ranks]))
    states = [getattr(p, "quant_state", None) for p in model.parameters()]
    held = sum(p.nbytes for p in model.parameters() if getattr(p, "quant_state", None) is not None)
    return {
        "losses": losses, "alike": alike, "bytes": held, "state": engine.weights.full_state_dict(),
        "parts": sum(isinstance(s, PartOfState) for s in states),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "nested", "sequence"),
    [("nf4", True, True), ("nf4", False, False), ("fp4", True, False)],
)
def test_two_ranks_divide_codes_and_train_as_one_process(
    tmp_path: Path, kind: str, nested: bool, sequence: bool
) -> None:
    losses, state, model = trained(kind, nested)
    whole = sum(p.nbytes for p in model.parameters() if getattr(p, "quant_state", None) is not None)
    ranks = on_ranks(tmp_path, 2, lambda group: told(kind, nested, sequence, group))
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, rel=2e-6)
        assert rank["alike"] == [True] * 14
        assert rank["parts"] == 14
        assert 2 * rank["bytes"] == whole
    first = ranks[0]["state"]
    assert first.keys() == state.keys()
    for name, value in state.items():
        if "lora_" in name:
            torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(first[name], value), name


def saved(root: Path, group: Any = None, **options: Any) -> tuple[list[float], list[float]]:
    """What steps after a save have as losses, and what they have in an engine that goes on from there."""
    engine, _ = engine_of("nf4", True, **options)
    engine.step(**batch(IDS))
    engine.save(root / "run")
    engine.weights.save_merged(root / "merged")
    engine.weights.full_state_dict(to=root / "streamed")
    losses = [float(engine.step(**batch(IDS)).loss) for _ in range(2)]
    again, _ = engine_of("nf4", True, resume=root / "run", **options)
    return losses, [float(again.step(**batch(IDS)).loss) for _ in range(2)]


@pytest.fixture(scope="module")
def saved_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The folder of one process, and its losses."""
    folder = tmp_path_factory.mktemp("alone")
    losses, _ = saved(folder)
    return folder, losses


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp in a pipeline": (4, {"axes": {"tp": 2, "others": 1}, "stages": 2}),
    "dp_shard": (2, {"axes": {"dp_shard": 2, "others": 1}}),
    "tp and dp_shard": (4, {"axes": {"tp": 2, "dp_shard": 2, "others": 1}}),
}


@pytest.mark.sample("tp in a pipeline", "dp_shard")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_saved_gone_on_with_and_merged(
    tmp_path: Path, saved_alone: tuple[Path, list[float]], layout: str
) -> None:
    (alone, losses), together = saved_alone, tmp_path / "together"
    count, options = LAYOUTS[layout]
    for after, again in on_ranks(tmp_path, count, lambda group: saved(together, group, **options)):
        assert after == again
        assert after == pytest.approx(losses, rel=2e-6)
    for folder in ("merged", "streamed"):
        one, other = (load_file(each / folder / "model.safetensors") for each in (alone, together))
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)


def test_least_parts_hold_whole_blocks() -> None:
    found = stored_weights(adapted())
    assert len(found) == 14
    down = next(stored for name, stored in found.items() if "down_proj" in name)
    assert (down.shape, down.least_part(0), down.least_part(1)) == ((256, 640), 1, 64)
