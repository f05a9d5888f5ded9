"""One rank of two: `own_losses_worker.py FOLDER`. Trains a loss with weights of its own on each layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from own_losses import CLIP, FEATURES, Centers, adamw, batch, model, plain_loop
from torch import nn

import outsize
from outsize.run.weights.freed import FreedWeight
from outsize.train.world.join import join
from outsize.train.world.world import leave

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"stages": 2, "microbatches": 2},
    "replicas": {"axes": {"dp_replicate": 2}, "microbatches": 1},
    "shards": {"axes": {"dp_shard": 2}, "microbatches": 1},
    "tensor": {"axes": {"tp": 2}, "microbatches": 2},
}
STEPS, SAVED = 4, 2


class Weighted(Centers):
    """Without a buffer that each replica fills from its own samples."""

    scale: torch.Tensor

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = output @ self.weight * self.scale
        return nn.functional.cross_entropy(logits, y) * torch.exp(-self.log_scale) + self.log_scale

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((), 1.0 + 1.0 / FEATURES))


def made() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return model(), Weighted()


def differences(layout: str, root: Path) -> dict[str, Any]:
    """How far losses, weights of the model and of the loss are from the plain loop's, on rank 0."""
    plain, plain_criterion = made()
    expected = plain_loop(plain, plain_criterion, plain_criterion, range(STEPS))

    def engine(**options: Any) -> tuple[Any, nn.Module]:
        (net, criterion), (x, y) = made(), batch(0)
        given = {"loss_fn": criterion, "target": y, "clip_norm": CLIP, **LAYOUTS[layout], **options}
        return outsize.parallelize(net, (x,), optimizer=lambda ps: adamw(ps, criterion), **given), criterion

    losses = list[float]()
    made_engine, _ = engine()
    for step in range(STEPS):
        if step == SAVED:
            made_engine.save(root)
            made_engine, _ = engine(resume=root)
        x, y = batch(step)
        losses.append(float(made_engine.step(x, target=y).loss))
    state, of_loss = made_engine.weights.full_state_dict(), made_engine.weights.loss_state_dict()
    _, criterion = engine()
    freed = [n for n, p in criterion.named_parameters() if isinstance(p, FreedWeight)]
    return {
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "model": _largest(state, plain.state_dict()),
        "loss": _largest(of_loss, plain_criterion.state_dict()),
        "freed": freed,
        "constants": [n for n, b in criterion.named_buffers() if isinstance(b, FreedWeight)],
    }


def _largest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    if not found:  # This is not rank 0.
        return 0.0
    assert found.keys() == expected.keys()
    return max(float((found[n] - t).abs().max()) for n, t in expected.items())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = join()
    said = {layout: differences(layout, folder / layout) for layout in LAYOUTS}
    (folder / f"rank{world.rank}.json").write_text(json.dumps(said))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
