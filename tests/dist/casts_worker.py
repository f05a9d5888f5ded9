"""One rank of two: `casts_worker.py FOLDER`. How often a step under autocast casts each weight, by layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from cast_counts import Casts
from test_cast_weights import MODELS, SIZE, autocast, batch, made, plain_step
from torch import Tensor, nn

import outsize
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import leave


@final
class Blocks(nn.Module):
    """Two layers that ranks divide by columns and by rows, a norm between, and a head of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList([nn.Linear(SIZE, 4 * SIZE) for _ in range(2)])
        self.downs = nn.ModuleList([nn.Linear(4 * SIZE, SIZE) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(SIZE) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for up, down, norm in zip(self.ups, self.downs, self.norms, strict=True):
            x = norm(x + down(F.gelu(up(x))))
        return x


MODELS["blocks"] = Blocks
TOKENS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"stages": 2},
    "zero-bubble": {"stages": 2, "schedule": "zero-bubble"},
    "replicas": {"stages": 1, "axes": {"dp_replicate": 2}},
    "shards": {"stages": 1, "axes": {"dp_shard": 2}},
    "tensor": {"stages": 1, "axes": {"tp": 2}},
    "sequence": {"stages": 1, "axes": {"tp": 2}, "sequence_parallel": True},
}
CASES = [
    *(("plain", layout, m) for layout in LAYOUTS if layout not in ("tensor", "sequence") for m in (4, 16)),
    *(("blocks", layout, m) for layout in ("tensor", "sequence") for m in (4, 16)),
    ("tied", "pipeline", 4),
]


def counted(name: str, layout: str, microbatches: int, group: Any) -> tuple[list[str], dict[str, int]]:
    """This rank's parameters whose gradients are not the plain loop's, and its casts in the second step."""
    model, plain, (x, y) = made(name), made(name), batch(32)
    if layout in ("tensor", "sequence"):
        x, y = (t.unsqueeze(1).expand(-1, TOKENS, -1) * torch.arange(1, 1 + TOKENS)[:, None] for t in (x, y))
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y}
    how = LAYOUTS[layout]
    request = outsize.Request(cluster="2xcpu", microbatches=microbatches, **how)
    plan = outsize.plan(model, (x,), request=request, **given)
    casts = Casts(plain.state_dict())
    engine: Any = make_engine(model, plan, group, EngineOptions(loss_fn=F.mse_loss))
    for step in range(2):
        if step and layout in ("tensor", "sequence"):
            casts = Casts(dict(model.named_parameters()))  # This rank's parts.
        for parameter in model.parameters():
            parameter.grad = None
        with autocast(), casts:
            casts.clear()
            engine.step(x, target=y, update=False)
    axes = how.get("axes", {})
    replicas = axes.get("dp_replicate", 1) * axes.get("dp_shard", 1)
    plain_step(plain, x, y, microbatches * replicas)
    expected = dict(plain.named_parameters())
    wrong = []
    for key, parameter in engine.weights.named_parameters():
        ours = engine.weights.whole(key, parameter.grad)
        theirs = expected[key].grad
        assert theirs is not None
        if "tp" in axes:  # Ranks add up what bfloat16 has rounded.
            same = bool((ours - theirs).abs().max() < 0.02 * theirs.abs().max())
        else:
            same = torch.equal(ours, theirs) if replicas == 1 else torch.allclose(ours, theirs, rtol=1e-5)
        wrong += [] if same else [key]
    return wrong, casts.counts


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = join()
    said = {
        f"{name} {layout} {microbatches}": counted(name, layout, microbatches, world.group)
        for name, layout, microbatches in CASES
    }
    (folder / f"rank{world.rank}.json").write_text(json.dumps(said))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
