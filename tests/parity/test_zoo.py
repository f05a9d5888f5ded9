"""The zoo itself: each case trains in eager mode, is the same model each time, quiet without dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import CASES, Case, case

WITH_RANDOMNESS = {"deeplabv3", "gpt2", "t5", "bart", "bert", "swin", "lstm"}

# Of 22 to 61 million parameters; what uses them runs with --all alone, and so do these.
LARGE = ("resnet50", "deeplabv3", "late_fusion")
every_case = pytest.mark.parametrize(
    "name", [pytest.param(c.name, marks=[pytest.mark.full] if c.name in LARGE else []) for c in CASES]
)


def loss_after_seed(case: Case, model: nn.Module, batch_size: int, seed: int) -> Tensor:
    args, kwargs = case.batch(batch_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return case.loss_of(model(*args, **kwargs), case.target(batch_size))


def tensors(batch: Any) -> list[Tensor]:
    return [*batch[0], *batch[1].values()]


def test_the_zoo_holds_the_models_of_the_issue() -> None:
    names = "toy mlp resnet18 resnet50 deeplabv3 unet late_fusion gpt2 llama qwen3 mixtral t5 bart bert"
    assert [c.name for c in CASES] == [*names.split(), "vit", "swin", "whisper", "mamba", "lstm"]


@every_case
def test_eager_forward_and_backward_give_a_finite_loss_and_gradients(name: str) -> None:
    model = case(name).build()
    loss = loss_after_seed(case(name), model, case(name).smallest_microbatch, seed=0)
    loss.backward()
    assert torch.isfinite(loss)
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert grads
    assert [n for n, g in grads.items() if g is None or not torch.isfinite(g).all()] == []


@every_case
def test_without_dropout_the_loss_does_not_depend_on_the_generator(name: str) -> None:
    first, second = (loss_after_seed(case(name), case(name).build(), 4, seed) for seed in (1, 2))
    assert torch.equal(first, second)


@every_case
def test_the_class_defaults_keep_their_randomness(name: str) -> None:
    first, second = (loss_after_seed(case(name), case(name).build(dropout=True), 4, seed) for seed in (1, 2))
    assert torch.equal(first, second) is (name not in WITH_RANDOMNESS)


@every_case
def test_a_batch_of_twelve_has_twelve_samples_and_is_the_same_each_time(name: str) -> None:
    first, second = tensors(case(name).batch(12)), tensors(case(name).batch(12))
    assert {t.shape[0] for t in first} == {12}
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    target = case(name).target(12)
    assert (target is None) is (case(name).loss is None)
    assert target is None or target.shape[0] == 12


def test_building_leaves_the_callers_generator_alone() -> None:
    before = torch.get_rng_state()
    case("mlp").build()
    assert torch.equal(before, torch.get_rng_state())


def test_the_tied_models_are_tied() -> None:
    for name in ("gpt2", "qwen3", "t5", "bart", "bert", "whisper"):
        model: Any = case(name).build()
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight, name
