"""compiled="auto": where devices would wait for their host stages are compiled, and the engine says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.ir.answers.compilation import Compilation
from outsize.ir.cluster import parse_cluster
from outsize.ir.plan import Stage
from outsize.planner.advice.compilation import MOST_FUNCTIONS, compilation_of

LOSS = nn.functional.mse_loss


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width, device="meta"), nn.Linear(width, width, device="meta"))


def answer(width: int, layers: int = 4, cluster: str = "2xh200", **changes: Any) -> Compilation:
    model = nn.Sequential(*(block(width) for _ in range(layers)))
    x = torch.empty(2 * width, width, device="meta")
    case: dict[str, Any] = {"loss_fn": LOSS, "target": x}
    how: dict[str, Any] = {"cluster": cluster, "stages": 2, "microbatches": 2, "schedule": "1f1b"}
    plan = outsize.plan(model, (x,), **case, **how).model_copy(update=changes)
    graph = outsize.capture(model, (x[:width],), target=x[:width], loss_fn=LOSS)
    return compilation_of(graph, plan, parse_cluster(cluster).devices[0])


def test_small_kernels_are_compiled() -> None:
    found = answer(width=32)
    assert (found.backend, found.cause, found.functions) == ("inductor", "launches", 1)
    assert 0.5 < found.waiting < 1


def test_large_kernels_are_not() -> None:
    found = answer(width=16384)
    assert (found.backend, found.cause, found.waiting) == (None, "busy", 0.0)


def test_the_host_is_not_waited_for_where_it_computes() -> None:
    assert answer(width=32, cluster="2xcpu").cause == "host"


def test_a_model_that_runs_by_modules_has_no_stage_to_compile() -> None:
    assert answer(width=32, form="modules").cause == "modules"


def test_each_recomputed_segment_is_a_function() -> None:
    """A segment ends where its block ends."""
    few = answer(width=32, recompute="selective", stages=selective("0-1", "2-3"))
    assert (few.functions, few.backend) == (2, "inductor")
    half = MOST_FUNCTIONS + 1
    many = answer(
        width=32,
        layers=2 * half,
        recompute="selective",
        stages=selective(f"0-{half - 1}", f"{half}-{2 * half - 1}"),
    )
    assert (many.functions, many.backend, many.cause) == (half, None, "functions")


def selective(*units: str) -> tuple[Stage, ...]:
    return tuple(
        Stage(units=(each,), device=f"h200:{number}", recompute="selective", recomputed=(each,))
        for number, each in enumerate(units)
    )


@pytest.mark.parametrize(("compiled", "asked"), [("auto", True), (False, False), (None, False)])
def test_the_engine_says_what_was_decided(compiled: Any, asked: bool) -> None:
    x = torch.randn(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    how: dict[str, Any] = {"cluster": "2xcpu", "microbatches": 2, "optimizer": torch.optim.SGD}
    engine = outsize.parallelize(model, (x,), target=x, loss_fn=LOSS, compiled=compiled, **how)
    engine.step(x, target=x)
    assert (engine.compilation is not None) is asked
    assert ("compiled   no, the host computes" in str(engine.report())) is asked
