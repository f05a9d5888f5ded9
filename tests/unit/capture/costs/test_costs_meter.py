"""FLOPs, moved bytes and saved bytes against arithmetic done by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import linear, two
from splits import captured, named
from torch import Tensor, nn

FP32 = 4


def cost(layer: nn.Module, *shape: int) -> Any:
    """Costs of the layer behind a Linear, so that its input needs a gradient."""
    model = nn.Sequential(nn.Linear(shape[-1], shape[-1]), layer)
    return named(captured(model, torch.randn(shape)), "1").cost


def test_a_linear_layer() -> None:
    found = cost(nn.Linear(8, 16), 4, 8)
    assert found.flops == 2 * 4 * 8 * 16
    assert found.moved_bytes == FP32 * (4 * 8 + 8 * 16 + 16 + 4 * 16)
    assert found.saved_bytes == FP32 * 4 * 8  # its input; the weight is not counted


def test_a_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1))
    found = named(captured(model, torch.randn(2, 3, 16, 16)), "0").cost
    assert found.flops == 2 * (2 * 16 * 16) * 8 * (3 * 3 * 3)


def test_views_move_nothing_and_have_no_cost() -> None:
    found = named(
        captured(two(lambda m, x: m.b(m.a(x).view(2, 2, 4).view(4, 4).t())), torch.randn(4, 4)), "t"
    )
    assert (found.cost.flops, found.cost.moved_bytes, found.cost.saved_bytes) == (0, 0, 0)


def test_attention_counts_two_matrix_products() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)[:, None]
        return m.b(F.scaled_dot_product_attention(y, y, y)[:, 0])

    instruction = named(captured(two(run), torch.randn(3, 5, 4)), "scaled_dot_product_attention")
    assert instruction.cost.flops == 2 * 2 * 3 * 5 * 5 * 4
    assert not instruction.random


def test_a_storage_that_two_ops_save_is_counted_once() -> None:
    found = captured(two(lambda m, x: m.a(x).exp().exp() * 1.0), torch.randn(4, 4))
    saved = sum(i.cost.saved_bytes for i in found.tape.instructions if i.name == "exp")
    assert saved == 2 * FP32 * 16

    twice = captured(two(lambda m, x: m.b(y := m.a(x).tanh()) + m.b(y)), torch.randn(4, 4)).tape
    assert [i.cost.saved_bytes for i in twice.instructions if i.name == "b"] == [0, 0]


@pytest.mark.parametrize(
    ("op", "random"),
    [
        (lambda x: F.dropout(x, 0.5, True), True),
        (lambda x: F.dropout(x, 0.0, True), False),
        (lambda x: F.dropout(x, 0.5, False), False),
        (lambda x: x + torch.randn_like(x), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), True),
        (torch.bernoulli, True),
        (torch.relu, False),
    ],
)
def test_which_instructions_draw_random_numbers(op: Any, random: bool) -> None:
    tape = captured(two(lambda m, x: m.b(op(m.a(x).sigmoid()))), torch.randn(2, 4)).tape
    assert any(i.random for i in tape.instructions) is random


def test_a_leaf_with_dropout_inside_draws_when_it_trains() -> None:
    model = nn.Sequential(linear(), nn.MultiheadAttention(4, 2, dropout=0.1))
    whole = two(lambda m, x: m.m(y := m.a(x), y, y)[0], m=model[1])
    assert named(captured(whole, torch.randn(3, 4)), "m").random
    assert not named(captured(whole.eval(), torch.randn(3, 4)), "m").random


def test_measuring_asks_autograd_and_gives_up_only_under_transforms() -> None:
    model = two(lambda m, x: m.b(torch.func.grad(lambda t: (t**3).sum())(m.a(x))))
    assert sum(i.cost.saved_bytes for i in captured(model, torch.randn(4, 4)).tape.instructions) == 0
