"""One of two ranks, of models with branches: `branched_worker.py FOLDER`, started by outsize's launcher.

Composed schedules, three stages and more on two ranks, random splits and a V; FOLDER/rank<r>.json says for
each what differs from the plain loop on this rank.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from branched import (
    BATCH_SIZE,
    LOSS,
    SEED,
    SPLITS,
    STEPS,
    at_random,
    batch_of,
    built,
    by_name,
    captured,
    composed,
    plan_of,
    reference,
)

from outsize.ir.plan import Axes, Plan
from outsize.train.check.compare import TrainingSnapshot, adamw, compare, engine_snapshot
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import leave


def plans() -> Iterator[tuple[str, str, Plan]]:
    """What is tried, the model, its plan; the same on each rank."""
    for name in ("fusion", "siamese", "vision-text"):
        graph, draw = captured(name, 4).graph, random.Random(name)
        owners = by_name(graph, SPLITS[name])
        for ranks in ((0, 1, 0), (1, 0, 1)):
            yield f"{name} head on {ranks[2]}", name, composed(graph, owners, ranks, BATCH_SIZE, 4, draw)
    for name in ("siamese", "vision-text", "inception", "unet"):
        graph, draw = captured(name, 4).graph, random.Random(f"{name} {SEED}")
        owners = next(o for _ in range(99) if max(o := at_random(graph, 5, draw)) > 1)
        ranks = [0, *(draw.randrange(2) for _ in range(max(owners) - 1)), 1]
        yield f"{name} at random", name, composed(graph, owners, ranks, BATCH_SIZE, 4, draw)
    graph = captured("inception", 4).graph
    owners = [4 * unit // len(graph.units) for unit in range(len(graph.units))]
    plan = plan_of(graph, owners, BATCH_SIZE, 4, "zero-bubble-v")
    yield "inception in a V", "inception", plan.model_copy(update={"axes": Axes(pp=2), "cluster": "2xcpu"})


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = join()
    found: dict[str, str] = {}
    for what, name, plan in plans():
        engine = make_engine(
            built(name), plan, world.group, EngineOptions(loss_fn=LOSS, optimizer=adamw, seed=SEED)
        )
        ours, whole = engine_snapshot(engine, batch_of(name), steps=STEPS), reference(name, 4)
        tables = (
            (getattr(whole, field), getattr(ours, field)) for field in ("grads", "buffers", "parameters")
        )
        expected = [{n: t for n, t in theirs.items() if n in own} for theirs, own in tables]
        differences = compare(TrainingSnapshot(whole.loss, *expected), ours)
        found[what] = "ok" if differences.bit_equal else str(differences)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
