"""Trains a vision transformer of timm on one device: AMP, clipping, an average of the weights, checkpoints.

python timm_vit.py
"""

# %%
import os
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from average import Average
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = int(os.environ.get("STEPS", "6"))

criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

# %% The data
digits = load_digits()
images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=32)
data = TensorDataset(images.expand(-1, 3, -1, -1), torch.tensor(digits.target))
loader = DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))

# %% Training
torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, num_classes=10)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
average = Average(model.parameters())
states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average}
done = 0
if Path("timm_vit.pt").exists():
    saved = torch.load("timm_vit.pt")
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
            loss = criterion(model(image), label) / 4
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    average.step()
    done += 1
    print(f"step {done}: loss {total:.5f}, gradient norm {norm:.5f}, lr {scheduler.get_last_lr()[0]:.6f}")
torch.save({"steps": done, **{key: each.state_dict() for key, each in states.items()}}, "timm_vit.pt")

# %% The metric, of the averaged weights
average.swap()
model.eval()
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    outputs = [model(image) for image in x.chunk(4)]
right = (torch.cat(outputs).argmax(1) == y).float().mean()
print(f"labels that are right: {right:.4f}")
