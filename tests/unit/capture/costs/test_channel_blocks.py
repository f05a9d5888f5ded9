"""A batch normalisation has a block of threads for each channel, and says how much each of them moves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outsize.capture.graph.build import build_graph
from outsize.capture.recording.fallbacks import record

BATCH, CHANNELS, SIDE = 2, 6, 4
PIXELS = BATCH * SIDE * SIDE


def elements(layer: nn.Module, dtype: torch.dtype, order: torch.memory_format) -> tuple[int, int]:
    """Returns what a block of the layer's kernels moves, forward and backward, behind a convolution."""
    model = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), layer).to(dtype)
    images = torch.zeros(BATCH, CHANNELS, SIDE, SIDE, dtype=dtype).contiguous(memory_format=order)
    unit = build_graph(record(model, (images,), {}), model).graph.units[-1]
    passes = unit.forward, (*unit.backward_input, *unit.backward_weight)
    forward, backward = (sum(work.block_elements for work in works) for works in passes)
    return forward, backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_block_moves_its_channel(dtype: torch.dtype) -> None:
    """The forward reads x and writes the result; the backward reads x and its gradient twice, and writes.

    torch's own kernels, for two bytes, read x once more for the result, beside what other blocks do.
    """
    forward, backward = elements(nn.BatchNorm2d(CHANNELS), dtype, torch.contiguous_format)
    few = 24  # Of each channel there is one weight, one bias, one mean and so on.
    least = 2 * PIXELS if dtype is torch.float32 else 2.8 * PIXELS
    assert least <= forward <= least + few
    assert 5 * PIXELS <= backward <= 5 * PIXELS + few


@pytest.mark.parametrize(
    ("layer", "order"),
    [
        (nn.BatchNorm2d(CHANNELS).eval(), torch.contiguous_format),
        (nn.GroupNorm(2, CHANNELS), torch.contiguous_format),
        (nn.LayerNorm(SIDE), torch.contiguous_format),
        (nn.BatchNorm2d(CHANNELS), torch.channels_last),
    ],
    ids=["running statistics", "groups", "rows", "channels last"],
)
def test_other_normalisations_fill_a_device(layer: nn.Module, order: torch.memory_format) -> None:
    assert elements(layer, torch.float32, order) == (0, 0)
