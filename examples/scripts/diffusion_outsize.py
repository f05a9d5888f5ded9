"""Trains a UNet of diffusers over two stages: AMP, clipping, an average of the weights, checkpoints.

python diffusion_outsize.py                           # both stages here
outsize run --nproc-per-node 2 diffusion_outsize.py     # a process for each
"""

# %%
import os

import torch
import torch.nn.functional as F
from average import Average
from diffusers import DDPMScheduler, UNet2DModel
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

import outsize

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
x, t, y = next(iter(DataLoader(loader.dataset, batch_size=loader.batch_size)))
engine = outsize.parallelize(
    model,
    (x, t),
    target=y,
    stages=2,
    microbatches=4,
    clip_norm=1.0,
    loss_fn=noise_loss,
    optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3),
    resume="diffusion",
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, 100)
average = Average(weight for _, weight in engine.weights.named_parameters())
engine.state.attach(scheduler=scheduler, average=average)
for x, t, y in engine.state.batches(loader):
    if engine.steps == STEPS:
        break
    with torch.autocast("cpu", torch.bfloat16):
        done = engine.step(x, t, target=y)
    scheduler.step()
    average.step()
    if engine.rank == 0:
        print(
            f"step {engine.steps}: loss {done.loss:.5f}, gradient norm {done.grad_norm:.5f}, "
            f"lr {scheduler.get_last_lr()[0]:.6f}"
        )
engine.save("diffusion")

# %% The metric, of the averaged weights
average.swap()
with torch.autocast("cpu", torch.bfloat16):
    outputs = engine.evaluate(x, t, target=y, gather=True).outputs
if engine.rank == 0:
    outputs = [output.sample for output in outputs]
    error = F.mse_loss(torch.cat(outputs).float(), y)
    print(f"squared error of the noise: {error:.4f}")
