"""On accelerators dropout saves a byte for each element (torch.native_dropout); on a CPU the scaled noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.capture.costs.meter import summed
from outsize.capture.graph.build import build_graph, on_accelerators
from outsize.capture.recording.fallbacks import record
from outsize.ir.graph import Unit, Work

SAMPLES, WIDTH = 3, 32
PASSES: tuple[Callable[[Unit], tuple[Work, ...]], ...] = (lambda u: u.forward, lambda u: u.backward_input)
NO_WORK = Work(family="elementwise", dtype="float32", flops=0, moved_bytes=0, launches=0)


def padded(works: tuple[Work, ...]) -> tuple[Work]:
    """The only work, or none."""
    return (works[0] if works else NO_WORK,)


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
    graphs = found.graph, build_graph(on_accelerators(found.tape), model).graph
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
    assert on_accelerators(found.tape) is found.tape


@pytest.mark.parametrize("drop", [nn.Dropout(0.1), lambda x: F.dropout(x, 0.1)], ids=["module", "function"])
def test_dropout_is_one_kernel_each_way(drop: Callable[[Tensor], Tensor]) -> None:
    """It reads x, writes the result and the mask; backward it reads gradient and mask, and writes."""
    models = [Dropped(drop), Dropped(lambda x: x)]
    x = torch.randn(SAMPLES, WIDTH)
    works = []
    for model in models:
        found = build_graph(record(model, (x,), {}), model)
        units = build_graph(on_accelerators(found.tape), model).graph.units
        works.append([summed(w for u in units for w in p(u) if w.family == "elementwise") for p in PASSES])
    forward, backward = (
        (mine.moved_bytes - other.moved_bytes, mine.launches - other.launches)
        for (mine,), (other,) in zip(*(map(padded, each) for each in works), strict=True)
    )
    _, mask = torch.native_dropout(x, 0.1, train=True)
    assert forward == backward == (2 * x.nbytes + mask.nbytes, 1)
