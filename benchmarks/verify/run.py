"""Question: what does it cost to verify each other's work, as a share of all steps?

One launch for each layout, a pinned rank per core. Every tenth step is verified; the others are what it is
compared with, so both see the same machine, by seconds and by this rank's CPU seconds. The first round, in
which ranks try whether they repeat their own bits, is told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import launched, saved, spread

TARGET: Final = 0.01
EVERY, USUAL = 10, 100
LAYOUTS: Final = {
    "two stages": {"processes": 2, "stages": 2, "replicas": 1},
    "two replicas": {"processes": 2, "stages": 1, "replicas": 2},
}


def rank(options: argparse.Namespace) -> None:
    """Trains on one rank; rank 0 writes the seconds of all steps."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import outsize
    from outsize.train.world.join import join
    from outsize.train.world.world import leave

    world = join()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(*(m for _ in range(options.layers) for m in (nn.Linear(width, width), nn.Tanh())))
    x, y = (torch.randn(options.rows * options.microbatches * options.replicas, width) for _ in range(2))
    plan = outsize.plan(
        model, (x,), loss_fn=nn.functional.mse_loss, target=y, cluster=f"{world.world_size}xcpu",
        stages=options.stages, microbatches=options.microbatches, axes={"dp_replicate": options.replicas},
    )  # fmt: skip
    engine = outsize.parallelize(
        model, (x,), {}, plan=plan, loss_fn=nn.functional.mse_loss, target=y,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
    )  # fmt: skip
    for _ in range(5):
        engine.step(x, target=y)
    engine.verify(every=EVERY)
    laps = []
    for _ in range(options.steps):
        dist.barrier()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        engine.step(x, target=y)
        lap = time.perf_counter() - begin, time.process_time() - begin_cpu
        laps.append([*lap, any("VERIFY" in span.action for span in engine.timeline().spans)])
    verification: Any = vars(vars(engine)["_executor"])["_verification"]
    if world.rank == 0:
        options.out.write_text(json.dumps([laps, verification.share * EVERY / USUAL]))
    leave(world)


def measure(layout: dict[str, int], extra: list[str]) -> dict[str, Any]:
    """Launches one layout; returns medians and shares."""
    shape = ("--stages", str(layout["stages"]), "--replicas", str(layout["replicas"]))
    laps, expected = launched(Path(__file__), layout["processes"], *shape, *extra)
    first_round = next(at for at, lap in enumerate(laps) if not lap[2])
    later = laps[first_round:]
    plain, plain_cpu = (statistics.median(lap[at] for lap in later if not lap[2]) for at in (0, 1))
    verified = [lap for lap in later if lap[2]]
    seconds = spread([lap[0] for lap in verified])
    cpu = statistics.median(lap[1] for lap in verified)
    return {
        "step_ms": plain * 1e3,
        "verified_step_ms": {name: 1e3 * seconds[name] for name in ("median", "q1", "q3")},
        "verified_steps": len(verified),
        "first_step_ms": laps[0][0] * 1e3,
        "first_round": first_round,
        "cpu_ms": {"other": plain_cpu * 1e3, "verified": cpu * 1e3},
        "share_at_100": (seconds["median"] / plain - 1) / USUAL,
        "cpu_share_at_100": (cpu / plain_cpu - 1) / USUAL,
        "expected_share_at_100": expected,
    }


def main() -> None:
    """All layouts, as a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    for name, value in {"width": 512, "layers": 8, "rows": 64, "microbatches": 8, "steps": 300}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    if options.out is not None:
        rank(options)
        return
    sizes = {name: getattr(options, name) for name in ("width", "layers", "rows", "microbatches", "steps")}
    extra = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    rows = {name: measure(layout, extra) for name, layout in LAYOUTS.items()}
    result = saved(Path(__file__), {"target": TARGET, **sizes, "rows_by_layout": rows})
    print(json.dumps(result) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        "layout          step ms  verified ms  first ms  share of all steps at 1 in 100 (target 1 %), "
        "of CPU seconds, as planned"
    ]
    for name, row in result["rows_by_layout"].items():
        median = row["verified_step_ms"]["median"]
        lines.append(
            f"{name:14s} {row['step_ms']:8.1f} {median:12.1f} {row['first_step_ms']:9.1f}  "
            f"{row['share_at_100']:.2%}  {row['cpu_share_at_100']:.2%}  {row['expected_share_at_100']:.2%}"
        )
    return "\n".join([*lines, f"load {result['load']:.1f}"])


if __name__ == "__main__":
    main()
