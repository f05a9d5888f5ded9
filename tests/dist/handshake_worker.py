"""One rank of two, the second with another plan."""

from __future__ import annotations

import os

import torch
from torch import nn

import outsize

model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.zeros(8, 4)
how = {"loss_fn": nn.MSELoss(), "target": x}
plan = outsize.plan(model, (x,), cluster="2xcpu", microbatches=2 + 2 * int(os.environ["RANK"]), **how)
outsize.parallelize(model, (x,), plan=plan, **how)
