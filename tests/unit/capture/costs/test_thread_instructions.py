"""Instructions of kernels with one element for each thread, counted by hand from threads, taps and blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.costs import thread_instructions as counts
from outsize.capture.costs.thread_instructions import COUNTS
from outsize.capture.graph.build import build_graph, on_accelerators
from outsize.capture.recording.fallbacks import record
from outsize.ir.graph import Unit

SIDE = 8
IMAGES = (2, 16, SIDE, SIDE)


def last_unit(
    layer: nn.Module, dtype: torch.dtype = torch.float32, order: Any = torch.contiguous_format
) -> Unit:
    """Returns the unit of a layer behind a convolution of single pixels."""
    model = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), layer).to(dtype)
    images = torch.zeros(IMAGES, dtype=dtype).contiguous(memory_format=order)
    return build_graph(record(model, (images,), {}), model).graph.units[-1]


def of_passes(unit: Unit) -> tuple[int, int, int]:
    """Returns the instructions of forward, gradient of the image and gradient of the weights."""
    passes = unit.forward, unit.backward_input, unit.backward_weight
    forward, image, weight = (sum(w.instructions for w in p if w.family != "layout_copy") for p in passes)
    return forward, image, weight


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_depthwise_convolution_has_a_thread_for_each_element(stride: int, dtype: torch.dtype) -> None:
    """The gradient of the image has one for each of its elements whatever the stride; bytes do not matter."""
    layer = nn.Conv2d(16, 16, 3, stride, padding=1, groups=16, bias=False)
    image = torch.Size(IMAGES).numel()
    results = image // stride**2
    threads = 9 + COUNTS.thread_taps
    assert of_passes(last_unit(layer, dtype)) == (
        results * threads * COUNTS.forward_tap,
        image * threads * COUNTS.input_tap,
        results * 9 * COUNTS.weight_tap + 16 * 9 * COUNTS.weight_block,
    )


def test_with_channels_last_a_weight_of_large_windows_is_slow_in_float32_alone() -> None:
    def weight_of(kernel: int, dtype: torch.dtype) -> float:
        layer = nn.Conv2d(16, 16, kernel, padding=kernel // 2, groups=16, bias=False)
        unit = last_unit(layer, dtype, torch.channels_last)
        return of_passes(unit)[2] / (torch.Size(IMAGES).numel() * kernel**2)

    assert weight_of(7, torch.float32) == COUNTS.last_large_weight_tap
    assert weight_of(3, torch.float32) == weight_of(7, torch.bfloat16) == COUNTS.last_weight_tap


@pytest.mark.parametrize("groups", [2, 8])
def test_groups_are_padded_to_a_tile(groups: int) -> None:
    """As many FLOPs as if a group had 64 channels; of few groups in float32 the image's gradient has no
    tensor cores.
    """
    layer = nn.Conv2d(16, 16, 3, padding=1, groups=groups, bias=False)
    width = 16 // groups
    flops = 2 * torch.Size(IMAGES).numel() * width * 9
    padded = flops * 64 / width
    forward, image, weight = of_passes(last_unit(layer))
    assert forward == pytest.approx(padded * (1 / COUNTS.grouped_flops), abs=1)
    assert weight == pytest.approx(padded * (1 / COUNTS.grouped_weight_flops), abs=1)
    few = groups < COUNTS.few_groups
    assert image == pytest.approx(flops * COUNTS.ordinary_flop if few else forward, abs=1)


def test_dense_convolutions_are_bound_by_tensor_cores() -> None:
    assert of_passes(last_unit(nn.Conv2d(16, 16, 3, padding=1, bias=False), torch.bfloat16)) == (0, 0, 0)
    assert of_passes(last_unit(nn.Conv2d(16, 16, 1, bias=False))) == (0, 0, 0)


@pytest.mark.parametrize(
    ("layer", "results", "windows", "factor"),
    [
        (nn.MaxPool2d(2), 16, 1, 1.0),
        (nn.MaxPool2d(3, 1, padding=1), 64, 9, 1.0),
        (nn.AvgPool2d(2), 16, 1, COUNTS.mean_pool_input),
    ],
    ids=["apart", "overlapping", "mean"],
)
def test_pooling_has_a_thread_for_each_result_and_each_element(
    layer: nn.Module, results: int, windows: int, factor: float
) -> None:
    taps = {16: 4, 64: 9}[results]
    forward, image, weight = of_passes(last_unit(layer))
    assert forward == 32 * results * (COUNTS.pool_thread + COUNTS.pool_tap * taps)
    threads = COUNTS.pool_input_thread + COUNTS.pool_input_window * windows
    assert image == pytest.approx(32 * SIDE**2 * threads * factor, rel=1e-6)
    assert weight == 0


def test_additions_to_one_element_wait_for_each_other() -> None:
    """Sixty-four results of one element cost more than as many of sixteen."""

    class Upsampled(nn.Module):
        def __init__(self, pooled: int) -> None:
            super().__init__()
            self.pooled = pooled

        def forward(self, images: Tensor) -> Tensor:
            small = F.adaptive_avg_pool2d(images, self.pooled)
            return F.interpolate(small, (64, 64), mode="bilinear")

    one, sixteen = (of_passes(last_unit(Upsampled(side)))[1] for side in (1, 4))
    results = 2 * 16 * 64 * 64
    assert one == pytest.approx(4 * results * COUNTS.same_addition * 64**2, rel=0.01)
    assert sixteen == pytest.approx(4 * results * COUNTS.same_addition * 16**2, rel=0.01)


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_batch_normalisation_takes_each_element_by_itself(dtype: torch.dtype, narrow: int) -> None:
    forward, image, weight = of_passes(last_unit(nn.BatchNorm2d(16), dtype))
    elements = torch.Size(IMAGES).numel()
    assert forward == elements * COUNTS.channel_element[narrow]
    assert image + weight == pytest.approx(elements * COUNTS.channel_element_backward[narrow], abs=2)
    assert of_passes(last_unit(nn.BatchNorm2d(16).eval(), dtype)) == (0, 0, 0)


def test_operands_of_unlike_shapes_have_an_index_for_each_element() -> None:
    x, row, transposed = torch.zeros(8, 8), torch.zeros(8), torch.zeros(8, 8).t()
    assert counts.indexed_elements([x, x], x) == 0
    assert counts.indexed_elements([x, torch.zeros(())], x) == 0
    assert counts.indexed_elements([x, row], x) == 64 * COUNTS.indexed_element
    assert counts.indexed_elements([transposed], x) == 64 * COUNTS.indexed_element
    assert counts.indexed_elements([x.bfloat16()], x) == 64 * COUNTS.indexed_element
    assert counts.indexed_elements([x], x.bfloat16()) == 0
    summed = COUNTS.indexed_element + COUNTS.added_element
    assert counts.indexed_elements([x, row], x, 1) == 64 * summed


def test_attention_computes_whole_blocks() -> None:
    filled, more = torch.zeros(1, 1, 256, 64), torch.zeros(1, 1, 257, 64)
    flops = 10**9
    whole = counts.attention_instructions(flops, filled, filled, backward=False)
    assert whole == round(flops * COUNTS.attention_flop[0])
    padded = counts.attention_instructions(flops, more, more, backward=False)
    assert padded == pytest.approx(whole * (384 / 257) ** 2, rel=1e-6)


class GroupedAttention(nn.Module):
    """Has several heads of queries for each head of keys."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_float32_shared_heads_have_no_kernel_on_accelerators(dtype: torch.dtype) -> None:
    """Scaled queries, repeated keys and values and the probabilities are kept, as torch 2.11 does on an H200:
    12 times the queries with the result, where there are 1,024 of width 128.
    """
    query = torch.zeros(1, 4, 512, 64, dtype=dtype, requires_grad=True)
    key, value = (torch.zeros(1, 2, 512, 64, dtype=dtype, requires_grad=True) for _ in range(2))
    model = GroupedAttention()
    found = record(model, (query, key, value), {})
    (unit,) = build_graph(on_accelerators(found), model).graph.units
    families = {work.family for work in unit.forward}
    query_bytes = query.numel() * query.dtype.itemsize
    if dtype is torch.float32:
        assert families == {"elementwise", "matmul", "reduction"}
        assert unit.saved_bytes == (1 + 1 + 1 + 512 / 64) * query_bytes
    else:
        assert families == {"attention"}
        assert unit.saved_bytes < 4 * query_bytes


class CastAttention(nn.Module):
    """Has float32 for queries and keys, as rotations of positions make them, in a region of autocast."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def test_autocast_gives_shared_heads_their_kernel() -> None:
    query = torch.zeros(1, 4, 512, 64, requires_grad=True)
    key = torch.zeros(1, 2, 512, 64, requires_grad=True)
    value = torch.zeros(1, 2, 512, 64, dtype=torch.bfloat16, requires_grad=True)
    model = CastAttention()
    found = record(model, (query, key, value), {})
    units = build_graph(on_accelerators(found), model).graph.units
    works = [work for unit in units for work in unit.forward]
    assert [work.dtype for work in works if work.family == "attention"] == ["bfloat16"]
    assert not any(work.family == "matmul" for work in works)
