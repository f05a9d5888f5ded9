"""Trains DeepLabV3 with a new head over two stages: AMP, clipping, an average of the weights, checkpoints.

python segmentation_outsize.py                           # both stages here
outsize run --nproc-per-node 2 segmentation_outsize.py     # a process for each
"""

# %%
import os

import torch
import torch.nn.functional as F
import torchvision
from average import Average
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.segmentation.deeplabv3 import DeepLabHead

import outsize

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
x, y = next(iter(DataLoader(loader.dataset, batch_size=loader.batch_size)))
engine = outsize.parallelize(
    model,
    (x,),
    target=y,
    stages=2,
    microbatches=4,
    clip_norm=1.0,
    loss_fn=pixel_loss,
    optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3),
    resume="segmentation",
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
engine.save("segmentation")

# %% The metric, of the averaged weights
average.swap()
with torch.autocast("cpu", torch.bfloat16):
    outputs = engine.evaluate(x, target=y, gather=True).outputs
if engine.rank == 0:
    outputs = [output["out"] for output in outputs]
    right = (torch.cat(outputs).argmax(1) == y).float().mean()
    print(f"pixels that are right: {right:.4f}")
