"""What does a run pay for being seen by `outsize top`? Rounds of steps with and without a Publisher, in turn.

python benchmarks/publishing/run.py [STEP_MS]     two processes over gloo, each step at least so long (50)
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import outsize
from outsize.files.run_folders import RunFolder
from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.timeline import Timeline
from outsize.train.engine.callbacks import Callbacks
from outsize.train.launch.forks import run_in_forks
from outsize.train.launch.launch import join, leave
from outsize.train.publishing.publisher import Publisher

ROUNDS, ROUND_S = 6, 5.0


def work(folder: Path, step_s: float) -> None:
    """Steps in rounds; rank 0 writes the CPU seconds and the wall seconds of a step in each."""
    world = join()
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 3))
    x, y = torch.randn(32, 64), torch.arange(32) % 3
    engine = outsize.parallelize(
        model,
        (x,),
        target=y,
        loss_fn=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW,
        schedule="1f1b",
        microbatches=8,
    )
    for _ in range(20):
        engine.step(x, target=y)
    publisher = Publisher(RunFolder(folder, os.getpid(), 0.0), engine.plan)
    told = Callbacks([publisher], engine.crew, engine.plan)
    silent = Callbacks([], engine.crew, engine.plan)
    told_cpu_s = time.process_time()
    for _ in range(20):
        told.after_step(engine.steps, torch.zeros(()), None, None, lambda: _report(engine))
        told._clocks = [type(clock)(1.0) if clock else None for clock in told._clocks]
    told_cpu_s = (time.process_time() - told_cpu_s) / 20
    rounds: list[tuple[bool, float, float]] = []
    for number in range(2 * ROUNDS):
        engine._callbacks = told if number % 2 else silent
        steps, cpu_s, wall_s = round(ROUND_S / step_s), time.process_time(), time.perf_counter()
        for _ in range(steps):
            end_s = time.perf_counter() + step_s
            engine.step(x, target=y)
            time.sleep(max(0.0, end_s - time.perf_counter()))
        steps_s = (time.process_time() - cpu_s) / steps, (time.perf_counter() - wall_s) / steps
        rounds.append((bool(number % 2), *steps_s))
    if world.rank == 0:
        (folder / "rounds").write_text(json.dumps([rounds, told._telling_s, told_cpu_s]))
    leave(world)


def _report(engine: outsize.Engine) -> tuple[Timeline, Utilisation]:
    timeline = engine.timeline()
    return timeline, engine.report(timeline)


def main(step_s: float) -> None:
    """Prints the CPU time of a step with and without, and what one telling takes."""
    with tempfile.TemporaryDirectory() as name:
        run_in_forks(2, lambda: work(Path(name), step_s))
        rounds, telling_s, told_cpu_s = json.loads((Path(name) / "rounds").read_text())
    for what, column in (("CPU of rank 0", 1), ("wall", 2)):
        mine = [statistics.median(row[column] for row in rounds if row[0] == told) for told in (False, True)]
        share = (mine[1] - mine[0]) / step_s
        print(f"{what}: {1e3 * mine[0]:.3f} ms a step, published {1e3 * mine[1]:.3f} ms: {share:+.2%}")
    print(f"telling once: {1e3 * told_cpu_s:.2f} ms of CPU time, {1e3 * telling_s:.2f} ms by the clock")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(float(sys.argv[1]) / 1e3 if sys.argv[1:] else 0.05)
