"""One rank of a run that cannot be: `mismatch_worker.py CASE`, in a folder with plan files."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

import outsize
from outsize.device import futex
from outsize.train.engine.engine import Engine


@final
class Scaled(nn.Linear):
    """Each layer multiplies by a number."""

    scale = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


@final
class Shifted(nn.Sequential):
    """The model's own forward adds a number."""

    shift = 0.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.shift


@final
class Weighted(nn.Module):
    """The loss reads a number."""

    beta = 1.0

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return self.beta * (y - target).square().mean()


@final
class Branched(nn.Sequential):
    """A model that reads a number of the batch, so it runs by modules."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y if float(y.sum()) < 1e6 else -y


def change_on_one_rank(engine: Engine, kind: str) -> None:
    """Two steps in which all ranks change a value alike, and one in which a rank alone does."""
    layers = list(engine.model.children())
    parts: dict[str, tuple[Any, str, float]] = {
        "submodule": (layers[0], "scale", float(rank)),  # rank 1 changes what rank 0 runs
        "first": (layers[7], "scale", 1.0 - float(rank)),  # rank 0 changes what the last rank runs
        "root": (engine.model, "shift", float(rank)),
        "loss": (loss_fn, "beta", 1.0 - float(rank)),
        "replica": (layers[0], "scale", float(rank)),
    }
    if kind in parts:
        holder, name, value = parts[kind]
        setattr(holder, name, 0.5)
        engine.step(x, target=x)
        setattr(holder, name, 0.5 + value)
    sizes = {"shape": 8, "sizes": 12} if rank == "1" else {}
    for size in (16, 16, sizes.get(kind, 16)):  # batches are not compared in step 3
        engine.step(x[:size], target=x[:size])


case, rank = sys.argv[1], os.environ["RANK"]
Path(f"pid{rank}").write_text(str(os.getpid()))
model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), torch.zeros(16, 4)
if case in ("outsize", "torch") and rank != "0":  # what another machine has installed
    installed = Path(f"{case}-0.0.7.dist-info")
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {case}\nVersion: 0.0.7\n")
    sys.path.insert(0, str(Path.cwd()))
how: dict[str, Any] = {"stages": 3, "axes": {"dp_replicate": 2}}
if case != "wishes":
    name = {"mesh": "mesh", "eight": "eight", "plans": f"rank{rank}"}.get(case, "rank0")
    how = {"plan": outsize.Plan.load(f"{name}.json")}
if case == "activation":
    model.append(nn.ReLU() if rank == "0" else nn.GELU())
loss_fn = nn.L1Loss() if case == "loss" and rank != "0" else nn.MSELoss()
parallelize = outsize.parallelize  # the first use of this name imports what it needs
if case in ("clipped", "rates"):
    how["optimizer"] = partial(torch.optim.SGD, lr=0.1)
if case == "closure":
    how["optimizer"] = torch.optim.LBFGS
value = case.removeprefix("value-").removesuffix("-gloo") if case.startswith("value") else ""
if value:
    ranks = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model, loss_fn = Shifted(*(Scaled(4, 4) for _ in range(8))), Weighted()
    how = {"stages": 1, "axes": {"dp_replicate": 2}} if value == "replica" else {"stages": ranks}
    how |= {"microbatches": 2, "optimizer": partial(torch.optim.SGD, lr=0.1)}
if case.endswith("gloo"):
    futex.AVAILABLE = False
Path(f"called{rank}").touch()
if case.startswith("called"):
    whole = Branched(*model) if case == "called-modules" else model
    split = outsize.split(whole, (x,), stages=2)
    own = x + int(rank)
    with torch.set_grad_enabled(case != "called-evaluated"):
        split(own)
    raise SystemExit
engine = parallelize(model, (x,), loss_fn=loss_fn, target=x, **how)
if value:
    engine.step(x, target=x)
    change_on_one_rank(engine, value)
if case in ("clipped", "rates"):
    x = torch.ones(16, 4)
    for _ in range(2):
        engine.step(x, target=100 * x, update=False)
        if case == "clipped":
            torch.nn.utils.clip_grad_norm_(engine.weights.module.parameters(), 0.001)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        if case == "rates" and rank == "0":
            engine.optimizer.param_groups[0]["lr"] /= 2
if case == "batch":
    engine.step(x, target=x)
    engine.step(x + int(rank), target=x)
if case == "evaluated":
    engine.step(x, target=x)
    engine.evaluate(x + int(rank), target=x)
