"""`lora_rank`: plan and fit are those of the model that peft makes, and frozen weights cost no state."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shared_captures import each_model_captured_once
from tiny_transformers import SMALL, transformers
from torch import nn

import outsize
from outsize.capture.models.lora import linear_names, with_adapters
from outsize.errors import BadOption, ModelNotImportable

peft = pytest.importorskip("peft")
RANK = 2
IDS = torch.arange(32).reshape(4, 8)
BATCH = {"input_ids": IDS, "labels": IDS, "use_cache": False}


@pytest.fixture(autouse=True, scope="module")
def _shared_captures() -> Iterator[None]:
    with each_model_captured_once():
        yield


def language_model(device: str = "meta") -> Any:
    with torch.device(device):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def trained_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.dtype.itemsize for p in model.parameters() if p.requires_grad)


def test_the_model_stays_as_it_is_and_shares_its_weights() -> None:
    model, before = language_model("cpu"), torch.get_rng_state()
    adapted = with_adapters(model, RANK)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("lora" in name for name, _ in model.named_modules())
    frozen = {p.data_ptr() for p in adapted.parameters() if not p.requires_grad}
    assert frozen == {p.data_ptr() for p in model.parameters()}


def test_units_and_names_are_those_of_pefts_own_model() -> None:
    config = peft.LoraConfig(r=RANK, target_modules=["k_proj", "down_proj"])
    theirs = outsize.capture(peft.get_peft_model(language_model(), config), (), BATCH)
    ours = with_adapters(language_model(), RANK, ["k_proj", "down_proj"])
    assert outsize.capture(ours, (), BATCH).fingerprint == theirs.fingerprint


@pytest.mark.parametrize(
    "layout",
    [
        {"stages": 2},
        {"axes": {"dp_shard": 2}},
        {"axes": {"tp": 2}},
        {"weights": "host-optimizer", "cluster": "1x2GB"},
    ],
    ids=lambda layout: next(iter(layout.get("axes", layout))),
)
@pytest.mark.sample("stages", "tp", "weights")
def test_only_adapters_have_gradients_and_states(layout: dict[str, Any]) -> None:
    """AdamW holds two moments and a counter for each of 16 tensors; a device has its share."""
    asked: dict[str, Any] = {"cluster": "2x2GB", "microbatches": 2, **layout}
    model = language_model()
    adapted, whole = (
        outsize.fit(model, (), BATCH, request=outsize.Request(lora=r), **asked) for r in (RANK, None)
    )
    trained = trained_bytes(with_adapters(model, RANK))
    assert (adapted.trained * 4, whole.trained) == (trained, whole.parameters)
    for answer, most in ((adapted, trained), (whole, trained_bytes(model))):
        held = [d.gradients_bytes + d.optimizer_bytes + d.master_bytes for d in answer.devices]
        assert max(held) <= 3 * most + 16 * 4
    if "weights" not in layout:
        assert sum(d.optimizer_bytes for d in adapted.devices) >= 2 * trained
        assert sum(d.optimizer_bytes for d in whole.devices) > 10 * trained


def test_a_plan_for_adapters_runs_the_model_of_peft() -> None:
    model = language_model("cpu")
    plan = outsize.plan(
        model,
        (),
        BATCH,
        cluster="2xcpu",
        stages=2,
        microbatches=2,
        schedule="1f1b",
        request=outsize.Request(lora=RANK),
    )
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK))
    assert outsize.check(adapted, (), BATCH, plan=plan).bit_equal


def test_sizes_are_those_of_the_model_with_adapters() -> None:
    def made(tokens: int) -> Any:
        ids = torch.zeros(1, tokens, dtype=torch.long)
        return language_model(), (), {"input_ids": ids, "labels": ids, "use_cache": False}, {}

    asked: dict[str, Any] = {"cluster": "1x1GB", "microbatches": 1, "step": 8, "most": 16}
    whole, adapted = (
        outsize.largest(made, request=outsize.Request(lora=rank), **asked).fit for rank in (None, RANK)
    )
    assert whole is not None
    assert adapted is not None
    assert whole.devices[0].p95_bytes > adapted.devices[0].p95_bytes
    assert whole.trained == whole.parameters < adapted.parameters
    assert adapted.trained < 0.3 * adapted.parameters


def test_errors_say_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(BadOption, match=r"lora_rank=0 makes no adapter; .*Next: outsize\.Lora\(rank=8\)"):
        with_adapters(plain, 0)
    with pytest.raises(BadOption, match=r"where in Sequential .*layers of the model: 0, 2\. Next: --lora-t"):
        with_adapters(plain, RANK)
    vars(plain)["config"] = {"num_layers": 2}  # As models of diffusers have one, without a type of model.
    with pytest.raises(BadOption, match="peft does not know where in"):
        with_adapters(plain, RANK)
    with pytest.raises(
        BadOption, match=r"peft puts no adapter on q_prj; .*Next: --lora-targets q_proj,k_pro"
    ):
        with_adapters(language_model(), RANK, ["q_prj"])
    with pytest.raises(BadOption, match=r"there are none; lora_targets='all-linear', lora_rank=None"):
        outsize.fit(
            plain, (torch.zeros(2, 4),), request=outsize.Request(lora=outsize.Lora(targets="all-linear"))
        )
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelNotImportable, match=r"peft does not import; .*Next: pip install peft"):
        with_adapters(plain, RANK, ["0"])


def test_linear_layers_are_told_by_their_last_names() -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    assert linear_names(language_model()) == names


def test_adapters_of_weights_without_memory_are_those_of_weights_with_it() -> None:
    """Nothing is drawn for them; their types and sizes are the same."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        small, large = (
            {n: (p.shape, p.dtype, p.requires_grad) for n, p in with_adapters(model, RANK).named_parameters()}
            for model in (language_model().to(dtype), language_model("cpu").to(dtype))
        )
        assert small == large
