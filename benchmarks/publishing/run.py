"""What does a run pay for being seen by `outsize top`? The share of its time in which it tells.

python benchmarks/publishing/run.py [STEP_MS]     two processes over gloo, each step at least so long (50)

All that publishing does happens in one call after a step, on the thread that trains. So this call is timed in
each step, told or not: no second run is needed, whose noise would be larger than the cost.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outsize
from outsize.ops.publish.publisher import Publisher
from outsize.train.engine.callbacks import Callbacks
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.variables import PUBLISHED
from outsize.train.world.world import leave

# The clock of a callback begins with every step and doubles its distance, so a run's first seconds tell more.
WARM_S, SECONDS = 5.0, 20.0


def work(folder: Path, step_s: float) -> None:
    """Steps in rounds; rank 0 writes the CPU seconds and the wall seconds of a step in each."""
    world = join()
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 3))
    x, y = torch.randn(32, 64), torch.arange(32) % 3
    engine: Any = outsize.parallelize(
        model,
        (x,),
        target=y,
        loss_fn=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW,
        schedule="1f1b",
        microbatches=8,
    )
    published = folder / f"{os.getpid()}-0.0"
    published.mkdir()
    callbacks = Callbacks([Publisher()], engine.crew, engine.plan)
    callbacks.start(replace(world, variables={PUBLISHED: str(published)}))
    meter = Meter(callbacks)
    engine._reports._callbacks = meter
    _steps(engine, x, y, step_s, round(WARM_S / step_s))
    meter.cpu_s.clear()
    meter.wall_s.clear()
    steps = round(SECONDS / step_s)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    _steps(engine, x, y, step_s, steps)
    whole = time.process_time() - cpu_s, time.perf_counter() - wall_s
    if world.rank == 0:
        (folder / "measured").write_text(json.dumps([steps, whole, meter.cpu_s, meter.wall_s]))
    leave(world)


def _steps(engine: outsize.Engine, x: torch.Tensor, y: torch.Tensor, step_s: float, count: int) -> None:
    for _ in range(count):
        end_s = time.perf_counter() + step_s
        engine.step(x, target=y)
        time.sleep(max(0.0, end_s - time.perf_counter()))


class Meter:
    """Callbacks whose calls after a step are timed."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self.cpu_s = list[float]()
        self.wall_s = list[float]()

    def after_step(self, *facts: Any) -> None:
        """See Callbacks."""
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        self._callbacks.after_step(*facts)
        self.cpu_s.append(time.process_time() - cpu_s)
        self.wall_s.append(time.perf_counter() - wall_s)


def main(step_s: float) -> None:
    """Prints the share of the time that is spent on telling, and what one telling takes."""
    with tempfile.TemporaryDirectory() as name:
        run_in_forks(2, lambda: work(Path(name), step_s))
        steps, whole, *told = json.loads((Path(name) / "measured").read_text())
    for what, whole_s, seconds in zip(("CPU time of rank 0", "time by the clock"), whole, told, strict=True):
        share, calls = sum(seconds) / whole[1], [each for each in seconds if each > 0.001]
        verdict = "met" if share < 0.01 else "missed"
        typical = f"{1e3 * statistics.median(calls):.1f} ms each" if calls else "below 1 ms"
        print(
            f"{what}: {share:.2%} of {whole[1]:.0f} s is telling (below 1 %: {verdict}), {typical}; ", end=""
        )
        print(f"{1e3 * whole_s / steps:.1f} ms a step")
    print(f"{steps} steps, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(float(sys.argv[1]) / 1e3 if sys.argv[1:] else 0.05)
