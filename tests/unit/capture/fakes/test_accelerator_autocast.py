"""Autocast as accelerators have it, against torch's own header, dtypes by hand, and a recorded model."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import outsize
from outsize.capture.fakes.accelerator_autocast import IN_FLOAT32, TO_FLOAT32, accelerator_lists
from outsize.train.measure.training_case import TrainingCase, as_batch

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
OPS: dict[str, Any] = {
    "pow": lambda x: x**3,
    "exp": torch.exp,
    "layer_norm": lambda x: functional.layer_norm(x, (8,)),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "softmax": lambda x: x.softmax(-1),
    "sum": torch.sum,
    "sum over a dim": lambda x: x.sum(-1),
    "loss": lambda x: functional.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
}


@pytest.mark.parametrize(
    ("macro", "names"), [("AT_FORALL_FP32", IN_FLOAT32), ("AT_FORALL_FP32_SET_OPT_DTYPE", TO_FLOAT32)]
)
def test_the_lists_are_those_of_torch(macro: str, names: tuple[str, ...]) -> None:
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    body = header.split(f"#define {macro}(_)")[1].split("\n\n")[0]
    entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", body)
    assert list(names) == [f"{name}.{overload}" if overload else name for name, overload in entries]


@pytest.mark.parametrize("name", OPS)
def test_ops_of_the_lists_are_in_float32_within_the_context_alone(name: str) -> None:
    op = OPS[name]
    with torch.autocast("cpu", torch.bfloat16):
        before = op(X).dtype
        with accelerator_lists():
            assert op(X).dtype == torch.float32
            with torch.autocast("cpu", enabled=False):
                assert op(X).dtype == torch.bfloat16  # the model turns autocast off
            assert op(X.double()).dtype == torch.float64  # which autocast leaves alone
        assert op(X).dtype == before
    assert op(X).dtype == torch.bfloat16


def test_what_the_user_asks_for_is_left() -> None:
    with accelerator_lists(), torch.autocast("cpu", torch.bfloat16):
        assert X.softmax(-1, dtype=torch.float64).dtype == torch.float64
        assert X.sum(-1, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert (X.int() ** 2).dtype == torch.int32
        assert nn.Linear(8, 8)(X).dtype == torch.bfloat16


def test_gradients_pass_the_casts() -> None:
    x = X.clone().requires_grad_()
    with accelerator_lists(), torch.autocast("cpu", torch.bfloat16):
        y = x**3
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (3 * X.float() ** 2).bfloat16())


class Cubed(nn.Module):
    """Ends in the cube of a linear layer's result, which autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.pow(self.lin(x), 3.0).mean()


def test_a_model_that_is_planned_for_accelerators_is_recorded_so() -> None:
    case = TrainingCase.of(Cubed(), as_batch((X.float(),), {}, None), None, None, "bf16-mixed")
    on_device = dataclasses.replace(case, accelerated=True)
    for each, expected in ((case, torch.bfloat16), (on_device, torch.float32)):
        tape = each.captured(4).tape
        (cubed,) = (i for i in tape.instructions if i.target is torch.pow)
        assert tape.metas[cubed.out.slot].dtype == expected


def test_its_plan_has_the_bytes() -> None:
    peaks = []
    for precision in ("fp32", "bf16-mixed"):
        how: dict[str, Any] = {"stages": 1, "microbatches": 1, "precision": precision}
        plan = outsize.plan(Cubed(), (torch.randn(2**16, 8),), cluster="1xh100-80gb", **how)
        assert plan.expected is not None
        peaks.append(plan.expected.stages[0].activations_bytes)
    assert peaks[1] > 0.9 * peaks[0]
