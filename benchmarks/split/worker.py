"""One launch: laps of a loop with a split model, of engine.step and of a loop by modules, in turns.

All three train the same model with the same batch and SGD; the order turns with each lap. Rank 0 writes the
seconds of every lap.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import outsize


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """Six layers of 512 units, 64 samples."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(64, 512), torch.randn(64, 512)


class _Encoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def encoder() -> tuple[nn.Module, Tensor, Tensor]:
    """Four layers of a transformer of width 128 with dropout, 16 samples of 64 tokens."""
    return _Encoder(128, 4), torch.randn(16, 64, 128), torch.randn(16, 64, 128)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {"mlp": mlp, "encoder": encoder}


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    """The mean of squared errors."""
    return (output - y).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all loops."""
    return torch.optim.SGD(parameters, lr=1e-3)


def steps(name: str, stages: int, *, by_modules: bool) -> dict[str, Callable[[], object]]:
    """Returns one step of each loop."""
    torch.manual_seed(0)
    model, x, y = MODELS[name]()
    how: dict[str, Any] = {"stages": stages, "microbatches": 4}
    split = outsize.split(copy.deepcopy(model), (x,), **how)
    optimizer = sgd(split.parameters())
    engine = outsize.parallelize(
        copy.deepcopy(model),
        (x,),
        target=y,
        loss_fn=loss_of,
        optimizer=sgd,
        schedule="gpipe",
        axes="pp",
        **how,
    )

    def by_split() -> None:
        loss_of(split(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, Callable[[], object]] = {
        "split": by_split,
        "engine": lambda: engine.step(x, target=y),
    }
    if by_modules:
        other = outsize.parallelize(copy.deepcopy(model), (x,), optimizer=sgd, axes="pp", **how)
        modules_optimizer = other.optimizer
        assert modules_optimizer is not None

        def step_by_modules() -> None:
            with other.by_modules():
                loss_of(other.model(x), y).backward()
            modules_optimizer.step()
            modules_optimizer.zero_grad()

        found["by_modules"] = step_by_modules
    return found


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--laps", type=int, default=15)
    parser.add_argument("--by-modules", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    loops = steps(asked.model, asked.stages, by_modules=asked.by_modules)
    laps: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(2):
        for step in loops.values():
            step()
    names = list(loops)
    for lap in range(asked.laps):
        for name in names if lap % 2 else reversed(names):
            start = time.perf_counter()
            loops[name]()
            laps[name].append(time.perf_counter() - start)
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if is_first:
        asked.out.write_text(json.dumps(laps))


if __name__ == "__main__":
    main()
