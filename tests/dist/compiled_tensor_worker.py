"""One rank of two: `compiled_tensor_worker.py FOLDER BACKEND`. Tensor parallelism with compiled stages.

It writes by how much its loss and gradients differ from those of the same layout as it is, over a tensor's
largest element, and how many graphs there were.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import outsize
from outsize.train.world.join import join
from outsize.train.world.world import leave

SIZE = 16


@final
class Blocks(nn.Module):
    """Two layers that ranks divide by columns and by rows, with dropout and a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList([nn.Linear(SIZE, 4 * SIZE) for _ in range(2)])
        self.downs = nn.ModuleList([nn.Linear(4 * SIZE, SIZE) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(SIZE) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for up, down, norm in zip(self.ups, self.downs, self.norms, strict=True):
            x = norm(x + F.dropout(down(F.gelu(up(x))), 0.2, self.training))
        return x


def step(backend: str | None, recompute: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Blocks()
    x, y = torch.randn(8, SIZE), torch.randn(8, SIZE)
    counters.clear()
    asked = outsize.Request(cluster="2xcpu", stages=1, axes={"tp": 2}, microbatches=2, recompute=recompute)
    engine = outsize.parallelize(model, (x,), target=y, loss_fn=F.mse_loss, compiled=backend, plan=asked)
    loss = engine.step(x, target=y, update=False).loss
    named = engine.weights.named_parameters()
    return loss, {name: p.grad.clone() for name, p in named if p.grad is not None}


def main(folder: Path, backend: str) -> None:
    world = join()
    said: dict[str, tuple[float, int]] = {}
    for recompute in ("none", "full"):
        loss, plain = step(None, recompute)
        compiled_loss, compiled = step(backend, recompute)
        assert plain.keys() == compiled.keys()
        pairs = [(loss, compiled_loss), *((plain[n], compiled[n]) for n in plain)]
        worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        said[recompute] = worst, counters["stats"]["unique_graphs"]
    (folder / f"rank{world.rank}.json").write_text(json.dumps(said))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
