"""Checks in forward code: a decision on activations that can only raise is no decision.

PYTEST_DONT_REWRITE: pytest makes other code of the asserts that are tested here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Forward, batch, two
from splits import captured, check_every_cut
from torch import Tensor

from outsize.capture.recording.assertions import surviving_answer
from outsize.errors import NotCapturable, ReplayMismatch
from outsize.program.replaying.replay import insist


def _if_raise(y: Tensor) -> Tensor:
    if torch.isnan(y).any():
        raise ValueError(f"not a number among {y.shape} values of {type(y).__name__}")
    return y


def _assert(y: Tensor) -> Tensor:
    assert y.isfinite().all() and y.abs().max() < 100, "too large"  # noqa: PT018
    return y


def _either(y: Tensor) -> Tensor:
    if y.min() < -100 or y.max() > 100:
        raise ValueError
    return y


def _torch_assert(y: Tensor) -> Tensor:
    torch._assert(y.abs().max() < 100, "too large")
    return y


def _distribution(y: Tensor) -> Tensor:
    return -torch.distributions.Normal(y, y.abs() + 0.1, validate_args=True).log_prob(y * 0.5)


CHECKS: dict[str, Forward] = {
    "if": _if_raise,
    "assert": _assert,
    "or": _either,
    "torch._assert": _torch_assert,
    "distribution": _distribution,
}


@pytest.mark.parametrize("how", CHECKS)
def test_a_check_of_activations_is_an_instruction_and_the_model_is_cut_around_it(how: str) -> None:
    found = check_every_cut(two(lambda m, x: m.b(CHECKS[how](m.a(x)))), batch())
    assert len(found.graph.units) == 3
    assert any(i.target is insist for i in found.tape.instructions)
    assert found.tape.guards == ()


def test_a_check_that_fails_later_is_an_error_with_the_line() -> None:
    from outsize import parallelize, plan

    model = two(lambda m, x: m.b(_if_raise(m.a(x))))
    chosen = plan(model, (batch(),), cluster="2xcpu", stages=2, microbatches=2, loss_fn=torch.mean)
    engine = parallelize(model, (batch(),), plan=chosen, loss_fn=torch.mean)
    engine.step(batch())
    with pytest.raises(ReplayMismatch, match=rf"a check in the model's own code fails; at {__file__}:"):
        engine.step(batch() * float("nan"))


def test_a_check_of_inputs_stays_a_guard() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(_if_raise(x)))

    assert [g.value for g in captured(two(run), batch()).tape.guards] == [False]


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: m.b(x) if m.a(x).sum() > 0 else x,
        lambda m, x: m.b(x * bool(m.a(x).sum() > 0)),
        lambda m, x: m.b(x) if not any(row.sum() > 0 for row in m.a(x)) else x,
    ],
    ids=["if", "bool", "generator"],
)
def test_a_decision_that_goes_on_either_way_is_still_refused(run: Forward) -> None:
    with pytest.raises(NotCapturable, match="a decision on activations"):
        captured(two(run), batch())


def test_other_functions_have_no_way_on() -> None:
    assert surviving_answer(Tensor.item) is None
