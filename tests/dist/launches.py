"""Scripts of this folder as ranks: under outsize's own launcher, or as forks of this process."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "unit"))

import torch
from forked import in_forks
from patience import PATIENCE_S, WHOLE_S, free_port
from recorded_once import recorded_once
from torch import nn

from outsize.capture.recording.fallbacks import LossFn, record
from outsize.ir.plan import Plan
from outsize.train.batch.batch import Batch, evaluating_loss
from outsize.train.batch.batch_dims import BatchDims, rejection
from outsize.train.variants.results import evaluating

HERE = Path(__file__).parent
DRIVER = "import sys; from outsize.ops.launch.launch import run_script; "
DRIVER += "sys.exit(run_script(sys.argv[2:], int(sys.argv[1])))"

Done = subprocess.CompletedProcess[str]
_PLANS: dict[str, Plan] = {}


def run(command: list[str]) -> Done:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=env, check=False)


def launched(script: str, ranks: int, *arguments: str) -> Done:
    """`script` of this folder under outsize's launcher."""
    return run([sys.executable, "-c", DRIVER, str(ranks), str(HERE / script), *arguments])


def said_by(script: str, ranks: int, folder: Path, *arguments: str, patience_s: float = WHOLE_S) -> list[Any]:
    """What each rank of `script FOLDER ...` has left in FOLDER/rank<r>.json.

    The ranks are forks, which have torch and the models already: interpreters of their own, under launchers,
    take 6 s each until they have, and are test_launch_processes.py's to show. What this process has recorded
    they do not record again.
    """
    import_module("zoo")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> None:
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update(place | {name: str(value) for name, value in numbers.items()})
        sys.argv = [script, str(folder), *arguments]
        with recorded_once():
            runpy.run_path(str(HERE / script), run_name="__main__")

    in_forks(folder, ranks, rank, patience_s)
    return left_by(ranks, folder)


def record_ahead(names: Iterable[str], microbatches: Iterable[int]) -> None:
    """Captures models of the zoo, and finds their batch dims, once for all ranks started after it."""
    from parity_runs import batch_of, captured, fresh
    from zoo import case

    with recorded_once():
        for name, count in product(names, microbatches):
            captured(name, count)
            BatchDims(rejection(fresh(name), case(name).loss)).of(batch_of(case(name)))


def planned_once(name: str, model: nn.Module, make: Callable[[], Plan]) -> Plan:
    """The plan of this name for a model of so many parameters, which processes have that are forked after it
    was made.
    """
    name = f"{name} {type(model).__name__} {sum(p.numel() for p in model.parameters())}"
    if name not in _PLANS:
        _PLANS[name] = make()
    return _PLANS[name]


def record_run(model: nn.Module, parts: Sequence[Batch], loss_fn: LossFn | None) -> None:
    """Records what ranks started after it run of these microbatches, in a step and in an evaluation; within
    `recorded_once()`.
    """
    for part in parts:
        record(model, part.args, part.kwargs, loss_fn, part.target)
    record_evaluation(model, parts, loss_fn)


def record_evaluation(model: nn.Module, parts: Iterable[Batch], loss_fn: LossFn | None) -> None:
    """The same for an evaluation alone."""
    with torch.no_grad(), evaluating(model):
        for part in parts:
            record(model, part.args, part.kwargs, evaluating_loss(loss_fn, part), part.target)


def left_by(ranks: int, folder: Path) -> list[Any]:
    """FOLDER/rank<r>.json of each rank."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
