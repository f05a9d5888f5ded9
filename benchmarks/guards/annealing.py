"""Question: what does a value cost that changes at every step, over a whole training?

A tiny autoencoder with KL annealing: the user sets `loss.beta` before each of 10,000 steps, or
`model.strength`, a factor in the model's own forward. Beside it the same training with constant values.
Counted: captures, and microseconds of a step.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import outsize

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import saved

HERE = Path(__file__).parent


class Autoencoder(nn.Module):
    """Returns a reconstruction, and mean and log of the variance of the code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.mean, self.spread = nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.strength = 0.5

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean = self.mean(hidden)
        return self.decoder(mean * (1 - self.strength)), mean, self.spread(hidden)


class Annealed:
    """Reconstruction, and the divergence from a normal distribution by a weight that the user changes."""

    def __init__(self) -> None:
        self.beta = 0.0

    def __call__(self, output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
        made, mean, spread = output
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return (made - x).square().mean() + self.beta * divergence


def train(steps: int, annealed: str) -> dict[str, Any]:
    """Trains with a value that changes, and returns captures, warnings and microseconds of a step."""
    model, loss = Autoencoder(), Annealed()
    loss.beta = 0.5
    holder = {"loss.beta": loss, "model.strength": model}.get(annealed)
    name = annealed.rpartition(".")[2]
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    engine = outsize.parallelize(
        model,
        (batch,),
        target=batch,
        loss_fn=loss,
        stages=2,
        microbatches=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
    )
    times: list[float] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(steps):
            if holder is not None:
                setattr(holder, name, step / steps)
            start_s = time.perf_counter()
            engine.step(batch, target=batch)
            times.append((time.perf_counter() - start_s) * 1e6)
    executor: Any = engine._executor
    return {
        "annealed": annealed,
        "steps": steps,
        "captures": len(executor.variants),
        "warnings": sum(f"self.{name} " in str(w.message) for w in said),
        "step_us": {"median": statistics.median(times), "best": min(times)},
        "total_s": sum(times) / 1e6,
    }


def main() -> None:
    """Both trainings, as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [train(options.steps, annealed) for annealed in ("nothing", "loss.beta", "model.strength")]
    result = saved(
        Path(__file__),
        {
            "python": platform.python_version(),
            "rows": rows,
        },
        "_annealing",
    )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
