"""Convolutions that need no workspace are told apart, and those that cuDNN copies into another order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outsize.capture.graph.build import build_graph
from outsize.capture.recording.fallbacks import record
from outsize.planner.memory.headroom import Load


@pytest.mark.parametrize(
    ("layer", "family"),
    [
        (nn.Conv2d(8, 8, 3, padding=1), "convolution"),
        (nn.Conv2d(8, 8, 4, stride=2), "convolution"),
        (nn.Conv2d(8, 8, 3, padding=1, groups=4), "convolution"),
        (nn.Conv2d(8, 16, 1), "direct_convolution"),
        (nn.Conv2d(8, 8, 4, stride=4), "direct_convolution"),
        (nn.Conv2d(8, 8, 7, padding=3, groups=8), "direct_convolution"),
    ],
    ids=["spatial", "overlapping", "grouped", "pixels", "patches", "each channel"],
)
def test_convolutions_with_a_workspace_are_told_apart(layer: nn.Module, family: str) -> None:
    """In all three passes, and in what a device is planned to hold beside its peak."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1), layer)
    graph = build_graph(record(model, (torch.zeros(2, 8, 16, 16),), {}), model).graph
    unit = graph.units[-1]
    works = (*unit.forward, *unit.backward_input, *unit.backward_weight)
    assert {work.family for work in works if "convolution" in work.family} == {family}
    assert Load.of(graph, 0, len(graph.units)).convolves == (family == "convolution")


COPIED = [
    (nn.Conv2d(8, 8, 3, padding=1, bias=False), torch.bfloat16, torch.contiguous_format, True),
    (nn.Conv2d(8, 16, 1, bias=False), torch.float16, torch.contiguous_format, False),
    (nn.Conv2d(8, 16, 1, stride=2, bias=False), torch.float16, torch.contiguous_format, True),
    (nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False), torch.bfloat16, torch.contiguous_format, True),
    (nn.ConvTranspose2d(8, 8, 3, bias=False), torch.bfloat16, torch.contiguous_format, True),
    (nn.Conv2d(8, 8, 3, padding=1, bias=False), torch.bfloat16, torch.channels_last, False),
    (nn.Conv2d(8, 8, 3, padding=1, bias=False), torch.float32, torch.contiguous_format, True),
    (nn.Conv2d(8, 8, 7, padding=3, groups=8, bias=False), torch.bfloat16, torch.contiguous_format, False),
]


@pytest.mark.parametrize(
    ("layer", "dtype", "order", "copied"),
    COPIED,
    ids=["spatial", "pixels", "strides", "grouped", "transposed", "channels last", "float32", "each channel"],
)
def test_channels_that_come_first_are_copied_around_a_convolution(
    layer: nn.Module, dtype: torch.dtype, order: torch.memory_format, copied: bool
) -> None:
    """What a pass reads and writes is read and written once more, by no launch of the host."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1), layer).to(dtype)
    image = torch.zeros(2, 8, 16, 16, dtype=dtype).contiguous(memory_format=order)
    graph = build_graph(record(model, (image,), {}), model).graph
    unit = graph.units[-1]
    for works in (unit.forward, unit.backward_input, unit.backward_weight):
        of = {work.family: work for work in works}
        assert ("layout_copy" in of) == copied
        if copied:
            convolution = next(of[name] for name in of if "convolution" in name)
            assert of["layout_copy"].moved_bytes == 2 * convolution.moved_bytes
            assert of["layout_copy"].launches == of["layout_copy"].flops == 0
