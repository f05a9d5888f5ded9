"""Products that are added up in float16: in steps and evaluations alone, and where a device can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.device.accelerators import float16_sums
from outsize.errors import BadOption, UnsupportedPlan
from outsize.ir.findings import NarrowSum
from outsize.train.engine import engine as engines

NARROW = "fp16-fp16acc"
X, Y = (torch.randn(8, 6, generator=torch.Generator().manual_seed(n)) for n in range(2))


class Noting(nn.Module):
    """Notes whether products are added up in float16, in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        return Noted.apply(x, self)  # pyright: ignore[reportReturnType]

    def note(self, when: str) -> None:
        self.seen.append((when, bool(torch.backends.cuda.matmul.allow_fp16_accumulation)))


class Noted(torch.autograd.Function):
    """Notes when it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noting: Noting) -> Tensor:
        ctx.noting = noting
        noting.note("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.noting.note("backward")
        return grads[0].clone(), None


def asked(model: nn.Module, **wishes: Any) -> outsize.Plan:
    fields = {"cluster": "2xrtx4090", "stages": 2, "microbatches": 2, "precision": NARROW, **wishes}
    return outsize.plan(model, (X,), target=Y, loss_fn=F.mse_loss, **fields)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Noting(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPUs are taken to have the switch, which is torch's for CUDA and does nothing here."""
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    monkeypatch.setattr(engines, "has_float16_sums", lambda _: True)
    yield
    assert torch.backends.cuda.matmul.allow_fp16_accumulation == before


def engine_of(model: nn.Module, plan: outsize.Plan) -> outsize.Engine:
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": Y, "optimizer": torch.optim.SGD}
    return outsize.parallelize(model, (X,), plan=plan, devices=["cpu", "cpu"], **given)


@pytest.mark.usefixtures("everywhere")
def test_they_are_for_steps_and_evaluations_of_plans_that_ask_for_them() -> None:
    model = network()
    noting: Any = model[1]
    plan = asked(model)
    engine, plain = engine_of(model, plan), engine_of(network(), asked(network(), precision="fp16-mixed"))
    noting.seen.clear()
    engine.step(X, target=Y)
    engine.evaluate(X, target=Y)
    assert {when for when, _ in noting.seen} == {"forward", "backward"}
    assert all(narrow for _, narrow in noting.seen)
    noting.seen.clear()
    model(X)
    assert noting.seen == [("forward", False)]
    other: Any = next(m for m in plain.model.modules() if isinstance(m, Noting))
    other.seen.clear()
    plain.step(X, target=Y)
    assert not any(narrow for _, narrow in other.seen)
    with float16_sums():
        engine.step(X, target=Y)
        assert torch.backends.cuda.matmul.allow_fp16_accumulation, "what the user has set stays"


@pytest.mark.usefixtures("everywhere")
def test_they_end_with_a_step_that_fails() -> None:
    model = network()
    engine = engine_of(model, asked(model))
    with pytest.raises(Exception, match=r"shape|size|dim"):
        engine.step(torch.randn(8, 5), target=Y)


def test_a_device_that_adds_up_in_float32_alone_refuses_the_plan() -> None:
    model = network()
    with pytest.raises(UnsupportedPlan) as refused:
        engine_of(model, asked(model))
    assert "adds products up in float16, and cpu does not" in str(refused.value)
    assert "--precision fp16-mixed" in str(refused.value)
    with pytest.raises(BadOption, match="needs products that are added up in float16, which cpu has not"):
        asked(network(), cluster="2xcpu")


def test_a_plan_tells_their_errors_and_no_other_plan_does() -> None:
    (told,) = (reason for reason in asked(network()).reasons if isinstance(reason, NarrowSum))
    assert [terms for terms, _ in told.errors] == [1024, 4096, 16384]
    assert all(0.001 < error < 0.005 for _, error in told.errors)
    assert not [r for r in asked(network(), precision="fp16-mixed").reasons if isinstance(r, NarrowSum)]


def test_a_split_model_refuses_them() -> None:
    model = network()
    with pytest.raises(UnsupportedPlan, match=r"sums in float32.*precision 'fp16-fp16acc'"):
        outsize.split(model, (X,), plan=asked(model, request=outsize.Request(loop=True)))
