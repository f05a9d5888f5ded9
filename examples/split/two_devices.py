"""Some layers on one device, the others on another, in a loop of one's own: the model of PyTorch's tutorial.

python examples/split/two_devices.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import outsize

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
x, y = torch.randn(20, 10), torch.randn(20, 5)

model = outsize.split(net, (x,), stages=2, microbatches=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for stage in model.plan.stages:
    print(f"{stage.device}: {', '.join(stage.units)}")

for step in range(4):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss:.4f}")
