"""Two towers, of which each fits a device, meet late; the second input is missing now and then.

python examples/split/late_fusion.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize


class Fusion(nn.Module):
    """Features of an image and of a text, added up where there are both."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.text = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, image: Tensor, text: Tensor | None = None) -> Tensor:
        features = self.image(image)
        return self.head(features if text is None else features + self.text(text))


torch.manual_seed(0)
image, text, y = torch.randn(16, 32), torch.randn(16, 12), torch.randint(0, 3, (16,))

model = outsize.split(Fusion(), (image, text), stages=2, microbatches=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(4):
    output = model(image) if step == 2 else model(image, text)
    loss = F.cross_entropy(output, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss:.4f}")
