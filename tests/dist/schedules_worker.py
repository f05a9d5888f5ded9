"""One rank of four: `schedules_worker.py FOLDER`. Each schedule against the plain loop, by rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from test_schedule_matrix import BATCH, LOSS, SCHEDULES, SEED, STEPS, built, plan_of, reference

from outsize.ir.plan import Plan, ScheduleName
from outsize.train.check.compare import TrainingSnapshot, adamw, compare, engine_snapshot
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import leave

RANKS = 4


def plans() -> dict[str, Plan]:
    """What is tried."""
    found = {name: plan_of(cast("ScheduleName", name), ranks=RANKS) for name in SCHEDULES if name != "custom"}
    custom = found["auto"].model_copy(update={"schedule": "custom"})
    return found | {"custom": custom, "a V, recomputed": plan_of("zero-bubble-v", "full", RANKS)}


def found_over(group: dist.ProcessGroup | None, tried: Mapping[str, Plan]) -> dict[str, str]:
    """`ok`, or the differences, of each plan on this rank."""
    whole, found = reference(), dict[str, str]()
    for what, plan in tried.items():
        engine = make_engine(built(), plan, group, EngineOptions(loss_fn=LOSS, optimizer=adamw, seed=SEED))
        ours = engine_snapshot(engine, BATCH, steps=STEPS)
        tables = (
            (getattr(whole, field), getattr(ours, field)) for field in ("grads", "buffers", "parameters")
        )
        expected = [{n: t for n, t in theirs.items() if n in own} for theirs, own in tables]
        differences = compare(TrainingSnapshot(whole.loss, *expected), ours)
        found[what] = "ok" if differences.bit_equal else str(differences)
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = join()
    found = found_over(world.group, plans())
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
