"""One rank of the zoo over processes: `zoo_worker.py FOLDER ALL?`, a fork of the test process.

For each model the ranks share out the references (one microbatch count each, through files), then run every
combination split and compare what they own. Over two ranks the engine of the first combination of a model of
each kind (without `all` of every second kind) records itself; the others begin with what the test process has
recorded. FOLDER/rank<r>.json holds one list of findings per model.
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from parity_runs import (
    SEED,
    STEPS,
    Combination,
    at_random,
    batch_of,
    captured,
    fresh,
    interleaved,
    planned,
    reference,
)
from recorded_once import always_recorded
from zoo import CASES, case

from outsize.ir.plan import Plan, ScheduleName
from outsize.train.check.compare import TrainingSnapshot, adamw, compare, engine_snapshot
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine
from outsize.train.world.join import join
from outsize.train.world.world import World, leave

SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b")
MICROBATCHES = (3, 4)
# All schedules and a third rank, a neighbour on both sides, without --all: on a model of each kind.
KINDS = ("toy", "unet", "gpt2", "t5", "mixtral", "lstm")
# 20 to 60 million parameters: only with --all; resnet18 and unet have their operations.
LARGE = ("resnet50", "deeplabv3", "late_fusion")


def models(ranks: int, everything: bool) -> list[str]:
    """What so many ranks run: of two one model of each kind and every tenth other one, of three every second
    kind.
    """
    names = [known.name for known in CASES]
    if everything:
        return names
    others = [name for name in names if name not in (*KINDS, *LARGE)][::10]
    return [name for name in names if name in ((*KINDS, *others) if ranks == 2 else KINDS[1::2])]


def combinations(name: str, stages: int, everything: bool) -> list[Combination]:
    """The two in which each number of microbatches and each schedule occurs, or all four; of a model of each
    kind zero-bubble or two stages on each rank as well, by turns, and of the first kind both.
    """
    found = [Combination(name, m, stages, how) for m in MICROBATCHES for how in SCHEDULES]
    found = found if everything else [found[0], found[3]]
    if name not in KINDS and not everything:
        return found
    zero_bubble = Combination(name, 4, stages, "zero-bubble")
    interleaving = Combination(name, 4, 2 * stages, "interleaved")
    enough = len(captured(name, 4).graph.units) >= 2 * stages
    if everything or name == KINDS[0]:
        return [*found, zero_bubble, interleaving] if enough else [*found, zero_bubble]
    return [*found, interleaving if enough and KINDS.index(name) % 2 else zero_bubble]


def share_references(name: str, world: World, folder: Path) -> dict[int, TrainingSnapshot]:
    """Each is computed on one rank and read by all."""
    for number, microbatches in enumerate(MICROBATCHES):
        if number % world.world_size == world.rank:
            torch.save(reference(name, microbatches), folder / f"{microbatches}.pt")
    dist.barrier(group=world.group)
    return {m: torch.load(folder / f"{m}.pt", weights_only=False, mmap=True) for m in MICROBATCHES}


def only(tensors: dict[str, Tensor], names: Any) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if n in names}


def real_parameters(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if not p.is_meta}


def plan_of(wanted: Combination, ranks: int) -> Plan:
    """The planner's cuts, or random ones for schedules that it does not choose."""
    if wanted.schedule == "interleaved":
        return interleaved(wanted, ranks)
    return at_random(wanted, seed=0) if wanted.schedule == "zero-bubble" else planned(wanted)


def run(wanted: Combination, expected: TrainingSnapshot, world: World, *, records: bool) -> dict[str, Any]:
    """One combination: how far this rank's tensors are from the reference's, and whose they are; `records`:
    the engine records the model in this process.
    """
    found = case(wanted.model)
    plan = plan_of(wanted, world.world_size)
    engine: Engine = make_engine(
        fresh(wanted.model), plan, world.group, EngineOptions(loss_fn=found.loss, optimizer=adamw, seed=SEED)
    )
    with always_recorded() if records else nullcontext():
        engine.prepare(batch_of(found))
    snapshot = engine_snapshot(engine, batch_of(found), steps=STEPS)
    own = set(snapshot.parameters)
    ours = TrainingSnapshot(
        expected.loss,
        only(expected.grads, own),
        only(expected.buffers, snapshot.buffers),
        only(expected.parameters, own),
    )
    return {
        "combination": wanted.name,
        "differences": str(compare(ours, snapshot)),
        "equal": compare(ours, snapshot).bit_equal,
        "own": sorted(own),
        "kept": sorted(real_parameters(engine.model)),
        "buffers": sorted(snapshot.buffers),
        "all": sorted(expected.parameters),
        "all_buffers": sorted(expected.buffers),
    }


def _records(world: World, name: str, everything: bool) -> bool:
    return world.world_size == 2 and name in (KINDS if everything else KINDS[1::2])


def main(folder: Path, everything: bool) -> None:
    torch.set_num_threads(1)
    world = join()
    findings: dict[str, list[dict[str, Any]]] = {}
    for name in models(world.world_size, everything):
        place = folder / name
        place.mkdir(exist_ok=True)
        expected = share_references(name, world, place)
        wanted = combinations(name, world.world_size, everything)
        records = _records(world, name, everything)
        findings[name] = [
            run(w, expected[w.microbatches], world, records=records and w == wanted[0]) for w in wanted
        ]
        dist.barrier(group=world.group)
        if world.rank == 0:
            shutil.rmtree(place)
    (folder / f"rank{world.rank}.json").write_text(json.dumps(findings))
    leave(world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "all")
