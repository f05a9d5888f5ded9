"""Workspace of instructions and units, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import two
from splits import captured, named
from torch import Tensor, nn

from outsize.capture.costs.live_memory import kept_storages, storage_key

KIB = 1024


class _Inside(nn.Module):
    """A leaf (it has a parameter and no children) whose temporaries nobody keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wide = x.repeat(1, 8)
            shift = (wide + 1.0).sum()
        return x + shift * self.scale


def test_temporaries_that_die_inside_a_leaf() -> None:
    found = captured(two(lambda m, x: m.inside(m.a(x)), inside=_Inside()), torch.randn(256, 4))
    wide = 8 * 4 * KIB
    # At its end its result is there; the scalar `shift`, which autograd keeps, is there both times.
    assert named(found, "inside").cost.workspace_bytes == 2 * wide - 4 * KIB


def test_a_layer_without_temporaries_needs_none() -> None:
    found = captured(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(4, 4))
    assert [named(found, name).cost.workspace_bytes for name in ("0", "1")] == [0, 0]


def test_glue_inside_a_unit_dies_after_its_last_reader() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.b((y + 1.0) + 2.0)

    found = captured(two(run), torch.randn(256, 4))
    unit = next(u for u in found.graph.units if u.workspace_bytes)
    assert unit.workspace_bytes == 4 * KIB  # y + 1 beside what comes of it


def test_the_backward_of_a_chain_holds_two_gradients_beside_what_is_saved() -> None:
    found = captured(two(lambda m, x: m.a(x).exp()), torch.randn(256, 4))
    cost = named(found, "exp").cost
    assert (cost.saved_bytes, cost.backward_workspace_bytes) == (4 * KIB, 8 * KIB)


def test_the_backward_of_cross_entropy_holds_the_log_probabilities_and_two_gradients() -> None:
    """The result of log_softmax is kept for its own derivative, beside its gradient and the scores'."""
    targets = torch.zeros(256, dtype=torch.long)
    found = captured(two(lambda m, x: nn.functional.cross_entropy(m.a(x), targets)), torch.randn(256, 4))
    cost = named(found, "cross_entropy").cost
    assert cost.saved_bytes + cost.backward_workspace_bytes == pytest.approx(3 * 4 * KIB, abs=2 * KIB + 16)


def test_the_gradients_of_parts_are_joined() -> None:
    """The backward of a split: the gradients of its results beside the one that they make."""

    def run(m: Any, x: Tensor) -> Tensor:
        left, right = m.a(x).chunk(2, -1)
        return left * right

    found = captured(two(run), torch.randn(256, 4))
    assert named(found, "chunk").cost.backward_workspace_bytes == 2 * 4 * KIB


def test_what_takes_the_place_of_a_weights_storage_is_no_weight() -> None:
    """bitsandbytes' int8 layers put their own codes into the weight while they run."""
    weight = torch.empty(4, device="meta")
    kept = kept_storages([weight])
    assert storage_key(weight) in kept
    weight.data = torch.empty(8, device="meta")
    made = [torch.empty(4, device="meta") for _ in range(1000)]
    assert not any(storage_key(tensor) in kept for tensor in [weight, *made])
