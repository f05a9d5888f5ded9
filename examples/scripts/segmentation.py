"""Trains DeepLabV3 with a new head on one device: AMP, clipping, an average of the weights, checkpoints.

python segmentation.py
"""

# %%
import os
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from average import Average
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.segmentation.deeplabv3 import DeepLabHead

STEPS = int(os.environ.get("STEPS", "6"))

CLASSES = 2


def pixel_loss(outputs, labels):
    return F.cross_entropy(outputs["out"], labels)


# %% The data
digits = F.interpolate(torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16, size=64)
data = TensorDataset(digits.expand(-1, 3, -1, -1), (digits[:, 0] > 0.5).long())
loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0))

# %% Training
torch.manual_seed(0)
model = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None)
model.classifier = DeepLabHead(960, CLASSES)
for module in model.modules():
    if isinstance(module, nn.Dropout):
        module.p = 0.0  # so that both scripts print the same: outsize draws masks of its own
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
average = Average(model.parameters())
states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average}
done = 0
if Path("segmentation.pt").exists():
    saved = torch.load("segmentation.pt")
    done = saved["steps"]
    for key, each in states.items():
        each.load_state_dict(saved[key])
for number, (x, y) in enumerate(loader):
    if number < done:
        continue
    if done == STEPS:
        break
    total = 0.0
    for image, label in zip(x.chunk(4), y.chunk(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = pixel_loss(model(image), label) / 4
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    average.step()
    done += 1
    print(f"step {done}: loss {total:.5f}, gradient norm {norm:.5f}, lr {scheduler.get_last_lr()[0]:.6f}")
torch.save({"steps": done, **{key: each.state_dict() for key, each in states.items()}}, "segmentation.pt")

# %% The metric, of the averaged weights
average.swap()
model.eval()
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    outputs = [model(image)["out"] for image in x.chunk(4)]
right = (torch.cat(outputs).argmax(1) == y).float().mean()
print(f"pixels that are right: {right:.4f}")
