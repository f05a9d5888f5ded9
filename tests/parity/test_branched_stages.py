"""Stages that are no runs of the model's order: bit-equal to the plain loop, or refused with the reason."""

from __future__ import annotations

import random

import pytest
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
from parity_runs import recorded

from outsize.errors import BadPlan
from outsize.ir.plan import Plan, ScheduleName
from outsize.train.batch.batch import Batch
from outsize.train.check.compare import PlainLoop, adamw, compare, engine_snapshot, reference_snapshot
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine


def insist_on_same_bits(name: str, plan: Plan) -> None:
    engine = make_engine(built(name), plan, None, EngineOptions(loss_fn=LOSS, optimizer=adamw, seed=SEED))
    with recorded(captured(name, plan.microbatches).tape):
        engine.prepare(batch_of(name))
    found = engine_snapshot(engine, batch_of(name), steps=STEPS)
    differences = compare(reference(name, plan.microbatches), found)
    assert differences.bit_equal, (differences, [stage.units for stage in plan.stages])


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.sample(
    "fusion-1f1b", "fusion-zero-bubble", "siamese-naive", "vision-text-1f1b", "inception-gpipe"
)
def test_branches_as_stages(name: str, schedule: ScheduleName) -> None:
    graph = captured(name, 4).graph
    owners = by_name(graph, SPLITS[name])
    assert name in ("fusion", "siamese") or owners != sorted(owners)
    insist_on_same_bits(name, plan_of(graph, owners, BATCH_SIZE, 4, schedule))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["siamese", "vision-text", "inception", "unet"])
@pytest.mark.sample(every=2)
def test_splits_at_random(name: str, seed: int) -> None:
    graph, draw = captured(name, 2).graph, random.Random(f"{name} {seed}")
    owners = at_random(graph, draw.choice((2, 3, 5)), draw)
    insist_on_same_bits(name, plan_of(graph, owners, BATCH_SIZE, 2, draw.choice(("1f1b", "gpipe"))))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["siamese", "vision-text", "inception", "unet"])
@pytest.mark.sample(every=2, first=1)
def test_composed_schedules_of_random_splits_on_random_ranks(name: str, seed: int) -> None:
    graph, draw = captured(name, 4).graph, random.Random(f"auto {name} {seed}")
    owners = next(o for _ in range(99) if max(o := at_random(graph, draw.choice((3, 5, 7)), draw)) > 1)
    ranks = [0, *(draw.randrange(2) for _ in range(max(owners) - 1)), 1]
    insist_on_same_bits(name, composed(graph, owners, ranks, BATCH_SIZE, 4, draw))


@pytest.mark.parametrize("name", ["fusion", "siamese", "vision-text"])
def test_two_towers_and_a_head_on_two_ranks(name: str) -> None:
    graph = captured(name, 4).graph
    plan = composed(graph, by_name(graph, SPLITS[name]), (0, 1, 0), BATCH_SIZE, 4, random.Random(name))
    assert (plan.ranks, plan.axes.pp) == ((0, 1, 0), 2)
    insist_on_same_bits(name, plan)


@pytest.mark.parametrize("name", ["siamese", "vision-text", "inception"])
def test_recomputed_branches(name: str) -> None:
    graph = captured(name, 4).graph
    owners = by_name(graph, SPLITS[name])
    ranks = [0, *(stage % 2 for stage in range(1, max(owners))), 1]
    plan = composed(graph, owners, ranks, BATCH_SIZE, 4, random.Random(f"again {name}"))
    insist_on_same_bits(name, plan.model_copy(update={"recompute": "full"}))


def test_a_shorter_batch_leaves_out_the_last_microbatches() -> None:
    """Two microbatches of a schedule for four: as the plain loop over two."""
    graph = captured("siamese", 4).graph
    plan = composed(graph, by_name(graph, SPLITS["siamese"]), (0, 1, 0), BATCH_SIZE, 4, random.Random(1))
    engine = make_engine(
        built("siamese"), plan, None, EngineOptions(loss_fn=LOSS, optimizer=adamw, seed=SEED)
    )
    whole = batch_of("siamese")
    half = Batch(
        tuple(t[: BATCH_SIZE // 2] for t in whole.args), {}, tuple(t[: BATCH_SIZE // 2] for t in whole.target)
    )
    found = engine_snapshot(engine, half, steps=STEPS)
    model, tape = built("siamese"), captured("siamese", 4).tape
    expected = reference_snapshot(model, tape, half, PlainLoop(2, LOSS, steps=STEPS, seed=SEED))
    assert compare(expected, found).bit_equal


def test_users_that_go_back_to_an_earlier_stage_are_refused() -> None:
    """The stem's value has four users; a sum over stages 1, 2, 1, 2 is none that one process makes."""
    graph = captured("inception", 2).graph
    words = ("stem", "blocks.0.one blocks.0.five", "blocks.0.three blocks.0.pool", "head")
    with pytest.raises(BadPlan, match=r"gradient of 'stem'.*cannot be added up") as caught:
        plan_of(graph, by_name(graph, words), BATCH_SIZE, 2).owners(graph)
    assert "'blocks.0.three.0' uses it first, in stage 2, then 'blocks.0.five.0', in stage 1" in str(
        caught.value
    )
