"""Products whose rows are no multiple of 16 bytes are told apart, in the forward and in the backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outsize.capture.graph.build import build_graph
from outsize.capture.recording.fallbacks import record


@pytest.mark.parametrize(
    ("classes", "dtype", "family"),
    [
        (57, torch.bfloat16, "unaligned_matmul"),
        (56, torch.bfloat16, "matmul"),
        (57, torch.float32, "matmul"),
    ],
)
def test_a_head_of_odd_classes_in_half_precision_is_unaligned(
    classes: int, dtype: torch.dtype, family: str
) -> None:
    """The columns of logits, of their gradient, and of that gradient transposed: all three products."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, classes, bias=False)).to(dtype)
    graph = build_graph(record(model, (torch.zeros(8, 16, dtype=dtype),), {}), model).graph
    body, head = graph.units[0], graph.units[-1]
    assert {w.family for w in (*body.forward, *body.backward_weight)} == {"matmul"}
    assert {w.family for w in (*head.forward, *head.backward_input, *head.backward_weight)} == {family}
