"""What the parity tests share: captures and references computed once, plans of every kind, split runs."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, final
from unittest.mock import patch

import torch
from torch import nn
from zoo import Case, case

from outsize.capture.graph.build import Captured, build_graph
from outsize.capture.measure.local_cluster import find_cluster
from outsize.capture.recording.fallbacks import record
from outsize.ir.answers.request import PlanRequest
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.planner.costs.roofline import roofline
from outsize.planner.search.search import search
from outsize.program.tape import Tape
from outsize.train.batch.batch import Batch, as_target
from outsize.train.check.compare import (
    PlainLoop,
    TrainingSnapshot,
    adamw,
    engine_snapshot,
    reference_snapshot,
)
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine
from outsize.train.engine.pipelined import Pipelined
from outsize.train.variants import variant
from outsize.train.variants.variant import Variants

BATCH_SIZE = 12
STEPS = 2  # AdamW's second step is the first that has moments, and that runs what the first has prepared.
SEED = 5


@final
@dataclass(frozen=True, order=True)
class Combination:
    """One cell of the parity product."""

    model: str
    microbatches: int
    stages: int
    schedule: ScheduleName

    @property
    def name(self) -> str:
        """`gpt2-m4-s3-1f1b`."""
        return f"{self.model}-m{self.microbatches}-s{self.stages}-{self.schedule}"


def batch_of(found: Case, size: int = BATCH_SIZE) -> Batch:
    """The case's batch with its target."""
    args, kwargs = found.batch(size)
    return Batch(args, kwargs, as_target(found.target(size)))


@lru_cache(maxsize=2)
def _built(name: str, dropout: bool) -> nn.Module:
    return case(name).build(dropout=dropout)


def fresh(name: str, dropout: bool = False) -> nn.Module:
    """The case's model with its first weights; a copy, which for large models is faster than an init."""
    return copy.deepcopy(_built(name, dropout))


def captured(name: str, microbatches: int, dropout: bool = False) -> Captured:
    """The model at the size of one microbatch, under the precision of the moment."""
    return _captured(name, microbatches, dropout, precision())


Precision = tuple[torch.dtype, torch.dtype | None]


def precision() -> Precision:
    """The global state that decides in which dtypes a model computes: what `torch.float32` is, which a test
    may have replaced (`all_in` of tests/dist/tensor_worker.py), and autocast's dtype if it is on.
    """
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return torch.float32, autocast


@cache
def _captured(name: str, microbatches: int, dropout: bool, _: Precision) -> Captured:
    found, part = case(name), batch_of(case(name)).split(microbatches)[0]
    model = _built(name, dropout)
    return build_graph(record(model, part.args, part.kwargs, found.loss, part.target), model)


def reference(name: str, microbatches: int, dropout: bool = False) -> TrainingSnapshot:
    """The plain loop; all combinations of one model and number of microbatches share it."""
    return _reference(name, microbatches, dropout, precision())


@lru_cache(maxsize=1)
def _reference(name: str, microbatches: int, dropout: bool, _: Precision) -> TrainingSnapshot:
    tape = captured(name, microbatches, dropout).tape
    found, model = case(name), fresh(name, dropout)
    loop = PlainLoop(microbatches, found.loss, steps=STEPS, seed=SEED)
    return reference_snapshot(model, tape, batch_of(found), loop)


def planned(wanted: Combination, dropout: bool = False) -> Plan:
    """The planner's own cuts."""
    graph = captured(wanted.model, wanted.microbatches, dropout).graph
    cluster = find_cluster(f"{wanted.stages}xcpu")
    request = PlanRequest(
        batch_size=BATCH_SIZE,
        microbatches=wanted.microbatches,
        stages=wanted.stages,
        schedule=wanted.schedule,
    )
    return search(request, {wanted.microbatches: (graph, roofline(graph, cluster.devices[0]))}, cluster)


def random_bounds(units: int, stages: int, draw: random.Random) -> tuple[int, ...]:
    """Any cuts between units; each one is legal, since a graph's units are."""
    return (0, *sorted(draw.sample(range(1, units), stages - 1)), units)


def at_random(wanted: Combination, seed: int) -> Plan:
    """Cuts that no planner would choose."""
    graph = captured(wanted.model, wanted.microbatches).graph
    bounds = random_bounds(len(graph.units), wanted.stages, random.Random(f"{wanted.name} {seed}"))
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{wanted.stages}xcpu",
        axes=Axes(pp=wanted.stages),
        batch_size=BATCH_SIZE,
        microbatches=wanted.microbatches,
        schedule=wanted.schedule,
        stages=stages_from_bounds(graph, bounds, tuple(f"cpu:{s}" for s in range(wanted.stages))),
    )


def interleaved(wanted: Combination, ranks: int) -> Plan:
    """Random cuts, stage s on rank s mod `ranks`."""
    plan = at_random(wanted, seed=0)
    stages = (stage.model_copy(update={"device": f"cpu:{s % ranks}"}) for s, stage in enumerate(plan.stages))
    return plan.model_copy(
        update={"stages": tuple(stages), "axes": Axes(pp=ranks), "cluster": f"{ranks}xcpu"}
    )


def engine_for(name: str, plan: Plan, dropout: bool = False) -> Engine:
    """All stages in this process, on new weights."""
    found = case(name)
    return make_engine(
        fresh(name, dropout), plan, None, EngineOptions(loss_fn=found.loss, optimizer=adamw, seed=SEED)
    )


@contextmanager
def recorded(tape: Tape) -> Iterator[None]:
    """The first program that is looked for is this one, which a capture of an equal model has recorded."""
    first = iter((tape,))

    def instead(*args: Any, **kwargs: Any) -> Tape:
        return next(first, None) or record(*args, **kwargs)

    with patch.object(variant, "record", instead):
        yield


def split_run(name: str, plan: Plan, dropout: bool = False) -> TrainingSnapshot:
    """What the engine leaves behind after the steps; that engines record themselves is the zoo's to show."""
    engine, batch = engine_for(name, plan, dropout), batch_of(case(name))
    with recorded(captured(name, plan.microbatches, dropout).tape):
        engine.prepare(batch)
    return engine_snapshot(engine, batch, steps=STEPS)


def variants_of(engine: Engine) -> Variants:
    """The programs that a pipelined engine keeps."""
    way = engine._executor  # pyright: ignore[reportPrivateUsage]
    assert isinstance(way, Pipelined)
    return way.variants
