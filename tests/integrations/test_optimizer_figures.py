"""What a plan counts for SOAP is what a published implementation keeps and multiplies (pytorch_optimizer)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from outsize.ir.graph import Parameter
from outsize.planner.memory.optimizer_states import optimizer_bytes

SHAPES = ((256, 512), (64, 48), (48,), (8, 4, 3))
EIGENVECTORS_EVERY = 10


def stepped(shape: tuple[int, ...], steps: int) -> tuple[Any, list[int]]:
    """The optimizer after so many steps, with the FLOPs of the products of each."""
    package = pytest.importorskip("pytorch_optimizer", reason="pip install --no-deps pytorch_optimizer")
    weight = torch.nn.Parameter(torch.ones(shape))
    optimizer, counted = package.SOAP([weight], precondition_frequency=EIGENVECTORS_EVERY), list[int]()
    for step in range(steps):
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        counted.append(counter.get_total_flops())
    return optimizer.state[weight], counted


@pytest.mark.parametrize("shape", SHAPES)
def test_soap_is_counted_as_it_is_published(shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    told = Parameter(names=("w",), shape=shape, dtype="float32", size_bytes=4 * numel, trainable=True)
    state, flops = stepped(shape, EIGENVECTORS_EVERY + 1)
    soap = optimizer_bytes("soap")
    tensors = [t for v in state.values() for t in (v if isinstance(v, list) else [v])]
    kept = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    assert soap.held(told).state == kept
    # The first step makes the eigenvectors alone. Ten more renew them once; torch does not count the QR.
    renewed = sum(8 / 3 * d**3 for d in shape) if len(shape) > 1 else 0.0
    assert soap.product_flops(told) * EIGENVECTORS_EVERY == pytest.approx(sum(flops[1:]) + renewed, rel=0.01)
