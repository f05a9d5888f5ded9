"""What a linear layer costs in each precision, by hand: 48 rows of 64 features that become 128.

The input has 48 x 64 = 3,072 elements, the weight 128 x 64 = 8,192, the result 48 x 128 = 6,144; a product
has 2 x 48 x 64 x 128 = 786,432 FLOPs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outsize.ir.graph import MATMULS, Unit, Work
from outsize.ir.plan import Kernels
from outsize.planner.costs.kernel_stacks import kernel_stack
from outsize.policies.precisions import precision_policies, precision_policy
from outsize.train.measure.training_case import TrainingCase, as_batch

X, W, Y, FLOPS = 3072, 8192, 6144, 786_432
CASTS = X + W, Y + W + Y + X


@pytest.fixture
def layer() -> nn.Module:
    return nn.Linear(64, 128, bias=False)


def unit_of(layer: nn.Module, precision: str, *, of_input: bool = True) -> Unit:
    """The layer, whose input has a gradient where another layer without weights of its own is before it."""
    x = torch.randn(8, 6, 64, requires_grad=of_input)
    batch = as_batch((x,), None, torch.randn(8, 6, 128))
    return TrainingCase.of(layer, batch, nn.functional.mse_loss, None, precision).captured(8).graph.units[0]


def works(unit: Unit, passed: str, *, products: bool) -> list[Work]:
    return [work for work in getattr(unit, passed) if (work.family in MATMULS) is products]


def product(unit: Unit, passed: str) -> tuple[Any, ...]:
    """Type, FLOPs, bytes and number of the products of a pass; () for none."""
    found = works(unit, passed, products=True)
    assert len(found) < 2
    return tuple((w.dtype, w.flops, w.moved_bytes, w.launches) for w in found)


# The forward's product; those of the backward, where one function computes both or each has its own.
EXPECTED: dict[str, tuple[Any, ...]] = {
    "fp32": (
        ("float32", FLOPS, 4 * (X + W + Y), 1),
        ("float32", FLOPS, 4 * (X + W + Y), 1),
        ("float32", FLOPS, 4 * (X + W + Y), 1),
    ),
    "tf32": (
        ("tfloat32", FLOPS, 4 * (X + W + Y), 1),
        ("tfloat32", FLOPS, 4 * (X + W + Y), 1),
        ("tfloat32", FLOPS, 4 * (X + W + Y), 1),
    ),
    "bf16": (
        ("bfloat16", FLOPS, 2 * (X + W + Y), 1),
        ("bfloat16", FLOPS, 2 * (X + W + Y), 1),
        ("bfloat16", FLOPS, 2 * (X + W + Y), 1),
    ),
    "fp16-fp16acc": (
        ("float16_fp16acc", FLOPS, 2 * (X + W + Y), 1),
        ("float16_fp16acc", FLOPS, 2 * (X + W + Y), 1),
        ("float16_fp16acc", FLOPS, 2 * (X + W + Y), 1),
    ),
    # 48 rows are a multiple of 16.
    "fp8": (
        ("float8_e4m3fn", FLOPS, X + W + 2 * Y, 1),
        ("float8_e5m2", 2 * FLOPS, (Y + W + 2 * X) + (Y + X + 2 * W), 2),
        (),
    ),
    # Each 128 elements have four bytes of scale: 3,168 of X, 8,448 of W, 6,336 of Y.
    "fp8-block": (
        ("float8_e4m3fn", FLOPS, 3168 + 8448 + 2 * Y, 1),
        ("float8_e4m3fn", FLOPS, 6336 + 8448 + 2 * X, 1),
        ("float8_e4m3fn", FLOPS, 6336 + 3168 + 2 * W, 1),
    ),
    # Each 32 elements have one byte of scale; where rows are added up, 48 become 64.
    "mxfp8": (
        ("float8_e4m3fn", FLOPS, 3168 + 8448 + 2 * Y, 1),
        ("float8_e4m3fn", FLOPS, 6336 + 8448 + 2 * X, 1),
        ("float8_e4m3fn", FLOPS * 64 // 48, (6336 + 3168) * 64 // 48 + 2 * W, 1),
    ),
    # Half a byte, and one of scale for 16: 9 / 16.
    "nvfp4": (
        ("float4_e2m1fn", FLOPS, (X + W) * 9 // 16 + 2 * Y, 1),
        ("float4_e2m1fn", FLOPS, (Y + W) * 9 // 16 + 2 * X, 1),
        ("float4_e2m1fn", FLOPS * 64 // 48, (Y + X) * 9 // 16 * 64 // 48 + 2 * W, 1),
    ),
}
# As bf16 and fp16-fp16acc, by autocast; the weight's gradient is counted in float32.
BY_AUTOCAST = {"bf16-mixed", "fp16-mixed"}


@pytest.mark.parametrize("precision", sorted(EXPECTED))
def test_products_are_those_counted_by_hand(layer: nn.Module, precision: str) -> None:
    unit = unit_of(layer, precision)
    found = tuple(product(unit, each) for each in ("forward", "backward_input", "backward_weight"))
    assert found == tuple((each,) if each else () for each in EXPECTED[precision])


def test_each_precision_is_counted_by_hand_or_by_autocast() -> None:
    assert {policy.name for policy in precision_policies()} == EXPECTED.keys() | BY_AUTOCAST


# Bytes of casts for an element, kernels, of which operands: forward and backward.
@pytest.mark.parametrize(
    ("precision", "forward", "backward"),
    [
        # abs 4, max 2, float32 6, times the scale 8, clamped 8, cast 5, padded 2.
        ("fp8", (35 * CASTS[0], 13 * 2), (35 * CASTS[1], 13 * 4)),
        # Read once, written by rows and by columns.
        ("fp8-block", (2 * X + 2 * 3168, 1), (2 * Y + 2 * 6336, 1)),
        ("mxfp8", (2 * X + 2 * 3168, 1), (2 * Y + 2 * 6336, 1)),
        ("nvfp4", (4 * X + 2 * X * 9 // 16, 2), (4 * Y + 2 * Y * 9 // 16, 2)),
    ],
)
def test_casts_are_kernels_of_their_own(
    layer: nn.Module, precision: str, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    unit = unit_of(layer, precision)
    for passed, expected in (("forward", forward), ("backward_input", backward)):
        (cast,) = [work for work in works(unit, passed, products=False) if work.family == "cast"]
        assert (cast.moved_bytes, cast.launches, cast.flops) == (*expected, 0)


def test_what_is_saved_and_copied_has_the_bytes_of_the_record(layer: nn.Module) -> None:
    plain, tensors, blocks, four = (unit_of(layer, p) for p in ("bf16", "fp8", "mxfp8", "nvfp4"))
    assert plain.saved_bytes == tensors.saved_bytes == 2 * X
    assert (blocks.saved_bytes, four.saved_bytes) == (3168, X * 9 // 16)
    assert (plain.cast_bytes, tensors.cast_bytes) == (0, 0)
    assert (blocks.cast_bytes, four.cast_bytes) == (2 * 8448, 2 * W * 9 // 16)


def test_a_cast_holds_two_copies_in_float32(layer: nn.Module) -> None:
    # The input's codes, then of the weight two copies of four bytes and the codes; the result comes later.
    assert unit_of(layer, "fp8").workspace_bytes == X + 9 * W - 2 * Y
    # The gradient that it gets and its codes, then as much of the weight; the forward has saved the input.
    assert unit_of(layer, "fp8").backward_workspace_bytes == 2 * Y + Y + 9 * W - 2 * X


def test_one_function_computes_both_gradients_whoever_needs_them(layer: nn.Module) -> None:
    for precision, together in (("fp8", 2 * FLOPS), ("mxfp8", 0)):
        unit = unit_of(layer, precision, of_input=False)
        assert sum(w.flops for w in works(unit, "backward_input", products=True)) == together
        assert unit.waiting_bytes == 0
    layer.weight.requires_grad_(False)
    assert product(unit_of(layer, "fp8"), "backward_input")[0][1] == 2 * FLOPS
    assert product(unit_of(layer, "mxfp8"), "backward_input")[0][1] == FLOPS
    assert product(unit_of(layer, "mxfp8"), "backward_weight") == ()


def test_a_compiler_leaves_out_what_frozen_weights_do_not_need(layer: nn.Module) -> None:
    """Of four casts and two products those for the gradient of the input are left: of its own gradient and
    of the weight, each 5 bytes an element in 3 kernels, and a product that reads both in a byte.
    """
    layer.weight.requires_grad_(False)
    unit = unit_of(layer, "fp8")
    (cast,) = [work for work in unit.backward_input if work.family == "cast"]
    fused = precision_policy("fp8").scaled.fused  # pyright: ignore[reportOptionalMemberAccess]
    assert cast.fused_launches == 2 * fused.launches
    assert cast.fused_bytes == round(fused.moved_bytes * (Y + W))
    (found,) = [work for work in unit.backward_input if work.family == "matmul"]
    assert (found.flops, found.launches) == (2 * FLOPS, 2)
    assert (found.fused_flops, found.fused_launches) == (FLOPS, 1)
    assert found.fused_bytes == Y + W + 2 * X


def test_a_transformer_engine_casts_the_input_and_the_gradient(layer: nn.Module) -> None:
    """A read of two bytes and a write of one in each order, of which frozen weights need the first alone; a
    half of it is done by the kernel that writes the operand.
    """

    def of_library(passed: str) -> list[tuple[int, int]]:
        found = works(unit_of(layer, "fp8"), passed, products=False)
        return [(w.library_bytes, w.library_launches) for w in found if w.family == "cast"]

    assert of_library("forward") == [(2 * X, 1)]
    assert of_library("backward_input") == [(2 * Y, 1)]
    layer.weight.requires_grad_(False)
    assert of_library("forward") == [(1.5 * X, 1)]
    assert of_library("backward_input") == [(1.5 * Y, 1)]


def test_a_bias_is_a_kernel_of_its_own_where_the_record_says_so() -> None:
    layer = nn.Linear(64, 128)
    added = [w for w in works(unit_of(layer, "fp8"), "forward", products=False) if w.family == "elementwise"]
    assert [(w.moved_bytes, w.launches) for w in added] == [(2 * (2 * Y + 128), 1)]
    assert not [
        w for w in works(unit_of(layer, "mxfp8"), "forward", products=False) if w.family == "elementwise"
    ]


class Experts(nn.Module):
    """Three experts of 64 to 128 features, whose rows are in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        self.weight = nn.Parameter(torch.randn(3, 128, 64))
        self.register_buffer("ends", torch.tensor([16, 32, 48], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, ends = self.linear(x).flatten(0, 1), self.get_buffer("ends")
        found = nn.functional.grouped_mm(rows, self.weight.transpose(-2, -1), offs=ends)
        return found.unflatten(0, x.shape[:2])


def unit_of_experts(precision: str, kernels: Kernels = "eager") -> Unit:
    batch = as_batch((torch.randn(8, 6, 64),), None, torch.randn(8, 6, 128))
    case = TrainingCase.of(Experts(), batch, nn.functional.mse_loss, None, precision)
    graph = kernel_stack(kernels).of_graph(case.captured(8).graph)
    return next(unit for unit in graph.units if unit.name == "grouped_mm")


def test_experts_are_multiplied_as_linear_layers_where_their_library_does() -> None:
    """48 rows meet three weights: FLOPs of one, bytes of all. Where rows are added up those of each weight
    are padded to a multiple of 32, by 16 in the mean: 48 become 96.
    """
    unit = unit_of_experts("mxfp8")
    codes = 3168 + 3 * 8448 + 2 * Y
    assert product(unit, "forward") == (("float8_e4m3fn", FLOPS, codes, 1),)
    assert product(unit, "backward_input") == (("float8_e4m3fn", FLOPS, 6336 + 3 * 8448 + 2 * X, 1),)
    added = ("float8_e4m3fn", 2 * FLOPS, 2 * (6336 + 3168) + 2 * 3 * W, 1)
    assert product(unit, "backward_weight") == (added,)
    for passed, elements in (("forward", X), ("backward_input", Y)):
        (cast,) = [work for work in works(unit, passed, products=False) if work.family == "cast"]
        assert (cast.moved_bytes, cast.launches) == (2 * elements + 2 * elements * 33 // 32, 1)


def test_a_swap_of_linear_layers_leaves_experts_as_they_are() -> None:
    ends_bytes = 3 * 4
    plain = (("bfloat16", FLOPS, 2 * (X + 3 * W + Y) + ends_bytes, 1),)
    for kernels in ("eager", "compiled"):
        units = [unit_of_experts(precision, kernels) for precision in ("bf16", "fp8")]
        for passed in ("forward", "backward_input", "backward_weight"):
            assert [product(unit, passed) for unit in units] == [plain, plain]
            assert not any(w.launches or w.moved_bytes for w in units[1].forward if w.family == "cast")


def test_a_library_multiplies_experts_in_eight_bits_of_one_scale() -> None:
    """Each rows of a weight are padded to a multiple of 16, by 8 in the mean: 48 become 72."""
    unit = unit_of_experts("fp8", "fused")
    assert product(unit, "forward") == (("float8_e4m3fn", FLOPS, X + 3 * W + 2 * Y, 1),)
    assert product(unit, "backward_input") == (("float8_e5m2", FLOPS, Y + 3 * W + 2 * X, 1),)
    added = ("float8_e5m2", FLOPS * 3 // 2, (Y + X) * 3 // 2 + 2 * 3 * W, 1)
    assert product(unit, "backward_weight") == (added,)
    for passed, elements in (("forward", X), ("backward_input", Y)):
        (cast,) = [work for work in works(unit, passed, products=False) if work.family == "cast"]
        assert (cast.moved_bytes, cast.launches) == (2 * 2 * elements + 2 * elements, 2)
