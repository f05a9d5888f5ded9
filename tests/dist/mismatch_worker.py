"""One rank of a run that cannot be: `mismatch_worker.py CASE`, in a folder with plan files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outsize

case, rank = sys.argv[1], os.environ["RANK"]
Path(f"pid{rank}").write_text(str(os.getpid()))
model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), torch.zeros(16, 4)
if case in ("outsize", "torch") and rank != "0":  # what another machine has installed
    installed = Path(f"{case}-0.0.7.dist-info")
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {case}\nVersion: 0.0.7\n")
    sys.path.insert(0, str(Path.cwd()))
how: dict[str, Any] = {"stages": 3, "dp_replicate": 2}
if case != "wishes":
    name = {"mesh": "mesh", "eight": "eight", "plans": f"rank{rank}"}.get(case, "rank0")
    how = {"plan": outsize.Plan.load(f"{name}.json")}
if case == "activation":
    model.append(nn.ReLU() if rank == "0" else nn.GELU())
loss_fn = nn.L1Loss() if case == "loss" and rank != "0" else nn.MSELoss()
parallelize = outsize.parallelize  # the first use of this name imports what it needs
if case == "closure":
    how["optimizer"] = torch.optim.LBFGS
Path(f"called{rank}").touch()
engine = parallelize(model, (x,), loss_fn=loss_fn, target=x, **how)
if case == "batch":
    engine.step(x, target=x)
    engine.step(x + int(rank), target=x)
