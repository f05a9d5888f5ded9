"""Trains LoRA adapters of a GPT-2 over two stages: AMP, clipping, an average of the adapters, checkpoints.

python lora_outsize.py                           # both stages here
outsize run --nproc-per-node 2 lora_outsize.py     # a process for each
"""

# %%
import os
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from average import Average
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import outsize

STEPS = int(os.environ.get("STEPS", "6"))


def next_letter_loss(output, following):
    return F.cross_entropy(output.logits.flatten(0, 1), following.flatten())


# %% The data
letters = torch.tensor([min(ord(letter), 127) for letter in "".join(topics.values())])
windows = [(part[:-1], part[1:]) for part in letters.unfold(0, 65, 64)]
loader = DataLoader(windows, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))

# %% Training
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=128,
    n_positions=64,
    n_embd=64,
    n_layer=4,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
adapters = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
model = get_peft_model(GPT2LMHeadModel(config), adapters)
x, y = next(iter(DataLoader(loader.dataset, batch_size=loader.batch_size)))
engine = outsize.parallelize(
    model,
    (x,),
    target=y,
    stages=2,
    microbatches=4,
    clip_norm=1.0,
    loss_fn=next_letter_loss,
    optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
    resume="lora",
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, 100)
average = Average(weight for _, weight in engine.weights.named_parameters() if weight.requires_grad)
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
engine.save("lora")

# %% The metric, of the averaged weights
average.swap()
with torch.autocast("cpu", torch.bfloat16):
    outputs = engine.evaluate(x, target=y, gather=True).outputs
if engine.rank == 0:
    outputs = [output.logits for output in outputs]
    right = (torch.cat(outputs).argmax(2) == y).float().mean()
    print(f"letters that are right: {right:.4f}")
