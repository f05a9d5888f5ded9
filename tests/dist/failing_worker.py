"""A model that raises on the second rank, in the middle of the third step."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

import outsize


@final
class Moody(nn.Linear):
    """A layer that raises in its third step."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        """A linear layer, while it lasts."""
        Moody.calls += isinstance(input, Tensor) and type(input) is Tensor
        if Moody.calls == 10:
            raise ValueError("3 is not my lucky number")
        return super().forward(input)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), Moody(64, 3))
x, y = torch.randn(12, 8), torch.randint(0, 3, (12,))
engine = outsize.parallelize(
    model, (x,), loss_fn=nn.functional.cross_entropy, target=y, microbatches=4, schedule="1f1b"
)
while True:
    engine.step(x, target=y)
