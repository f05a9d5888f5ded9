"""Ranks find each other's faults: in every kind of action, of every schedule, with replicas and without."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from torch import nn
from verified_worker import Chain, Fault, Lasting, Normed, engine_of, plan_of, said_of, step

from outsize.ir.plan import Plan
from outsize.ir.schedule import Kind
from outsize.schedules.families import families, family_of

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("shared_recordings")]

TRAINED = [family.name for family in families() if family.trains and family.row is not None]
USUAL = ("1f1b", "zero-bubble-v")
Said = list[tuple[str, int, bool]]


def kinds_of(schedule: str) -> tuple[Kind, ...]:
    return (Kind.F, Kind.I, Kind.W) if family_of(schedule).splits_backward else (Kind.F, Kind.B)


def faults(plan: Plan, schedule: str, lasting: tuple[Lasting, ...]) -> list[tuple[int, Kind, Lasting]]:
    return [*product(range(plan.axes.world_size), kinds_of(schedule), lasting)]


def found(
    make: Callable[[], nn.Module],
    plan: Plan,
    cases: list[tuple[int, Kind, Lasting]],
    group: dist.ProcessGroup,
) -> Said:
    """What each step with a fault says on this rank, how many products were wrong here, and whether the step
    after it is right again.
    """
    torch.manual_seed(0)
    engine = engine_of(make(), plan, group)
    engine.verify(every=1)
    number, said = 0, Said()
    for _ in range(2):
        step(engine, number)
        number += 1
    for rank, kind, lasting in cases:
        own = Fault(kind, lasting, random.Random(number))
        text = said_of(engine, number, own if rank == group.rank() else None)
        number += 1
        said.append((text, own.flipped, said_of(engine, number, None) == ""))
        number += 1
    return said


def insist_on_names(said: list[Said], cases: list[tuple[int, Kind, Lasting]]) -> None:
    for at, (rank, kind, lasting) in enumerate(cases):
        texts = {text for text, _, _ in (each[at] for each in said)}
        assert len(texts) == 1, (kind, lasting, texts)
        (text,) = texts
        assert said[rank][at][1], "no product was wrong"
        assert text.startswith(f"SilentCorruption [E406]: rank {rank} ("), (rank, kind, lasting, text)
        assert ("has the same wrong bits" in text) is (lasting == "always"), text
        assert all(each[at][2] for each in said), "a step without a fault is found wrong"


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=[pytest.mark.full] * (name not in USUAL)) for name in TRAINED]
)
def test_a_pipeline_finds_each_kind_of_fault(tmp_path: Path, schedule: str) -> None:
    """Three ranks: each checks the one before, a third one decides, with weights that are sent to it."""
    plan = plan_of(Chain(), 3, stages=3, schedule=schedule)
    cases = faults(plan, schedule, ("always", "once"))
    insist_on_names(on_ranks(tmp_path, 3, lambda group: found(Chain, plan, cases, group)), cases)


@pytest.mark.parametrize(
    ("stages", "replicas"), [(1, 3), pytest.param(2, 2, marks=pytest.mark.full)], ids=["three", "two by two"]
)
def test_replicas_find_each_kind_of_fault(tmp_path: Path, stages: int, replicas: int) -> None:
    plan = plan_of(Chain(), stages * replicas, stages=stages, replicas=replicas)
    cases = faults(plan, plan.schedule, ("always", "once"))
    said = on_ranks(tmp_path, stages * replicas, lambda group: found(Chain, plan, cases, group))
    insist_on_names(said, cases)


def test_two_ranks_find_a_moment_and_say_what_they_cannot_tell(tmp_path: Path) -> None:
    plan = plan_of(Chain(), 2, stages=2)
    moments, lasting = faults(plan, "1f1b", ("once",)), faults(plan, "1f1b", ("always",))
    said = on_ranks(tmp_path, 2, lambda group: found(Chain, plan, [*moments, *lasting], group))
    insist_on_names([each[: len(moments)] for each in said], moments)
    for text, _, clean in said[0][len(moments) :]:
        assert text.startswith("SilentCorruption [E406]: rank ")
        assert "there is no third rank that agrees with one of them" in text
        assert clean


def numbers(
    plan: Plan, make: Callable[[], nn.Module], every: int, group: dist.ProcessGroup, *, casts: bool
) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = engine_of(make(), plan, group)
    if every:
        engine.verify(every=every)
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        losses = [step(engine, number) for number in range(6)]
    own = {name: p.detach().clone() for name, p in engine.weights.named_parameters()}
    buffers = {
        name: b.clone()
        for name, b in engine.model.named_buffers()
        if not b.is_meta and type(b) is torch.Tensor
    }
    return {"losses": torch.stack(losses), **own, **buffers}


MODELS: dict[str, Callable[[], nn.Module]] = {"tied": lambda: Chain(tied=True, drop=0.1), "normed": Normed}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("stages", "replicas", "more"),
    [
        (2, 1, {}),
        (1, 2, {}),
        (2, 1, {"recompute": "full"}),
        (2, 1, {"bn": "deferred"}),
        (2, 1, {"casts": True}),
        (1, 2, {"casts": True, "recompute": "full"}),
        pytest.param(2, 2, {}, marks=pytest.mark.full),
    ],
)
def test_verified_steps_have_the_same_bits(
    tmp_path: Path, name: str, stages: int, replicas: int, more: dict[str, Any]
) -> None:
    """No false alarm, and no trace: tied weights, buffers that forwards write, and a second forward."""
    casts = bool(more.get("casts"))
    asked = {key: value for key, value in more.items() if key != "casts"}
    plan = plan_of(MODELS[name](), stages * replicas, stages=stages, replicas=replicas, **asked)

    def work(group: dist.ProcessGroup) -> bool:
        plain, checked = (numbers(plan, MODELS[name], every, group, casts=casts) for every in (0, 1))
        return plain.keys() == checked.keys() and all(torch.equal(plain[key], checked[key]) for key in plain)

    assert all(on_ranks(tmp_path, stages * replicas, work))
