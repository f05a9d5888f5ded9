"""Ranks find each other's faults: in every kind of action, of every schedule, with replicas and without."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from torch import nn
from verified_worker import (
    BLOCKS,
    METHODS,
    SIZE,
    Chain,
    Fault,
    Lasting,
    Normed,
    Woven,
    batch,
    engine_of,
    loss_fn,
    plan_of,
    said_of,
    step,
)

import outsize
from outsize.errors import BadOption, UnsupportedPlan
from outsize.ir.plan import Plan
from outsize.ir.schedule import Kind
from outsize.run.verified.shown_work import ShownStage
from outsize.schedules.builders import build
from outsize.schedules.families import families, family_of
from outsize.train.verify.verification import NotVerified

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("shared_recordings")]

TRAINED = [family.name for family in families() if family.trains and family.row is not None]
USUAL = ("1f1b", "zero-bubble-v")
Said = list[tuple[str, int, bool]]


def kinds_of(schedule: str) -> tuple[Kind, ...]:
    """The kinds of a row: some run backwards of a part of the microbatches whole."""
    ranks = 3
    stages = ranks * (2 if family_of(schedule).interleaves else 1)
    there = {action.kind for row in build(schedule, stages, 4, ranks).actions for action in row}
    return tuple(kind for kind in METHODS if kind in there)


def faults(plan: Plan, schedule: str, lasting: tuple[Lasting, ...]) -> list[tuple[int, Kind, Lasting]]:
    """In any order, since stages and microbatches take turns in being shown."""
    kinds = kinds_of(schedule)
    # Where some backwards are whole and others split, more turns are needed until each kind has been shown.
    cases = [*product(range(plan.axes.world_size), kinds, lasting)] * (2 if len(kinds) == len(METHODS) else 1)
    random.Random(2).shuffle(cases)
    return cases


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
    for _ in range(BLOCKS):  # A rank tries whether it repeats a unit when it shows that one first.
        step(engine, number)
        number += 1
    for at, (rank, kind, lasting) in enumerate(cases):
        own = Fault(kind, lasting, random.Random(number))
        text = said_of(engine, number, own if rank == group.rank() else None)
        # Two or three steps for each case, so that all stages of a rank are shown in wrong ones.
        clean = [said_of(engine, number + 1 + more, None) for more in range(1 + at % 2)]
        number += 1 + len(clean)
        said.append((text, own.flipped, clean == [""] * len(clean)))
    return said


def insist_on_names(
    said: list[Said], cases: list[tuple[int, Kind, Lasting]], *, in_units: bool = True
) -> None:
    """Each fault in work that was shown is found and named; the others are no alarms."""
    kinds = set[Kind]()
    for at, (rank, kind, lasting) in enumerate(cases):
        texts = {text for text, _, _ in (each[at] for each in said)}
        assert len(texts) == 1, (kind, lasting, texts)
        (text,) = texts
        assert all(each[at][2] for each in said), "a step without a fault is found wrong"
        if not said[rank][at][1] and not text:
            continue  # What was shown has no action of this kind, and so has what the rank has repeated.
        kinds.add(kind)
        assert text.startswith(f"SilentCorruption [E406]: rank {rank} ("), (rank, kind, lasting, text)
        assert (", unit layers." in text) is in_units, text
        assert ("has the same wrong bits" in text) is (lasting == "always"), text
    assert kinds == {kind for _, kind, _ in cases}


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
    insist_on_names(said, cases, in_units=False)


def test_two_ranks_find_a_moment_and_say_what_they_cannot_tell(tmp_path: Path) -> None:
    plan = plan_of(Chain(), 2, stages=2)
    moments, lasting = faults(plan, "1f1b", ("once",)), faults(plan, "1f1b", ("always",))
    said = on_ranks(tmp_path, 2, lambda group: found(Chain, plan, [*moments, *lasting], group))
    insist_on_names([each[: len(moments)] for each in said], moments)
    for text, _, clean in said[0][len(moments) :]:
        assert text.startswith("SilentCorruption [E406]: rank ")
        assert ", unit layers." in text
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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: Chain(tied=True, drop=0.1),
    "normed": Normed,
    "woven": Woven,
}


LAYOUTS: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {}),
    (1, 2, {}),
    (2, 2, {}),
    (2, 1, {"recompute": "full"}),
    (2, 1, {"bn": "deferred"}),
    (2, 1, {"casts": True}),
    (1, 2, {"casts": True, "recompute": "full"}),
    (2, 1, {"casts": True, "recompute": "selective"}),
    (3, 1, {"schedule": "zero-bubble-v"}),
]
COMMON = {("tied", 0), ("tied", 1), ("tied", 5), ("normed", 3), ("normed", 4), ("woven", 5), ("woven", 8)}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*pair, marks=[pytest.mark.full] * (pair not in COMMON))
        for pair in product(MODELS, range(len(LAYOUTS)))
    ],
)
def test_verified_steps_have_the_same_bits(tmp_path: Path, name: str, layout: int) -> None:
    """No false alarm, and no trace: tied weights, buffers that forwards write, and a second forward."""
    stages, replicas, more = LAYOUTS[layout]
    casts = bool(more.get("casts"))
    asked = {key: value for key, value in more.items() if key != "casts"}
    plan = plan_of(MODELS[name](), stages * replicas, stages=stages, replicas=replicas, **asked)

    def work(group: dist.ProcessGroup) -> bool:
        plain, checked = (numbers(plan, MODELS[name], every, group, casts=casts) for every in (0, 1))
        return plain.keys() == checked.keys() and all(torch.equal(plain[key], checked[key]) for key in plain)

    assert all(on_ranks(tmp_path, stages * replicas, work))


class _Unsteady(torch.autograd.Function):
    """A gradient that is another one each time, as sums of atomics are on a GPU."""

    drawn = random.Random(0)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * (1 + _Unsteady.drawn.random() * 1e-6)


class Unsteady(Chain):
    """Its backward does not repeat its bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_Unsteady.apply(self.layers[0](x)))


@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (2, 1)])
def test_kernels_that_do_not_repeat_their_bits_keep_it_off(
    tmp_path: Path, stages: int, replicas: int
) -> None:
    plan = plan_of(Unsteady(), 2, stages=stages, replicas=replicas)

    def work(group: dist.ProcessGroup) -> list[str]:
        engine = engine_of(Unsteady(), plan, group)
        engine.verify(every=1)
        x, y = batch(0, plan.batch_size)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", NotVerified)
            for _ in range(3):
                engine.step(x, target=y)
        return [str(each.message) for each in said if each.category is NotVerified]

    first, second = on_ranks(tmp_path, 2, work)
    assert second == []
    (text,) = first
    place = "stage 0, unit layers.0#0" if stages > 1 else "stage 0"
    assert text.startswith(f"the work of ranks is not verified: {place} does not repeat its own bits, of ")
    assert "engine.verify() again" in text


def test_plans_whose_ranks_cannot_repeat_are_refused(tmp_path: Path) -> None:
    def pair() -> nn.Module:
        return nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.Tanh(), nn.Linear(2 * SIZE, SIZE))

    plans = {
        "its ranks exchange values while a stage computes": plan_of(pair(), 2, stages=1, tp=2),
        "its weights are sharded over replicas": plan_of(pair(), 2, stages=1, dp_shard=2),
    }

    def work(group: dist.ProcessGroup) -> dict[str, str]:
        said = {}
        for reason, plan in plans.items():
            engine = engine_of(pair(), plan, group)
            with pytest.raises(UnsupportedPlan, match="cannot repeat the work of each other") as raised:
                engine.verify()
            said[reason] = str(raised.value)
            with pytest.raises(BadOption, match="every=-1 makes no sense"):
                engine.verify(every=-1)
            engine.verify(every=0)
        return said

    for said in on_ranks(tmp_path, 2, work):
        assert all(reason in text for reason, text in said.items())


def test_one_process_has_nobody_to_ask() -> None:
    engine = engine_of(Chain(), plan_of(Chain(), 2, stages=2), None)
    with pytest.raises(UnsupportedPlan, match="all of its ranks are in one process"):
        engine.verify()


def test_steps_between_run_their_usual_rows(tmp_path: Path) -> None:
    """All units are shown in the first steps, and then one in each third step."""
    plan = plan_of(Chain(), 2, stages=2)

    def work(group: dist.ProcessGroup) -> list[bool]:
        engine = engine_of(Chain(), plan, group)
        engine.verify(every=3)
        seen = []
        for number in range(BLOCKS + 5):
            step(engine, number)
            seen.append(any("VERIFY" in span.action for span in engine.timeline().spans))
        return seen

    first, second = on_ranks(tmp_path, 2, work)
    assert first == second
    units = first.index(False)
    assert BLOCKS // 2 <= units < BLOCKS
    assert first[units - 1 :] == [at % 3 == 0 for at in range(BLOCKS + 6 - units)]


def test_all_units_are_shown_in_as_many_steps(tmp_path: Path) -> None:
    """Each rank shows each of its layers in one step, and all of them before one of them again."""
    plan = plan_of(Chain(), 2, stages=2)

    def work(group: dist.ProcessGroup) -> tuple[list[list[str]], list[str]]:
        engine = engine_of(Chain(), plan, group)
        engine.verify(every=1)
        shown, right = list[list[str]](), ShownStage.forward

        def forward(stage: ShownStage, *args: Any) -> Any:
            shown.append(sorted(stage.program.weights))
            return right(stage, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShownStage, "forward", forward)
            for number in range(BLOCKS):
                step(engine, number)
        return shown, sorted(name for name, _ in engine.weights.named_parameters())

    for shown, own in on_ranks(tmp_path, 2, work):
        layers = len(own) // 2
        assert sorted(name for names in shown[:layers] for name in names) == own
        assert all(names == shown[at % layers] for at, names in enumerate(shown))


@pytest.mark.parametrize("asked", ["record", "launcher", "neither"])
def test_a_run_asks_for_it_without_an_engine(
    tmp_path: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the record that trainers pass on, or by the launcher's variable, which the record overrides."""
    model = Chain()
    plan = plan_of(model, 2, stages=2)
    if asked != "record":
        monkeypatch.setenv("OUTSIZE_VERIFY", "1")
    watch = outsize.Watch(hang_timeout=0, verify={"record": 1, "launcher": None, "neither": 0}[asked])

    def work(_: dist.ProcessGroup) -> bool:
        x, y = batch(0, plan.batch_size)
        engine = outsize.parallelize(
            Chain(), (x,), plan=plan, loss_fn=loss_fn, target=y, callbacks=[watch],
            optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        )  # fmt: skip
        step(engine, 0)
        return any("VERIFY" in span.action for span in engine.timeline().spans)

    assert on_ranks(tmp_path, 2, work) == [asked != "neither"] * 2


def test_calls_of_a_split_model_say_that_they_are_not_verified(tmp_path: Path) -> None:
    def work(_: dist.ProcessGroup) -> list[str]:
        x, _y = batch(0, 8)
        model = outsize.split(
            Chain(), (x,), stages=2, microbatches=4, callbacks=[outsize.Watch(hang_timeout=0, verify=1)]
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", NotVerified)
            for _again in range(2):
                model(x).sum().backward()
        return [str(each.message) for each in said if each.category is NotVerified]

    first, second = on_ranks(tmp_path, 2, work)
    assert second == []
    (text,) = first
    assert text.startswith("the work of ranks is not verified: the loop calls the model")


def test_a_second_verification_takes_the_place_of_the_first(tmp_path: Path) -> None:
    plan = plan_of(Chain(), 2, stages=2)

    def work(group: dist.ProcessGroup) -> list[str]:
        engine = engine_of(Chain(), plan, group)
        said = []
        for begin in (0, 20):
            engine.verify(every=1)
            for number in range(begin, begin + BLOCKS):
                step(engine, number)
            fault = Fault(Kind.F, "once", random.Random(7))
            said.append(said_of(engine, begin + BLOCKS, fault if group.rank() == 1 else None))
        return said

    for said in on_ranks(tmp_path, 2, work):
        assert all(text.startswith("SilentCorruption [E406]: rank 1 (") for text in said), said
