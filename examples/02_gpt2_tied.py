"""GPT-2 as transformers ships it: the loss is inside the model, and the first and last layer share a weight.

`lm_head.weight` is `transformer.wte.weight`. With the embedding on the first stage and the head on the last,
other libraries ask you to untie them or to sum two gradients yourself. Here the weight has one owner, the
first stage; the last stage borrows it, and its gradient comes back before the embedding's own is added.

    python examples/02_gpt2_tied.py
"""

# %%
from __future__ import annotations

import torch

import outsize
from outsize.capture.models.imports import import_transformers

# `import transformers`, also where the installed torchvision was built for another torch.
transformers = import_transformers()

# %% A small GPT-2
torch.manual_seed(0)
config = transformers.GPT2Config(
    vocab_size=128, n_positions=32, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
)
model = transformers.GPT2LMHeadModel(config).train()  # its dropout of 0.1 stays on
ids = torch.randint(0, 128, (12, 32))
batch = {"input_ids": ids, "labels": ids}

# %% What is captured, and what is tied
graph = outsize.capture(model, kwargs=batch)
tied = [parameter.names for parameter in graph.parameters if len(parameter.names) > 1]
print(f"{len(graph.units)} units, {graph.parameter_bytes // 4:,} parameters, tied: {tied}")

# %% A plan for three devices
plan = outsize.plan(model, kwargs=batch, cluster="3xcpu", stages=3, microbatches=6)
for number, stage in enumerate(plan.stages):
    print(f"stage {number}: {', '.join(stage.units)}")

# %% Three steps, compared with one device
verdict = outsize.check(model, kwargs=batch, plan=plan, steps=3)
print(f"after 3 AdamW steps, away from one device: loss {verdict.loss_diff}, ", end="")
print(f"gradients {verdict.grad_diff}, parameters {verdict.parameter_diff}")
