"""Stages that are no runs of the model's order: bit-equal to the plain loop, or refused with the reason."""

from __future__ import annotations

import random
from functools import cache

import pytest
from branched import MODELS, at_random, built, by_name, plan_of
from torch import nn

from outsize.capture.graph import Captured, build_graph
from outsize.capture.ladder import record
from outsize.errors import BadPlan
from outsize.ir.plan import Plan, ScheduleName
from outsize.train.batch import Batch, as_target
from outsize.train.parallel import make_engine
from outsize.train.parity import Snapshot, adamw, compare, engine_snapshot, reference_snapshot

BATCH_SIZE, STEPS, SEED = 8, 2, 3
LOSS = nn.CrossEntropyLoss()
# Stage by stage the words with which its units begin; the last stage has the rest.
SPLITS = {
    "fusion": ("left", "right", "head"),
    "siamese": ("tower.0#0 tower.1#0 tower.2#0 tower.3#0 tower.4#0", "tower", "head"),
    "vision-text": ("words text.0 text.1", "vision project", "head"),
    "inception": ("stem blocks.0.one blocks.0.three.0 blocks.0.five.0", "blocks.0", "blocks.1", "head"),
}


def batch_of(name: str) -> Batch:
    args, target = MODELS[name][1](BATCH_SIZE)
    return Batch(args, {}, as_target(target))


@cache
def captured(name: str, microbatches: int) -> Captured:
    part, model = batch_of(name).split(microbatches)[0], built(name)
    return build_graph(record(model, part.args, part.kwargs, LOSS, part.target), model)


@cache
def reference(name: str, microbatches: int) -> Snapshot:
    tape = captured(name, microbatches).tape
    given = built(name), tape, batch_of(name), microbatches, LOSS
    return reference_snapshot(*given, steps=STEPS, seed=SEED)


def insist_on_same_bits(name: str, plan: Plan) -> None:
    engine = make_engine(built(name), plan, None, loss_fn=LOSS, optimizer=adamw, seed=SEED)
    found = engine_snapshot(engine, batch_of(name), steps=STEPS)
    differences = compare(reference(name, plan.microbatches), found)
    assert differences.bit_equal, (differences, [stage.units for stage in plan.stages])


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", SPLITS)
def test_branches_as_stages(name: str, schedule: ScheduleName) -> None:
    graph = captured(name, 4).graph
    owners = by_name(graph, SPLITS[name])
    assert name in ("fusion", "siamese") or owners != sorted(owners)
    insist_on_same_bits(name, plan_of(graph, owners, BATCH_SIZE, 4, schedule))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["siamese", "vision-text", "inception", "unet"])
def test_splits_at_random(name: str, seed: int) -> None:
    graph, draw = captured(name, 2).graph, random.Random(f"{name} {seed}")
    owners = at_random(graph, draw.choice((2, 3, 5)), draw)
    insist_on_same_bits(name, plan_of(graph, owners, BATCH_SIZE, 2, draw.choice(("1f1b", "gpipe"))))


def test_users_that_go_back_to_an_earlier_stage_are_refused() -> None:
    """The stem's value has four users; a sum over stages 1, 2, 1, 2 is none that one process makes."""
    graph = captured("inception", 2).graph
    words = ("stem", "blocks.0.one blocks.0.five", "blocks.0.three blocks.0.pool", "head")
    with pytest.raises(BadPlan, match=r"gradient of 'stem'.*cannot be added up") as caught:
        plan_of(graph, by_name(graph, words), BATCH_SIZE, 2).owners(graph)
    assert "'blocks.0.three.0' uses it first, in stage 2, then 'blocks.0.five.0', in stage 1" in str(
        caught.value
    )
