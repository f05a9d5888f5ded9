"""BatchNorm's modes: `micro` as gradient accumulation, `deferred` once per batch, `sync` of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity_runs import SEED, STEPS, Combination, batch_of, captured, fresh, planned, split_run
from torch import Tensor, nn
from zoo import case

import outsize
from outsize.errors import BadOption
from outsize.ir.findings import WholeBatchStatistics
from outsize.ir.plan import Plan
from outsize.train.check.compare import PlainLoop, adamw, compare, reference_snapshot
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.usefixtures("shared_recordings")

MODELS = ("unet", "narrow_resnet18", pytest.param("late_fusion", marks=[pytest.mark.full]))


def small(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(copy.deepcopy(layer) for layer in layers))


ODD = {
    "cumulative": small(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.Tanh(), nn.Flatten(), nn.Linear(216, 5)
    ),
    "one dim": small(nn.Flatten(), nn.Linear(192, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5)),
    "not affine": small(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False), nn.Flatten(), nn.Linear(216, 5)),
    "no statistics": small(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.Flatten(), nn.Linear(216, 5)
    ),
    "frozen": small(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6).eval(), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(216, 5)
    ),
    "sync class": small(nn.Conv2d(3, 6, 3), nn.SyncBatchNorm(6), nn.Flatten(), nn.Linear(216, 5)),
}
X = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 5


def deferred(plan: Plan) -> Plan:
    return plan.model_copy(update={"bn": "deferred"})


class Inputs:
    """What each BatchNorm saw, over all microbatches, and where its statistics stood before."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        self.before = copy.deepcopy(model.state_dict())
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                module.register_forward_pre_hook(lambda _, args, name=name: self._note(name, args))

    def _note(self, name: str, args: Any) -> None:
        if type(args[0]) is Tensor:
            self.seen.setdefault(name, []).append(args[0].detach().clone())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample("unet")
def test_deferred_statistics_are_those_of_the_whole_batch_once(name: str) -> None:
    model, known, batch = fresh(name), case(name), batch_of(case(name))
    inputs = Inputs(model)
    plan = deferred(planned(Combination(name, 4, 3, "1f1b")))
    engine = make_engine(model, plan, None, EngineOptions(loss_fn=known.loss, seed=SEED))
    engine.step(*batch.args, target=batch.target, update=False)
    after = model.state_dict()
    assert inputs.seen
    for bn, parts in inputs.seen.items():
        whole = torch.cat(parts[-4:]).double().transpose(0, 1).flatten(1)
        assert int(after[f"{bn}.num_batches_tracked"]) == int(inputs.before[f"{bn}.num_batches_tracked"]) + 1
        for key, new in (("running_mean", whole.mean(1)), ("running_var", whole.var(1))):
            expected = 0.9 * inputs.before[f"{bn}.{key}"].double() + 0.1 * new
            assert torch.allclose(after[f"{bn}.{key}"].double(), expected, rtol=1e-6, atol=1e-7), (bn, key)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample("narrow_resnet18")
def test_deferred_changes_running_statistics_and_nothing_else(name: str) -> None:
    plan = planned(Combination(name, 4, 3, "1f1b"))
    found = compare(split_run(name, plan), split_run(name, deferred(plan)))
    assert (found.loss, found.grads, found.parameters) == (0, 0, 0)
    assert found.buffers > 0


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.sample("2", "4")
def test_deferred_does_not_depend_on_the_layout(stages: int) -> None:
    tape, known = captured("unet", 4).tape, case("unet")
    loop = PlainLoop(4, known.loss, steps=STEPS, seed=SEED, bn="deferred")
    expected = reference_snapshot(fresh("unet"), tape, batch_of(known), loop)
    plan = deferred(planned(Combination("unet", 4, stages, "1f1b")))
    assert compare(expected, split_run("unet", plan)).bit_equal
    again = plan.model_copy(update={"recompute": "full"})
    assert compare(expected, split_run("unet", again)).bit_equal, "counted twice"


@pytest.mark.parametrize("kind", list(ODD))
@pytest.mark.parametrize("bn", ["micro", "deferred", "sync"])
def test_every_kind_of_batchnorm_in_every_mode(kind: str, bn: Any) -> None:
    torch.manual_seed(0)
    model = ODD[kind]()
    verdict = outsize.check(
        model, (X,), stages=3, bn=bn, loss_fn=F.cross_entropy, target=Y, steps=2, recompute="full"
    )
    assert verdict.bit_equal, verdict


@pytest.mark.parametrize("name", ["unet", "narrow_resnet18"])
@pytest.mark.sample("unet")
def test_sync_gives_the_numbers_of_one_whole_batch(name: str) -> None:
    known, (args, kwargs) = case(name), case(name).batch(12)
    plan = outsize.plan(
        fresh(name),
        args,
        kwargs,
        cluster="3xcpu",
        exact=True,
        loss_fn=known.loss,
        target=known.target(12),
        request=outsize.Request(bn="sync"),
    )
    assert plan.microbatches == 1
    assert WholeBatchStatistics() in plan.why
    plain, optimizer = fresh(name), None
    optimizer = adamw(plain.parameters())
    engine = make_engine(
        fresh(name), plan, None, EngineOptions(loss_fn=known.loss, optimizer=adamw, seed=SEED)
    )
    for _ in range(2):
        loss = known.loss_of(plain(*args), known.target(12))
        loss.backward()
        assert torch.equal(engine.step(*args, target=known.target(12)).loss, loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(t, engine.model.state_dict()[n]) for n, t in plain.state_dict().items())


def test_sync_beside_microbatches_is_refused() -> None:
    with pytest.raises(
        BadOption, match=r"bn='sync' .* 4 microbatches split the batch\. Next: microbatches=1"
    ):
        outsize.plan(
            ODD["frozen"](), (X,), cluster="2xcpu", microbatches=4, request=outsize.Request(bn="sync")
        )


def test_check_says_how_far_microbatches_are_from_the_whole_batch() -> None:
    args, kwargs = case("unet").batch(12)
    options: Any = {"loss_fn": case("unet").loss, "target": case("unet").target(12), "stages": 2}
    verdict = outsize.check(fresh("unet"), args, kwargs, **options)
    note = next(n for n in verdict.notes if "BatchNorm" in n)
    assert "4 microbatches by itself (bn=micro)" in note
    assert "the loss differs by 0," not in note
    assert not any(
        "BatchNorm" in n for n in outsize.check(fresh("unet"), args, kwargs, bn="sync", **options).notes
    )
    assert not any(
        "BatchNorm" in n for n in outsize.check(fresh("unet").eval(), args, kwargs, **options).notes
    )
