"""Some units of a stage are recomputed: the same bits for any choice of units."""

from __future__ import annotations

import random

import pytest
import torch
from parity_runs import (
    STEPS,
    Combination,
    at_random,
    batch_of,
    captured,
    engine_for,
    interleaved,
    reference,
    split_run,
)
from zoo import case

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import make_cluster, parse_cluster
from outsize.ir.plan import Plan, ScheduleName, Stage
from outsize.ir.units.names import compress_units
from outsize.planner.costs.roofline import roofline
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search
from outsize.train.check.compare import compare, engine_snapshot


def some_again(plan: Plan, name: str, draw: random.Random, share: float = 0.6) -> Plan:
    """In each stage about this share of the units."""
    graph = captured(name, plan.microbatches).graph
    names, bounds, stages = [u.name for u in graph.units], plan.bounds(graph), []
    for number, stage in enumerate(plan.stages):
        units = range(bounds[number], bounds[number + 1])
        chosen = [u for u in units if draw.random() < share] or [units[0]]
        again = {"recompute": "selective", "recomputed": compress_units(names, chosen)}
        stages.append(stage.model_copy(update=again))
    return plan.model_copy(update={"stages": tuple(stages)})


CASES: list[tuple[str, int, ScheduleName]] = [
    *(
        (name, 2, "1f1b")
        for name in ("mlp", "unet", "narrow_resnet18", "gpt2", "t5", "lstm", "bert", "mixtral")
    ),
    *((name, 3, "zero-bubble") for name in ("gpt2", "unet")),
    ("gpt2", 1, "1f1b"),
    ("gpt2", 3, "gpipe"),
]


@pytest.mark.parametrize(("name", "stages", "how"), CASES)
@pytest.mark.sample("mlp-2-1f1b", "unet", "lstm", "gpt2", "mixtral")
def test_any_units_recomputed_change_no_bit(name: str, stages: int, how: ScheduleName) -> None:
    wanted = Combination(name, 3, stages, how)
    plan = some_again(at_random(wanted, seed=1), name, random.Random(f"{wanted.name} units"))
    found = compare(reference(name, 3, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found


@pytest.mark.parametrize("name", ["gpt2", "unet", "mlp"])
def test_block_by_block_changes_no_bit(name: str) -> None:
    plan = some_again(at_random(Combination(name, 3, 2, "1f1b"), seed=1), name, random.Random(1), share=1.0)
    found = compare(reference(name, 3, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found


@pytest.mark.parametrize("name", ["gpt2"])
def test_interleaved(name: str) -> None:
    plan = some_again(interleaved(Combination(name, 3, 4, "interleaved"), 2), name, random.Random(name))
    found = compare(reference(name, 3, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found


def test_what_the_planner_chooses_runs() -> None:
    """Memory between what all of it and what none of it takes."""
    graph, devices = captured("gpt2", 3, True).graph, parse_cluster("2xcpu").devices
    models, ask = (
        {3: (graph, roofline(graph, devices[0]))},
        PlanRequest(exact=True, batch_size=12, microbatches=3, schedule="1f1b"),
    )
    peaks = [
        peak_bytes(search(ask.model_copy(update={"recompute": how}), models, parse_cluster("2xcpu")))
        for how in ("none", "full")
    ]
    plan = search(ask, models, make_cluster("2xcpu", "cpu", 1, 2, round(1.01 * sum(peaks) / 2)))
    assert "selective" in {plan.recompute_of(stage) for stage in range(2)}
    found = compare(reference("gpt2", 3, True), split_run("gpt2", plan, dropout=True))
    assert found.bit_equal, found


def test_block_by_block_where_no_stage_fits_as_a_whole() -> None:
    """Half of what a stage holds that is recomputed at once, beside what is there in any case."""
    graph, devices = captured("gpt2", 3, True).graph, parse_cluster("2xcpu").devices
    models = {3: (graph, roofline(graph, devices[0]))}
    ask = PlanRequest(exact=True, batch_size=12, microbatches=3, schedule="1f1b", optimizer="sgd")
    whole = search(ask.model_copy(update={"recompute": "full"}), models, parse_cluster("2xcpu"))
    cluster = make_cluster("2xcpu", "cpu", 1, 2, round(0.9 * peak_bytes(whole)))
    full = search(ask.model_copy(update={"recompute": "full"}), models, cluster)
    assert all(full.recompute_of(stage) == "selective" for stage in range(2)), "block by block"
    plan = search(ask, models, cluster)
    assert "selective" in {plan.recompute_of(stage) for stage in range(2)}
    assert plan.expected.step_s <= full.expected.step_s
    priced = price(plan, *models[3], cluster)
    assert peak_bytes(priced) == peak_bytes(plan)
    found = compare(reference("gpt2", 3, True), split_run("gpt2", plan, dropout=True))
    assert found.bit_equal, found


def peak_bytes(plan: Plan) -> int:
    assert plan.expected is not None
    return max(stage.peak_bytes for stage in plan.expected.stages)


def test_deferred_statistics_count_each_microbatch_once() -> None:
    plain = at_random(Combination("unet", 3, 2, "1f1b"), seed=1).model_copy(update={"bn": "deferred"})
    plan = some_again(plain, "unet", random.Random(3))
    found = compare(split_run("unet", plain), split_run("unet", plan))
    assert found.bit_equal, found


@pytest.mark.parametrize("name", ["gpt2"])
def test_under_autocast(name: str) -> None:
    plan = some_again(at_random(Combination(name, 3, 2, "1f1b"), seed=1), name, random.Random(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept, again = (  # each records its own tape
            engine_snapshot(engine_for(name, wanted), batch_of(case(name)), steps=STEPS)
            for wanted in (plan.model_copy(update={"stages": _kept(plan)}), plan)
        )
    found = compare(kept, again)
    assert found.bit_equal, found


def _kept(plan: Plan) -> tuple[Stage, ...]:
    return tuple(s.model_copy(update={"recompute": None, "recomputed": ()}) for s in plan.stages)
