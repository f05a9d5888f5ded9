#!/usr/bin/env bash
# torch 2.13.0: get_optimizer_state_dict of torch.distributed.checkpoint.state_dict, called before the first step, changes the
# training that follows. To have states that it can return it steps the optimizer once, with gradients of zero and lr=0, and
# leaves the result: Adam counts that step in its bias corrections, Rprop and ASGD keep step sizes made with lr=0. Saving a
# run at step 0 is such a call. Its documentation says what it returns, and nothing of a step. SGD is as it was.
#
# Seen (Linux, CPU): how far the first step moves the weights, against the same training without the call: SGD 100 %,
# AdamW 74 %, Adamax 53 %, RAdam 53 %, ASGD 0 %, Rprop 0 %; Rprop stays where it is, AdamW's steps come to 86 and 91 %.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy==2.4.6
cat > "$folder/read.py" <<'PY'
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def movements(make, is_read):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = make(model.parameters(), lr=0.01)
    if is_read:
        get_optimizer_state_dict(model, optimizer)
    moved = []
    for step in range(3):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        moved.append((model.weight.detach() - before).norm().item())
    return moved


found = {}
for name in ("SGD", "AdamW", "Adamax", "RAdam", "ASGD", "Rprop"):
    make = getattr(torch.optim, name)
    found[name] = [read / plain for plain, read in zip(movements(make, False), movements(make, True), strict=True)]
print(f"torch {torch.__version__}: movement with the state read before, of that without")
for name, shares in found.items():
    print(f"  {name:7}", " ".join(f"{share:6.1%}" for share in shares))
assert found["SGD"] == [1.0] * 3, "the behaviour has changed"
assert all(0.5 < found[name][0] < 0.8 for name in ("AdamW", "Adamax", "RAdam")), "the behaviour has changed"
assert found["ASGD"][0] < 0.01 and max(found["Rprop"]) < 0.01, "the behaviour has changed"
PY
"$folder/venv/bin/python" "$folder/read.py"
