"""Models of the zoo with compiled stages against the plain loop, with dropout where they have some.

`aot_eager` has the loop's bits. `inductor` fuses kernels and sums in another order: its loss and gradients
are within `ROUNDING` of a tensor's largest element; a tensor whose elements are all below a thousandth of the
model's largest gradient is measured by that. tests/dist/test_tensor_plans.py has tensor parallelism.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from parity_runs import SEED, Combination, adamw, batch_of, captured, fresh, planned, recorded
from torch import Tensor
from zoo import case

from outsize.train.check.compare import (
    PlainLoop,
    TrainingSnapshot,
    compare,
    engine_snapshot,
    reference_snapshot,
)
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.timeout(1800)

MICROBATCHES, STAGES, STEPS = 3, 2, 1
ROUNDING = 2e-5
MODELS = (
    "toy",
    "mlp",
    "unet",
    "narrow_resnet18",
    "lstm",
    "gpt2",
    "llama",
    "qwen3",
    "t5",
    "bart",
    "bert",
    "vit",
)
USUAL = {("gpt2", "none"), ("mlp", "full")}
CASES = [
    pytest.param(*each, marks=[] if each in USUAL else [pytest.mark.full])
    for each in product(MODELS, ("none", "full"))
]


def compiled_run(name: str, recompute: Any, backend: str | None) -> TrainingSnapshot:
    torch.compiler.reset()
    plan = planned(Combination(name, MICROBATCHES, STAGES, "1f1b"), dropout=True)
    plan = plan.model_copy(update={"recompute": recompute})
    options = EngineOptions(loss_fn=case(name).loss, optimizer=adamw, seed=SEED, compiled=backend)
    engine, batch = make_engine(fresh(name, dropout=True), plan, None, options), batch_of(case(name))
    with recorded(captured(name, MICROBATCHES, dropout=True).tape):
        engine.prepare(batch)
    return engine_snapshot(engine, batch, steps=STEPS)


def plain_run(name: str) -> TrainingSnapshot:
    tape = captured(name, MICROBATCHES, dropout=True).tape
    loop = PlainLoop(MICROBATCHES, case(name).loss, steps=STEPS, seed=SEED)
    return reference_snapshot(fresh(name, dropout=True), tape, batch_of(case(name)), loop)


@pytest.mark.parametrize(("name", "recompute"), CASES)
@pytest.mark.sample("mlp")
def test_aot_eager_has_the_bits_of_the_loop(name: str, recompute: str) -> None:
    differences = compare(plain_run(name), compiled_run(name, recompute, "aot_eager"))
    assert differences.bit_equal, differences


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_inductor_is_within_rounding(name: str, recompute: str) -> None:
    expected, found = plain_run(name), compiled_run(name, recompute, "inductor")
    assert distance(expected.loss, found.loss, 0.0) <= ROUNDING
    assert expected.grads.keys() == found.grads.keys()
    largest = max(float(g.abs().max()) for g in expected.grads.values())
    distances = {n: distance(g, found.grads[n], 1e-3 * largest) for n, g in expected.grads.items()}
    worst = max(distances, key=lambda n: distances[n])
    print(f"{name} {recompute}: {distances[worst]:.1e} at {worst}")
    assert distances[worst] <= ROUNDING, worst


def distance(a: Tensor, b: Tensor, least: float) -> float:
    """The largest difference, over the largest element."""
    return float((a - b).abs().max()) / max(float(a.abs().max()), least)
