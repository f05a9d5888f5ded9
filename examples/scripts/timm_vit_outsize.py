"""Trains a vision transformer of timm over two stages: AMP, clipping, an average of the weights, checkpoints.

python timm_vit_outsize.py                           # both stages here
outsize run --nproc-per-node 2 timm_vit_outsize.py     # a process for each
"""

# %%
import os

import timm
import torch
import torch.nn.functional as F
from average import Average
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outsize

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
x, y = next(iter(DataLoader(loader.dataset, batch_size=loader.batch_size)))
engine = outsize.parallelize(
    model,
    (x,),
    target=y,
    stages=2,
    microbatches=4,
    clip_norm=1.0,
    loss_fn=criterion,
    optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3),
    resume="timm_vit",
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, 100)
average = Average(weight for _, weight in engine.weights.named_parameters())
engine.state.attach(scheduler=scheduler, average=average)
for x, y in engine.state.batches(loader):
    if engine.steps == STEPS:
        break
    with torch.autocast("cpu", torch.bfloat16):
        done = engine.step(x, target=y)
    scheduler.step()
    average.step()
    if engine.rank == 0:
        print(
            f"step {engine.steps}: loss {done.loss:.5f}, gradient norm {done.grad_norm:.5f}, "
            f"lr {scheduler.get_last_lr()[0]:.6f}"
        )
engine.save("timm_vit")

# %% The metric, of the averaged weights
average.swap()
with torch.autocast("cpu", torch.bfloat16):
    outputs = engine.evaluate(x, target=y, gather=True).outputs
if engine.rank == 0:
    right = (torch.cat(outputs).argmax(1) == y).float().mean()
    print(f"labels that are right: {right:.4f}")
