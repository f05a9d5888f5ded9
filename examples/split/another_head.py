"""A pretrained model with another head: the backbone is frozen for two steps, then all of it is trained.

python examples/split/another_head.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18

import outsize

torch.manual_seed(0)
net = resnet18()  # weights="DEFAULT" where there is a network
net.fc = nn.Linear(net.fc.in_features, 2)
x, y = torch.randn(8, 3, 32, 32), torch.randint(0, 2, (8,))

model = outsize.split(net, (x,), stages=2, microbatches=2)
model.requires_grad_(False)
model.fc.requires_grad_(True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    if step == 2:
        model.requires_grad_(True)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    trained = sum(p.grad is not None for p in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss:.4f}, {trained} weights with a gradient")

model.eval()
with torch.no_grad():
    print(f"right: {(model(x).argmax(1) == y).sum()} of {len(y)}")
