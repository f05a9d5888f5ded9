"""Trains LoRA adapters of a GPT-2 on one device: AMP, clipping, an average of the adapters, checkpoints.

python lora.py
"""

# %%
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from average import Average
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

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
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
average = Average([weight for weight in model.parameters() if weight.requires_grad])
states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average}
done = 0
if Path("lora.pt").exists():
    saved = torch.load("lora.pt")
    done = saved["steps"]
    for key, each in states.items():
        each.load_state_dict(saved[key])
for number, (x, y) in enumerate(loader):
    if number < done:
        continue
    if done == STEPS:
        break
    total = 0.0
    for text, following in zip(x.chunk(4), y.chunk(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_letter_loss(model(text), following) / 4
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    average.step()
    done += 1
    print(f"step {done}: loss {total:.5f}, gradient norm {norm:.5f}, lr {scheduler.get_last_lr()[0]:.6f}")
torch.save({"steps": done, **{key: each.state_dict() for key, each in states.items()}}, "lora.pt")

# %% The metric, of the averaged weights
average.swap()
model.eval()
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    outputs = [model(text).logits for text in x.chunk(4)]
right = (torch.cat(outputs).argmax(2) == y).float().mean()
print(f"letters that are right: {right:.4f}")
