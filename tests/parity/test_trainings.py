"""Whole trainings on two local stages: the plain loop's losses and weights."""

from __future__ import annotations

import pytest
from trainings import TRAININGS, Plain, Split, differing, plan_of, run

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.sample(
    "graphs-1f1b", "gan-zero-bubble", "diffusion-1f1b", "experts-zero-bubble", "ppo-1f1b", "dpo-zero-bubble"
)
def test_a_training_is_the_plain_loops(name: str, schedule: str) -> None:
    assert differing(TRAININGS[name], None, schedule) == []


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_is_a_pipeline_and_moves_its_weights(name: str) -> None:
    training = TRAININGS[name]
    assert plan_of(training, "1f1b").form == "tape"
    before = dict(training.model().named_parameters())
    after = run(Plain(training))
    frozen = {n for n, p in before.items() if not p.requires_grad}
    assert {n for n, p in before.items() if (p == after[n]).all()} == frozen


def test_tokens_are_dropped() -> None:
    model = Split(TRAININGS["experts"], None, "1f1b").model
    (ids,), _ = TRAININGS["experts"].batches()[0]
    x = model.embed(ids)
    assert (model.layers[0](x)[0] == x).all(-1).any()
