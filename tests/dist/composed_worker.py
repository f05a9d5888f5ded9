"""One rank of four: `composed_worker.py FOLDER`. Composed schedules on meshes, against one process's loop.

Leaves FOLDER/rank<r>.json: for each FOLDER/plan-*.json the largest distances, those of layouts_worker.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from layouts_worker import (
    CLIP,
    MICROBATCHES,
    SEED,
    STEPS,
    case,
    distances,
    expected_of,
    made,
    optimizer_of,
    split,
)
from tensor_worker import all_in

import outsize
from outsize.ir.plan import Plan
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

NAME: Final = "gpt2"
MESHES: Final = ("dp_replicate", "dp_shard", "tp")


def composed(axis: str) -> Plan:
    """Two ranks of a pipeline, each of two devices."""
    model, batch = made(NAME, torch.float64)
    count = MICROBATCHES if axis == "tp" else MICROBATCHES // 2
    return outsize.plan(
        model, batch.args, batch.kwargs, loss_fn=case(NAME).loss, target=batch.target or None,
        cluster="4xcpu", stages=2, microbatches=count, schedule="auto", axes={axis: 2},
    )  # fmt: skip


def halved(plan: Plan) -> Plan:
    """Each backward as I and W; a W comes behind the next I of its row."""
    rows = []
    for row in plan.actions:
        cells, waiting = list[str](), list[str]()
        for cell in row.replace("B", "I").split(","):
            cells += [cell, *waiting] if "I" in cell else [cell]
            waiting = [cell.replace("I", "W")] if "I" in cell else waiting
        rows.append(",".join([*cells, *waiting]))
    return plan.model_copy(update={"actions": tuple(rows)})


def tried(plan: Plan, world: World, folder: Path) -> dict[str, Any]:
    model, batch = made(NAME, torch.float64)
    engine = make_engine(
        model,
        plan,
        world.group,
        EngineOptions(
            loss_fn=case(NAME).loss,
            seed=SEED,
            clip_norm=CLIP,
            optimizer=lambda parameters: optimizer_of(torch.float64, parameters),
        ),
    )
    expected = expected_of(folder, NAME, "fp64", world.rank)
    return distances(split(engine, batch, STEPS), expected)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world, found = join(), dict[str, Any]()
    with all_in(torch.float64):
        for path in sorted(folder.glob("plan-*.json")):
            found[path.stem] = tried(Plan.load(path), world, folder)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
