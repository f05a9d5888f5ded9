"""Trains a small GPT over two stages: AMP, clipping, an average of the weights, checkpoints.

python nanogpt_outsize.py                           # both stages here
outsize run --nproc-per-node 2 nanogpt_outsize.py     # a process for each
"""

# %%
import os
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from average import Average
from torch import nn
from torch.utils.data import DataLoader

import outsize

STEPS = int(os.environ.get("STEPS", "6"))


# %% The model
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x):
        parts = self.c_attn(self.ln_1(x)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=128, context=64, layers=4, heads=4, width=64):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, text):
        x = self.wte(text) + self.wpe(torch.arange(text.shape[1], device=text.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def next_letter_loss(logits, following):
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


# %% The data
letters = torch.tensor([min(ord(letter), 127) for letter in "".join(topics.values())])
windows = [(part[:-1], part[1:]) for part in letters.unfold(0, 65, 64)]
loader = DataLoader(windows, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))

# %% Training
torch.manual_seed(0)
model = GPT()
x, y = next(iter(DataLoader(loader.dataset, batch_size=loader.batch_size)))
engine = outsize.parallelize(
    model,
    (x,),
    target=y,
    stages=2,
    microbatches=4,
    clip_norm=1.0,
    loss_fn=next_letter_loss,
    optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3),
    resume="nanogpt",
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
engine.save("nanogpt")

# %% The metric, of the averaged weights
average.swap()
with torch.autocast("cpu", torch.bfloat16):
    outputs = engine.evaluate(x, target=y, gather=True).outputs
if engine.rank == 0:
    right = (torch.cat(outputs).argmax(2) == y).float().mean()
    print(f"letters that are right: {right:.4f}")
