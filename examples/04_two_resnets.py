"""Two ResNet-18 encoders, one per input, joined by one classifier ("late fusion").

The model is no chain: two trunks that do not depend on each other, and a concatenation in `forward`. So the
trunks run at the same time, each on a device of its own, and what waits for both is a stage by itself: there
are more stages than devices.

    python examples/04_two_resnets.py
"""

# %%
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.capture.models.imports import import_torchvision

# `import torchvision`, also where it was built for another torch.
models = import_torchvision().models


# %% The model
class LateFusion(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.color, self.depth = models.resnet18(), models.resnet18()
        self.color.fc, self.depth.fc = nn.Identity(), nn.Identity()
        self.classifier = nn.Linear(2 * 512, classes)

    def forward(self, color: Tensor, depth: Tensor) -> Tensor:
        return self.classifier(torch.cat([self.color(color), self.depth(depth)], dim=1))


# %% Inputs and loss
torch.manual_seed(0)
model = LateFusion(classes=10)
color, depth = torch.randn(4, 3, 64, 64), torch.randn(4, 3, 64, 64)
labels = torch.randint(0, 10, (4,))
loss = {"loss_fn": F.cross_entropy, "target": labels}

# %% Plans for two and three devices
for devices in (2, 3):
    plan = outsize.plan(model, (color, depth), cluster=f"{devices}xcpu", microbatches=2, exact=True, **loss)
    verdict = outsize.check(model, (color, depth), plan=plan, **loss)
    print(f"{len(plan.stages)} stages on {devices} devices, bit-equal: {verdict.bit_equal}")
    for stage in plan.stages:
        print(f"  {stage.device}  {stage.units[0]} ... {stage.units[-1]}")
