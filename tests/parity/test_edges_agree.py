"""One law, written twice: which stage sends what to which.

`planner/costs/stage_edges.py` says it for graphs (the thinking wing sees no tape), `run/stage/boundary.py`
for tapes (the doing wing sees no planner). What is planned must be what is sent; here the two are compared
on real models.
"""

from __future__ import annotations

import pytest
from zoo import CASES, Case

from outsize.capture.graph.build import build_graph
from outsize.capture.recording.fallbacks import record
from outsize.planner.costs.stage_edges import edges_between
from outsize.run.stage.boundary import backward_edges, forward_edges, step_edges
from outsize.run.stage.cut import cut, in_runs

STAGES = 4
LARGE = ("resnet50", "deeplabv3", "late_fusion")  # with --all alone; resnet18 and unet have their edges


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[pytest.mark.full] if c.name in LARGE else []) for c in CASES]
)
@pytest.mark.sample("resnet18", "unet", "gpt2", "mixtral", "t5", "swin")
def test_the_planner_and_the_runtime_see_the_same_edges(case: Case) -> None:
    model, (args, kwargs), target = case.build(), case.batch(2), case.target(2)
    tape = record(model, args, kwargs, case.loss, () if target is None else (target,))
    captured = build_graph(tape, model)
    units = len(captured.graph.units)
    bounds = [units * stage // STAGES for stage in range(STAGES + 1)]

    planned = edges_between(captured.graph, bounds)
    program = cut(tape, model, in_runs([captured.starts[bound] for bound in bounds]), outputs=False)

    assert set(planned.forward) == forward_edges(program.boundaries)
    assert set(planned.backward) == backward_edges(program.boundaries)
    assert set(planned.step) == step_edges(program.boundaries)
