from __future__ import annotations

import pytest
import torch

from outsize.errors import BadOption
from outsize.planner.optimizer import optimizer_bytes


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_what_torch_keeps(name: str, dtype: torch.dtype) -> None:
    weights = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in (3, 70)]
    makers = {
        "sgd": lambda: torch.optim.SGD(weights, lr=0.1),
        "momentum": lambda: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        "adam": lambda: torch.optim.Adam(weights),
        "adamw": lambda: torch.optim.AdamW(weights),
    }
    optimizer = makers[name]()
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    kept = sum(t.numel() * t.element_size() for t in tensors)
    assert kept == sum(optimizer_bytes(name).state_bytes(w.numel() * w.element_size()) for w in weights)


def test_an_unknown_optimizer_names_the_known_ones() -> None:
    with pytest.raises(BadOption, match=r"'lion' is not known; known: sgd, momentum, adam, adamw\. Next:"):
        optimizer_bytes("lion")
