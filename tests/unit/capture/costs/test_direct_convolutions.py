"""Convolutions that need no workspace are told apart: of windows that do not overlap, or by channel."""

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
