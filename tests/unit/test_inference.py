"""`inference=True`: forwards alone, with a cache where the model generates; what it names, runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shared_captures import each_model_captured_once
from tiny_transformers import SMALL, transformers
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption

IDS = torch.arange(32).reshape(4, 8)
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture(autouse=True, scope="module")
def _shared_captures() -> Iterator[None]:
    with each_model_captured_once():
        yield


def classifier(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 8))


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def language_model() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def test_there_are_no_gradients_states_or_saved_activations() -> None:
    model, example = classifier(), (torch.zeros(64, 16),)
    asked: dict[str, Any] = {"cluster": "2x2GB", "microbatches": 4, "stages": 2}
    trained = outsize.fit(model, example, loss_fn=loss, **asked)
    run = outsize.fit(model, example, request=outsize.Request(inference=True), **asked)
    assert (run.answer, run.schedule, run.inference, run.trained) == ("YES", "forward-only", True, 0)
    for before, now in zip(trained.devices, run.devices, strict=True):
        assert (now.gradients_bytes, now.optimizer_bytes, now.master_bytes) == (0, 0, 0)
        assert now.p50_bytes < before.p50_bytes
    assert sum(d.weights_bytes for d in run.devices) == sum(d.weights_bytes for d in trained.devices)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert run.speed is not None
    assert run.speed.token_s is None
    assert run.speed.batch_s > 0


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp"])
def test_other_axes(axis: str) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    example = (torch.zeros(64, 16),)
    answer = outsize.fit(
        model, example, cluster="2x2GB", axes={axis: 2}, request=outsize.Request(inference=True)
    )
    assert answer.answer == "YES"
    assert answer.axes.used == {axis: 2}
    assert all(d.gradients_bytes + d.optimizer_bytes == 0 or axis == "dp_shard" for d in answer.devices)


def test_a_plan_for_inference_evaluates_with_the_numbers_of_the_model() -> None:
    model, x = classifier().eval(), torch.randn(16, 16)
    plan = outsize.plan(
        model, (x,), cluster="2xcpu", microbatches=4, axes="pp", request=outsize.Request(inference=True)
    )
    assert plan.schedule == "forward-only"
    assert plan.expected is not None
    assert plan.expected.update_s == 0
    assert all(stage.backward_s == 0 for stage in plan.expected.stages)
    outputs = outsize.parallelize(model, (x,), plan=plan).evaluate(x).outputs
    assert outputs is not None
    assert torch.equal(torch.cat([*outputs]), torch.cat([model(part) for part in x.chunk(4)]))


def test_a_model_that_generates_has_its_whole_batch_and_the_cache_of_all_tokens() -> None:
    answer = outsize.fit(
        language_model(), (), BATCH, cluster="2x2GB", request=outsize.Request(inference=True)
    )
    heads = SMALL["num_key_value_heads"] * SMALL["hidden_size"] // SMALL["num_attention_heads"]
    assert sum(d.cache_bytes for d in answer.devices) == 2 * 4 * IDS.numel() * heads * 4
    assert (answer.microbatches, answer.axes.pp) == (1, 2)
    assert answer.speed is not None
    assert answer.speed.tokens == 8
    assert answer.speed.token_s is not None
    assert 0 < answer.speed.token_s < answer.speed.batch_s
    half = outsize.fit(
        language_model(),
        (),
        BATCH,
        cluster="1x2GB",
        precision="bf16",
        request=outsize.Request(inference=True),
    )
    assert half.devices[0].cache_bytes == 4 * IDS.numel() * heads * 4


def test_more_fits_than_in_training() -> None:
    def made(tokens: int) -> Any:
        ids = torch.zeros(4, tokens, dtype=torch.long)
        return language_model(), (), {"input_ids": ids, "labels": ids}, {}

    asked: dict[str, Any] = {"cluster": "1x0.42GB", "step": 8, "most": 1 << 14, "precision": "bf16"}
    run = outsize.largest(made, request=outsize.Request(inference=True), **asked)
    assert run.fit is not None
    assert run.fit.devices[0].cache_bytes > 0
    assert run.value > outsize.largest(made, **asked).value > 0


def test_what_only_a_training_step_has_is_refused() -> None:
    model, example = classifier(), (torch.zeros(64, 16),)
    for name, value in (("recompute", "full"), ("schedule", "1f1b"), ("weights", "host")):
        with pytest.raises(
            BadOption, match=rf"{name}='{value}' is about a training step; .*leave out {name}"
        ):
            outsize.fit(
                model, example, cluster="2x2GB", request=outsize.Request(inference=True), **{name: value}
            )
    with pytest.raises(BadOption, match="schedule='forward-only' has no backwards"):
        outsize.fit(model, example, loss_fn=loss, cluster="2x2GB", schedule="forward-only")
    with pytest.raises(BadOption, match=r"generate runs the whole batch .*; tp 2, .*Next: leave out micro"):
        outsize.fit(
            language_model(),
            (),
            BATCH,
            cluster="2x2GB",
            axes={"tp": 2},
            request=outsize.Request(inference=True),
        )
    with pytest.raises(BadOption, match="tune runs training steps"):
        outsize.tune(model, example, request=outsize.Request(inference=True))
