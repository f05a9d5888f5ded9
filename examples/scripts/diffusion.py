"""Trains a UNet of diffusers on one device: AMP, clipping, an average of the weights, checkpoints.

python diffusion.py
"""

# %%
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from average import Average
from diffusers import DDPMScheduler, UNet2DModel
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

STEPS = int(os.environ.get("STEPS", "6"))


def noise_loss(output, noise):
    return F.mse_loss(output.sample, noise)


class NoisyDigits(Dataset):
    """A digit with noise, how much of it, and the noise, which follow from the digit's number alone."""

    def __init__(self):
        self.images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
        self.noises = DDPMScheduler()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(1, 8, 8, generator=generator)
        time = torch.randint(1000, (1,), generator=generator)
        return self.noises.add_noise(self.images[number], noise, time), time[0], noise


# %% The data
loader = DataLoader(NoisyDigits(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))

# %% Training
torch.manual_seed(0)
model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
average = Average(model.parameters())
states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average}
done = 0
if Path("diffusion.pt").exists():
    saved = torch.load("diffusion.pt")
    done = saved["steps"]
    for key, each in states.items():
        each.load_state_dict(saved[key])
for number, (x, t, y) in enumerate(loader):
    if number < done:
        continue
    if done == STEPS:
        break
    total = 0.0
    for noisy, time, noise in zip(x.chunk(4), t.chunk(4), y.chunk(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = noise_loss(model(noisy, time), noise) / 4
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    average.step()
    done += 1
    print(f"step {done}: loss {total:.5f}, gradient norm {norm:.5f}, lr {scheduler.get_last_lr()[0]:.6f}")
torch.save({"steps": done, **{key: each.state_dict() for key, each in states.items()}}, "diffusion.pt")

# %% The metric, of the averaged weights
average.swap()
model.eval()
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    outputs = [model(noisy, time).sample for noisy, time in zip(x.chunk(4), t.chunk(4), strict=True)]
error = F.mse_loss(torch.cat(outputs).float(), y)
print(f"squared error of the noise: {error:.4f}")
