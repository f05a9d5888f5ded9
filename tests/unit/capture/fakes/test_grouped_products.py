"""Products of experts on fakes: as many rows, columns and strides as what torch computes has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from outsize.capture.fakes.grouped_products import grouped_products
from outsize.capture.graph.build import build_graph
from outsize.capture.recording.fallbacks import record

ENDS = torch.tensor([3, 8], dtype=torch.int32)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = (((8, 16), (2, 16, 32)), ((2, 8, 16), (2, 16, 24)), ((16, 8), (8, 24)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES)
def test_a_fake_has_the_shape_and_strides_of_what_is_computed(
    dtype: torch.dtype, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    rows, matrices = (torch.randn(shape).to(dtype) for shape in shapes)
    offs = None if rows.dim() == matrices.dim() == 3 else ENDS
    real = functional.grouped_mm(rows, matrices, offs=offs)
    with FakeTensorMode() as mode, grouped_products():
        fakes = [mode.from_tensor(t).requires_grad_() for t in (rows, matrices)]
        fake = functional.grouped_mm(*fakes, offs=None if offs is None else mode.from_tensor(offs))
        gradients = torch.autograd.grad(fake, fakes, torch.empty_like(fake))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert [tuple(gradient.shape) for gradient in gradients] == [*shapes]


def test_what_does_not_fit_is_refused() -> None:
    with FakeTensorMode() as mode, grouped_products():
        rows, matrices, ends = map(mode.from_tensor, (torch.randn(8, 16), torch.randn(2, 12, 32), ENDS))
        with pytest.raises(RuntimeError, match="contraction"):
            functional.grouped_mm(rows, matrices, offs=ends)


def test_torchs_own_rule_is_back_afterwards() -> None:
    given = torch.ones(8, 16), torch.ones(2, 16, 32), ENDS
    rows, matrices, ends = (torch.empty_like(t, device="meta") for t in given)
    with grouped_products():
        assert functional.grouped_mm(rows, matrices, offs=ends).shape == (8, 32)
    with pytest.raises(RuntimeError, match="BF16"):
        functional.grouped_mm(rows, matrices, offs=ends)


class Experts(nn.Module):
    """Two experts whose rows are sorted."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 32, dtype=dtype))

    def forward(self, rows: Tensor) -> Tensor:
        return functional.grouped_mm(rows, self.weight, offs=ENDS).sum()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recording_in_each_type_has_the_product_and_its_gradients(dtype: torch.dtype) -> None:
    model = Experts(dtype)
    tape = record(model, (torch.randn(8, 16, dtype=dtype),), {})
    graph = build_graph(tape, model, 8).graph
    works = [work for unit in graph.units for work in (*unit.forward, *unit.backward_weight)]
    assert [work.flops for work in works if work.family == "matmul"] == [2 * 8 * 16 * 32] * 2
