"""What a linear layer costs whose weight is stored in few bits, by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outsize
from outsize.capture.models.quantized import with_stored_layers
from outsize.ir.graph import Unit
from outsize.policies.storage_formats import FP8, NF4, StorageFormat

MADE, TAKEN, ROWS = 96, 64, 8
ELEMENTS = MADE * TAKEN
PLAIN = NF4.of_blocks(None, nests=False)


def unit_of(stored: StorageFormat | None) -> Unit:
    """The middle of three layers, whose input has a gradient, with the format or in bfloat16."""
    layers = nn.Sequential(nn.Linear(TAKEN, TAKEN), nn.Linear(TAKEN, MADE), nn.Linear(MADE, 4)).bfloat16()
    layers[1].requires_grad_(False)
    model = layers if stored is None else with_stored_layers(layers, stored, ["0", "2"])
    x = torch.randn(ROWS, TAKEN, dtype=torch.bfloat16)
    graph = outsize.capture(model, (x,), target=torch.zeros(ROWS, dtype=torch.long), loss_fn=F.cross_entropy)
    return next(unit for unit in graph.units if unit.name.startswith("1"))


def of_family(unit: Unit, passed: str, family: str) -> tuple[int, int, int]:
    works = [work for work in getattr(unit, passed) if work.family == family]
    sums = (sum(getattr(work, name) for work in works) for name in ("flops", "moved_bytes", "launches"))
    flops, moved_bytes, launches = sums
    return flops, moved_bytes, launches


@pytest.mark.parametrize("passed", ["forward", "backward_input"])
def test_values_are_made_in_both_passes(passed: str) -> None:
    """4 bits and a float32 for 64 of them are read, two bytes are written; then the product reads those."""
    read = ELEMENTS // 2 + 4 * (ELEMENTS // 64 + 16)
    assert of_family(unit_of(PLAIN), passed, "cast") == (0, read + 2 * ELEMENTS, 1)
    assert of_family(unit_of(PLAIN), passed, "matmul")[0] == 2 * ROWS * ELEMENTS


def test_nested_scales_are_made_before() -> None:
    """Each of 96 scales is written in float32, moved by the mean, and read."""
    read = ELEMENTS // 2 + 96 + 4 * (1 + 1 + 256 + 16)
    assert of_family(unit_of(NF4), "forward", "cast") == (0, read + 4 * 4 * 96 + 2 * ELEMENTS, 3)


def test_memory_is_that_of_codes_and_for_a_moment_of_values() -> None:
    whole, stored = unit_of(None), unit_of(PLAIN)
    assert stored.saved_bytes == whole.saved_bytes
    # In the forward the values are there beside the result; in the backward beside two gradients.
    assert stored.workspace_bytes == 2 * ELEMENTS
    grown = stored.backward_workspace_bytes - whole.backward_workspace_bytes
    assert grown == 2 * ELEMENTS


def test_values_that_are_kept_are_saved_and_made_once() -> None:
    kept = unit_of(FP8)
    assert kept.saved_bytes - unit_of(PLAIN).saved_bytes == 2 * ELEMENTS
    assert of_family(kept, "backward_input", "cast") == (0, 0, 0)


def test_an_input_that_is_kept_is_saved() -> None:
    keeps = dataclasses.replace(PLAIN, keeps_input=True)
    assert unit_of(keeps).saved_bytes - unit_of(PLAIN).saved_bytes == 2 * ROWS * TAKEN


class OwnOp(torch.autograd.Function):
    """Multiplies where nobody sees it, and keeps its input in an attribute."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        vars(ctx)["kept"] = x.clone()
        return x.new_zeros(len(x), MADE)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] @ grads[0].new_empty(MADE, TAKEN), None


class OwnLinear(nn.Module):
    """A layer of a library that is not known, with scales in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = TAKEN, MADE
        codes = torch.zeros(ELEMENTS // 2, 1, dtype=torch.uint8)
        self.packed = nn.Parameter(codes, requires_grad=False)
        self.meta = {"scale": torch.ones(ELEMENTS // 64, dtype=torch.float16), "bits": 4}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OwnOp.apply(x, self.packed)


def test_a_library_that_nobody_knows_is_counted_by_its_sides() -> None:
    model = nn.Sequential(nn.Linear(TAKEN, TAKEN), OwnLinear(), nn.Linear(MADE, 4))
    x, target = torch.randn(ROWS, TAKEN), torch.zeros(ROWS, dtype=torch.long)
    graph = outsize.capture(model, (x,), target=target, loss_fn=F.cross_entropy)
    unit = next(unit for unit in graph.units if unit.name.startswith("1"))
    assert of_family(unit, "forward", "matmul")[0] == 2 * ROWS * ELEMENTS
    assert unit.saved_bytes == 4 * ROWS * TAKEN
    # One gradient comes, one is made, and the values are there for the product.
    assert unit.backward_workspace_bytes == 4 * (ROWS * MADE + ELEMENTS + ROWS * TAKEN)
    packed = graph.parameter_of["1.packed"]
    assert packed.size_bytes == ELEMENTS // 2 + 2 * (ELEMENTS // 64)
    assert packed.count == ELEMENTS
