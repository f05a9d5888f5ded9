"""The model of PyTorch's tutorial on model parallelism, in two stages, without touching it.

https://docs.pytorch.org/tutorials/intermediate/model_parallel_tutorial.html puts each layer on a device by
hand and moves the activations inside `forward`. Here the class is the one-device version; the split is data.

    python examples/01_toy.py
"""

# %%
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize


# %% The model, as for one device
class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x)))


# %% A plan for two devices
torch.manual_seed(0)
model = ToyModel()
x, y = torch.randn(20, 10), torch.randn(20, 5)

plan = outsize.plan(model, (x,), cluster="2xcpu", stages=2, microbatches=4, loss_fn=F.mse_loss, target=y)
for number, stage in enumerate(plan.stages):
    print(f"stage {number} on {stage.device}: {', '.join(stage.units)}")

# %% Does the split compute the same?
verdict = outsize.check(model, (x,), plan=plan, loss_fn=F.mse_loss, target=y)
print(f"bit-equal to one device: {verdict.bit_equal}")

# %% Training
engine = outsize.parallelize(
    model, (x,), plan=plan, loss_fn=F.mse_loss, target=y, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
)
for step in range(4):
    result = engine.step(x, target=y)
    print(f"step {step}: loss {result.loss:.4f}")
