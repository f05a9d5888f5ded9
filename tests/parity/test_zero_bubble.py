"""Zero-bubble: the backward split into I and W is bit-equal to the plain loop, with recompute too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parity_runs import (
    Combination,
    at_random,
    batch_of,
    engine_for,
    interleaved,
    planned,
    reference,
    split_run,
)
from torch import Tensor, nn
from turns import in_turns
from zoo import case

from outsize.ir.plan import Plan
from outsize.run.stage.split_backward import input_backward
from outsize.train.check.compare import compare

MODELS = (
    "mlp",
    "gpt2",
    "llama",
    "t5",
    "unet",
    "narrow_late_fusion",
    "lstm",
    "mixtral",
    "narrow_resnet18",
    "mamba",
)

SIZES = ((3, 4), (2, 3))  # stages, microbatches


def cut_like_1f1b(name: str, microbatches: int, stages: int) -> Plan:
    plan = planned(Combination(name, microbatches, stages, "1f1b"))
    return plan.model_copy(update={"schedule": "zero-bubble"})


SMALL = ("mlp", "gpt2", "unet", "lstm")


def cells() -> list[Any]:
    """Models times sizes; without --all small models have both sizes, others the two by turns."""
    rows = [(name, size, n % 2 == s) for n, name in enumerate(MODELS) for s, size in enumerate(SIZES)]
    return [
        pytest.param(name, *size, marks=[] if taken or name in SMALL else [pytest.mark.full])
        for name, size, taken in rows
    ]


@pytest.mark.parametrize(("name", "stages", "microbatches"), cells())
@pytest.mark.sample("mlp", "gpt2", "unet", "lstm", "mixtral", "narrow_resnet18")
def test_zero_bubble_is_bit_equal(name: str, stages: int, microbatches: int) -> None:
    strange = at_random(Combination(name, microbatches, stages, "zero-bubble"), seed=1)
    for plan in (cut_like_1f1b(name, microbatches, stages), strange):
        differences = compare(reference(name, microbatches), split_run(name, plan))
        assert differences.bit_equal, differences


@pytest.mark.parametrize(
    ("name", "size"), in_turns(["mlp", "gpt2", "t5", "unet", "mixtral"], [(2, 4), (3, 3)], each=1)
)
@pytest.mark.sample("mlp", "gpt2", "unet")
def test_a_v_is_bit_equal(name: str, size: tuple[int, int]) -> None:
    ranks, microbatches = size
    """Random cuts, tied weights among them; the last rank hands over to itself."""
    plan = interleaved(Combination(name, microbatches, 2 * ranks, "interleaved"), ranks)
    plan = plan.model_copy(update={"schedule": "zero-bubble-v"})
    assert plan.ranks == (*range(ranks), *reversed(range(ranks)))
    differences = compare(reference(name, microbatches), split_run(name, plan))
    assert differences.bit_equal, differences


@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_with_recompute(name: str) -> None:
    plan = cut_like_1f1b(name, 4, 3).model_copy(update={"recompute": "full"})
    differences = compare(reference(name, 4), split_run(name, plan))
    assert differences.bit_equal, differences


def test_the_weights_gradients_come_in_w_and_not_before() -> None:
    """GPT-2's matmuls wait, its LayerNorms and the tied embedding do not."""
    engine = engine_for("gpt2", cut_like_1f1b("gpt2", 4, 2))
    batch = batch_of(case("gpt2"))
    engine.step(*batch.args, **batch.kwargs, update=False)
    kinds = [s.action[1] for s in engine.timeline().spans if s.lane == "compute"]
    assert {kind: kinds.count(kind) for kind in "FIWB"} == {"F": 8, "I": 8, "W": 8, "B": 0}


# -- the split itself --------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4, bias=False))


def split(model: nn.Module, x: Tensor) -> Iterator[set[str]]:
    """Names that have a gradient after I, then after W."""
    loss = model(x).square().mean()
    later = input_backward([loss], [torch.ones_like(loss)])
    yield {n for n, p in model.named_parameters() if p.grad is not None}
    for piece in later:
        piece.run()
    yield {n for n, p in model.named_parameters() if p.grad is not None}


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def test_what_waits() -> None:
    first, second = split(layers(), X)
    assert first == {"1.weight", "1.bias"}
    assert second == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight"}


def test_a_weight_used_twice_does_not_wait() -> None:
    """Its two gradients are added before they are added to `.grad`: (g + a) + b is not g + (a + b)."""
    model: Any = layers()
    model[3].weight = model[0].weight
    first, _ = split(model, X)
    assert first >= {"0.weight", "1.weight"}
    plain: Any = layers()
    plain[3].weight = plain[0].weight
    plain(X).square().mean().backward()
    assert torch.equal(plain[0].weight.grad, model[0].weight.grad)


@pytest.mark.parametrize("late", [False, True])
def test_a_weight_with_hooks_keeps_its_backward_whole(late: bool) -> None:
    model: Any = layers()
    seen: list[Any] = []
    weight = model[0].weight
    weight.register_post_accumulate_grad_hook(seen.append) if late else weight.register_hook(seen.append)
    first, second = split(model, X)
    assert first == second
    assert len(seen) == 1
