"""A U-Net (https://arxiv.org/abs/1505.04597): values jump from the way down to the way up.

With three stages the finest skip leaves stage 0 and is needed in stage 2. Libraries that pass one tensor from
stage to stage send it through the middle; here it goes straight to where it is used, in the forward and back.

    python examples/03_unet_skips.py
"""

# %%
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize


# %% The model
def double_conv(wide: int, narrow: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (wide, narrow):
        layers += [nn.Conv2d(channels, narrow, 3, padding=1), nn.BatchNorm2d(narrow), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.down1, self.down2 = double_conv(3, width), double_conv(width, 2 * width)
        self.bottom = double_conv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge2 = double_conv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge1 = double_conv(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.down1(image)
        coarse = self.down2(F.max_pool2d(fine, 2))
        x = self.bottom(F.max_pool2d(coarse, 2))
        x = self.merge2(torch.cat([coarse, self.up2(x)], dim=1))
        x = self.merge1(torch.cat([fine, self.up1(x)], dim=1))
        return self.head(x)


# %% A plan for three devices
torch.manual_seed(0)
model = UNet()
images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 4, (8, 32, 32))

graph = outsize.capture(model, (images[:2],), loss_fn=F.cross_entropy, target=labels[:2])
plan = outsize.plan(
    model, (images,), cluster="3xcpu", stages=3, microbatches=4, loss_fn=F.cross_entropy, target=labels
)
bounds = plan.bounds(graph)
for number, stage in enumerate(plan.stages):
    print(f"stage {number}: {', '.join(stage.units)}")

# %% The values that cross
print("what crosses the cuts:")
for value in graph.values:
    stages = [sum(unit >= first for first in bounds[1:]) for unit in (value.producer, *value.consumers)]
    users = sorted({s for s in stages[1:] if s != stages[0]})
    if users:
        maker = graph.units[value.producer].name
        print(f"  {maker} {list(value.shape)}: stage {stages[0]} -> {', '.join(map(str, users))}")

# %% Does the split compute the same?
verdict = outsize.check(model, (images,), plan=plan, loss_fn=F.cross_entropy, target=labels, steps=3)
print(f"bit-equal to one device: {verdict.bit_equal}; BatchNorm's buffers {verdict.buffer_diff} apart")
