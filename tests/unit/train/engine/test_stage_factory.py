"""Which stages join products with their collectives: those whose backward is whole and not compiled."""

from __future__ import annotations

from typing import Any

import pytest

import outsize
from outsize.ops.doctor.models import TIED
from outsize.train.context.options import EngineOptions
from outsize.train.context.run_context import RunContext
from outsize.train.engine.stage_factory import StageFactory

WIDTH = 16


@pytest.fixture(scope="module")
def plan() -> outsize.Plan:
    x, y = TIED.batch(WIDTH)
    how: dict[str, Any] = {
        "cluster": "4xh200",
        "stages": 2,
        "axes": {"tp": 2},
        "microbatches": 2,
        "schedule": "1f1b",
    }
    return outsize.plan(TIED.build(WIDTH), (x,), loss_fn=TIED.loss_fn, target=y, **how)


def overlaps(plan: outsize.Plan, backend: str | None = None, **changes: Any) -> bool:
    nothing: Any = None
    run = RunContext.of_one_process(nothing, plan.model_copy(update=changes), EngineOptions(compiled=backend))
    return StageFactory(run)._overlaps()


def test_a_whole_backward_overlaps(plan: outsize.Plan) -> None:
    assert overlaps(plan)
    assert overlaps(plan, schedule="interleaved")


def test_a_schedule_that_delays_weight_gradients_does_not(plan: outsize.Plan) -> None:
    """They are computed when the schedule says so, and not while the collective of their layer is sent."""
    assert not overlaps(plan, schedule="zero-bubble")
    rows = ("0F0,0I0,0W0,0F1,0B1", "1F0,1B0,1F1,1B1")
    assert not overlaps(plan, schedule="custom", actions=rows)
    assert overlaps(plan, schedule="custom", actions=tuple(row.replace("0I0,0W0", "0B0") for row in rows))


def test_neither_does_a_compiled_stage_nor_one_without_tensor_parallelism(plan: outsize.Plan) -> None:
    assert not overlaps(plan, backend="inductor")
    assert not overlaps(plan, axes=plan.axes.model_copy(update={"tp": 1}))
