"""Recompute in the backward: the same bits, buffers counted once, and the activations really gone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from parity_runs import SEED, Combination, batch_of, fresh, planned, reference, split_run
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from zoo import case

import outsize
from outsize.ir.findings import AllRecomputed
from outsize.ir.plan import Plan, ScheduleName
from outsize.train.check.compare import adamw, compare
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.usefixtures("shared_recordings")

MODELS = ("mlp", "unet", "narrow_resnet18", "gpt2", "t5", "bert", "swin", "mixtral", "mamba", "lstm")
RARE = ("bert", "swin", "mamba")  # With --all alone.


def again(plan: Plan) -> Plan:
    return plan.model_copy(update={"recompute": "full"})


def only(plan: Plan, stage: int) -> Plan:
    """Only this stage recomputes."""
    stages = tuple(
        s.model_copy(update={"recompute": "full" if n == stage else None}) for n, s in enumerate(plan.stages)
    )
    return plan.model_copy(update={"stages": stages})


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(pytest.param(name, "1f1b", marks=[pytest.mark.full] if name in RARE else []) for name in MODELS),
        *((name, "gpipe") for name in ("unet", "gpt2", "lstm")),
    ],
)
@pytest.mark.sample("mlp", "unet", "gpt2", "lstm", "mixtral")
def test_recompute_changes_no_bit(name: str, how: ScheduleName) -> None:
    plan = again(planned(Combination(name, 3, 3, how), dropout=True))
    found = compare(reference(name, 3, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found


@pytest.mark.parametrize("how", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", ["unet", "gpt2", "lstm"])
def test_one_stage_recomputes(name: str, how: ScheduleName) -> None:
    plan = only(planned(Combination(name, 3, 3, how), dropout=True), 1)
    found = compare(reference(name, 3, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found


class Alive:
    """How many of the activations that leaves made are alive."""

    def __init__(self, model: nn.Module) -> None:
        self._made: list[StorageWeakRef] = []
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            self._made.append(StorageWeakRef(out.untyped_storage()))

    def count(self) -> int:
        gc.collect()
        return sum(not storage.expired() for storage in self._made)


def test_activations_are_not_kept() -> None:
    """Under GPipe all forwards are done when the gradient of the last weight asks how much is alive."""
    counted = {}
    kept = planned(Combination("mlp", 6, 2, "gpipe"))
    gc.collect()
    gc.freeze()  # a count collects the objects of this test instead of the whole process's
    for recompute, plan in (("none", kept), ("full", again(kept)), ("first", only(kept, 0))):
        model = fresh("mlp")
        alive, seen = Alive(model), []
        last = list(model.parameters())[-1]
        last.register_hook(lambda _, alive=alive, seen=seen: seen.append(alive.count()))
        engine = make_engine(
            model, plan, None, EngineOptions(loss_fn=case("mlp").loss, optimizer=adamw, seed=SEED)
        )
        batch = batch_of(case("mlp"))
        engine.step(*batch.args, target=batch.target)
        counted[recompute] = seen[0]
    gc.unfreeze()
    assert counted["none"] > 6 * 6
    assert counted["full"] < counted["none"] / 2
    assert counted["full"] < counted["first"] < counted["none"]


def test_the_planner_knows_what_recompute_saves_and_costs() -> None:
    args, kwargs = case("gpt2").batch(12)
    options: Any = {"cluster": "2xcpu", "microbatches": 6, "schedule": "gpipe"}
    kept = outsize.plan(fresh("gpt2"), args, kwargs, **options)
    anew = outsize.plan(fresh("gpt2"), args, kwargs, recompute="full", **options)
    assert kept.expected is not None
    assert anew.expected is not None
    assert anew.expected.step_s > 1.1 * kept.expected.step_s
    saved = [s.activations_bytes for s in kept.expected.stages]
    assert max(s.activations_bytes for s in anew.expected.stages) < max(saved) / 2
    assert AllRecomputed() in anew.why
    assert (kept.recompute, anew.recompute) == ("none", "full")
