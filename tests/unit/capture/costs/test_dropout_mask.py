"""On accelerators dropout saves a byte for each element (torch.native_dropout); on a CPU the scaled noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.capture.graph.build import build_graph, on_accelerators
from outsize.capture.recording.fallbacks import record

SAMPLES, WIDTH = 3, 32


@final
class Dropped(nn.Module):
    """A layer, a dropout, a layer."""

    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(WIDTH, WIDTH), drop, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Computes both layers."""
        return self.last(self.drop(self.first(x)))


def saved(drop: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[int, int]:
    """Saved bytes on a CPU and on an accelerator."""
    model = Dropped(drop).to(dtype)
    found = build_graph(record(model, (torch.randn(SAMPLES, WIDTH, dtype=dtype),), {}), model)
    graphs = found.graph, on_accelerators(found, model).graph
    assert graphs[0].fingerprint == graphs[1].fingerprint
    cpu, gpu = (sum(unit.saved_bytes for unit in graph.units) for graph in graphs)
    return cpu, gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drop", [nn.Dropout(0.1), lambda x: F.dropout(x, 0.1)], ids=["module", "function"])
def test_a_mask_has_a_byte_for_each_element(drop: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    cpu, gpu = saved(drop, dtype)
    x = torch.zeros(SAMPLES, WIDTH, dtype=dtype)
    _, mask = torch.native_dropout(x, 0.1, train=True)  # what the kernel of CUDA saves
    assert cpu - gpu == x.nbytes - mask.nbytes > 0


def test_noise_of_whole_channels_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout2d(0.5), nn.Conv2d(4, 2, 1))
    found = build_graph(record(model, (torch.randn(2, 3, 5, 5),), {}), model)
    assert on_accelerators(found, model) is found
