"""A rank of run.py's launchers: trains a small network and writes what it holds.

    train.py FOLDER AXES [--export]      e.g. train.py /tmp/found '{"stages": 2}'

`--export` asks submitit for torch's variables, as its documentation has it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import outsize

STEPS, MICROBATCHES = 3, 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(8, 16, generator=drawn), torch.randint(16, (8,), generator=drawn)


def train(folder: str, axes: dict[str, int]) -> None:
    """Writes FOLDER/PID.json: this rank's number, what outsize has warned of, losses and weights (rank 0)."""
    torch.set_num_threads(1)
    x, y = batch()
    count = MICROBATCHES // axes.get("dp_replicate", 1)
    how: dict[str, Any] = {"loss_fn": functional.cross_entropy, "target": y, "microbatches": count}
    mesh = {axis: size for axis, size in axes.items() if axis != "stages"}
    how |= {"stages": axes.get("stages"), "axes": mesh or None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = outsize.parallelize(network(), (x,), optimizer=torch.optim.AdamW, **how)
        losses = [float(engine.step(x, target=y).loss) for _ in range(STEPS)]
    weights = {name: value.tolist() for name, value in engine.weights.full_state_dict().items()}
    said = [str(one.message) for one in caught if type(one.message).__module__.startswith("outsize.")]
    found = {"rank": engine.rank, "said": said, "losses": losses, "weights": weights}
    written = Path(folder) / f"{os.getpid()}.tmp"
    written.write_text(json.dumps(found))
    written.rename(written.with_suffix(".json"))


if __name__ == "__main__":
    if "--export" in sys.argv:
        from submitit.helpers import TorchDistributedEnvironment  # pyright: ignore[reportMissingImports]

        TorchDistributedEnvironment().export()
    train(sys.argv[1], json.loads(sys.argv[2]))
