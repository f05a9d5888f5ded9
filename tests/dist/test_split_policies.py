"""Loops with a split model whose plan recomputes, stores on the host, defers statistics, or is compiled.

Bits are those of the plain model, in one process and over two. Statistics of the whole batch are merged from
those of microbatches, in another order than PyTorch's: these alone are compared within rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import pytest
import torch

import outsize
from outsize.errors import UnsupportedPlan
from outsize.ir.plan import Plan
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave
from split.bench import MICROBATCHES, Bench, PlainBench, SplitBench, differences, noted
from split.cases import Case, case
from split.loops import Loop, loop

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("shared_recordings")]

ROUNDING = 1e-6


@final
@dataclass(frozen=True)
class Policy:
    """What is asked of a plan or of stages, and models that show whether it holds; `alone` are those that run
    in one process only.
    """

    name: str
    models: tuple[str, ...]
    request: outsize.Request = field(default_factory=outsize.Request)
    options: dict[str, Any] = field(default_factory=dict)
    alone: tuple[str, ...] = ()

    def plan(self, model: Case) -> Plan | outsize.Request:
        """Returns what `outsize.split` is given: a plan where small models would recompute nothing."""
        if self.request.recompute != "selective":
            return self.request
        example, request = (
            model.example(0),
            replace(self.request, recompute=None, schedule="gpipe", axes="pp"),
        )
        wishes: dict[str, Any] = {"stages": 2, "microbatches": MICROBATCHES}
        plan = outsize.plan(model.net(), example.args, example.kwargs, request=replace(request, **wishes))
        stages = [
            stage.model_copy(update={"recompute": "selective", "recomputed": stage.units[1:]})
            for stage in plan.stages
        ]
        return plan.model_copy(update={"stages": tuple(stages)})

    def holds(self, plan: Plan) -> bool:
        """Whether the plan has what was asked for."""
        policies = {policy.name for policy in plan.activation_policies}
        return self.request.recompute in (None, *policies) and self.request.bn in (None, plan.bn)


POLICIES = (
    Policy("selective", ("transformer", "twice"), outsize.Request(recompute="selective")),
    Policy("full", ("transformer", "twice"), outsize.Request(recompute="full")),
    Policy("offload", ("transformer", "twice"), outsize.Request(recompute="offload")),
    Policy("deferred", ("resnet",), outsize.Request(bn="deferred")),
    Policy("deferred and full", ("resnet",), outsize.Request(bn="deferred", recompute="full")),
    # Over ranks stages that share a weight are refused, since Dynamo fails on what is received for it.
    Policy("compiled", ("transformer", "mlp"), options={"compiled": "eager"}, alone=("twice",)),
)
LOOPS = (
    "plain",
    "two views",
    "calls that wait",
    "accumulation",
    "without gradients",
    "evaluation",
    "ragged",
    "exception in the loss",
)
# These of `make test`; of two ranks those that wait in a plan of their own for what the other has.
SAMPLE = frozenset(
    {
        "1-selective-two_views-transformer",
        "1-full-calls_that_wait-twice",
        "1-offload-two_views-transformer",
        "1-deferred-without_gradients-resnet",
        "1-deferred_and_full-plain-resnet",
        "1-compiled-two_views-twice",
        "2-offload-plain-twice",
        "2-deferred_and_full-calls_that_wait-resnet",
    }
)


def rows() -> list[Any]:
    """All cells, in one process and over two."""
    found = list[Any]()
    for ranks in (1, 2):
        for policy in POLICIES:
            for each in map(loop, LOOPS):
                for model in map(case, policy.models + policy.alone * (ranks == 1)):
                    name = f"{ranks}-{policy.name}-{each.name}-{model.name}".replace(" ", "_")
                    marks = [] if name in SAMPLE else [pytest.mark.full]
                    found.append(pytest.param(ranks, policy, each, model, id=name, marks=marks))
    assert {row.id for row in found} >= SAMPLE
    return found


def run_on(policy: Policy, each: Loop, model: Case) -> SplitBench:
    """What this process has noted."""
    bench = SplitBench(model, wishes={"plan": policy.plan(model), **policy.options})
    noted(each.run, bench)
    assert bench.plan is not None
    assert policy.holds(bench.plan)
    return bench


def on_ranks(folder: Path, policy: Policy, each: Loop, model: Case) -> list[Bench]:
    """What each of two ranks has noted."""

    def work() -> None:
        world = join()
        torch.set_num_threads(1)
        torch.save(run_on(policy, each, model).notes, folder / f"{world.rank}.pt")
        leave(world)

    run_in_forks(2, work)
    return [SplitBench(model, notes=torch.load(folder / f"{rank}.pt")) for rank in range(2)]


@pytest.mark.parametrize(("ranks", "policy", "each", "model"), rows())
def test_bits_are_those_of_the_plain_model(
    tmp_path: Path, ranks: int, policy: Policy, each: Loop, model: Case
) -> None:
    is_deferred = policy.request.bn == "deferred"
    expected = noted(each.run, PlainBench(model, deferred=is_deferred))
    found: list[Bench] = (
        [run_on(policy, each, model)] if ranks == 1 else on_ranks(tmp_path, policy, each, model)
    )
    differing = differences(expected, found)
    if is_deferred:
        assert differences(expected, found, ROUNDING) == []
        # Outputs in eval mode follow from the statistics.
        differing = [line for line in differing if "buffer" not in line and "evaluat" not in line]
    assert differing == []


def test_compiled_stages_of_two_ranks_that_share_a_weight_are_refused(tmp_path: Path) -> None:
    policy = next(policy for policy in POLICIES if policy.name == "compiled")
    with pytest.raises(UnsupportedPlan, match="share a weight within one process"):
        on_ranks(tmp_path, policy, loop("plain"), case("twice"))
