"""A user's script: the same file alone, under `outsize run` and under torchrun. Rank 0 prints the losses."""

from __future__ import annotations

import torch
from torch import nn

import outsize

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
)
x, y = torch.randn(12, 8), torch.randint(0, 3, (12,))
engine = outsize.parallelize(
    model,
    (x,),
    loss_fn=nn.functional.cross_entropy,
    target=y,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    stages=2,
    microbatches=4,
    schedule="1f1b",
    cluster="2xcpu",
)
for _ in range(4):
    loss = engine.step(x, target=y).loss
    if 0 in engine.crew.stages:
        print("loss", float(loss).hex())
