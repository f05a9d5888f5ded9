"""The promise, in one process: whatever the cut, the schedule and the microbatches, the same bits.

`make test` runs a slice in which each pair of two values occurs, for expensive models each value; `make
parity` (`--all`) runs everything and prints the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
from parity_runs import (
    BATCH_SIZE,
    Combination,
    at_random,
    batch_of,
    captured,
    fresh,
    planned,
    reference,
    split_run,
)
from test_zoo import WITH_RANDOMNESS
from zoo import CASES, case

from outsize.capture.graph import build_graph
from outsize.capture.ladder import record
from outsize.ir.plan import ScheduleName
from outsize.train.parity import compare

pytestmark = pytest.mark.timeout(600)

STAGES = (2, 3, 4)
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b")
MICROBATCHES = (1, 3, 4, 6)
EXPENSIVE = ("resnet18", "resnet50", "deeplabv3", "late_fusion")


def counts(name: str) -> list[int]:
    """Microbatches that the model can be split into."""
    return [m for m in MICROBATCHES if BATCH_SIZE // m >= case(name).smallest_microbatch]


def combinations(name: str) -> list[Combination]:
    """All of a model; the number of microbatches changes slowest, so that references are shared."""
    return [Combination(name, m, s, how) for m, s, how in product(counts(name), STAGES, SCHEDULES)]


def in_slice(found: Combination) -> bool:
    """Half of the product: every (stages, microbatches) with the schedules in turns.

    Of an expensive model one per number of microbatches.
    """
    batch, stages = MICROBATCHES.index(found.microbatches), STAGES.index(found.stages)
    taken = found.model not in EXPENSIVE or stages == 2 * batch % len(STAGES)
    return taken and SCHEDULES[(batch + stages) % 2] == found.schedule


def cells() -> list[Any]:
    """The product with the planner's cuts, and among it a few cuts that no planner would choose."""
    return [cell for known in CASES for m in counts(known.name) for cell in _cells(known.name, m)]


def _cells(name: str, microbatches: int) -> list[Any]:
    found = [c for c in combinations(name) if c.microbatches == microbatches]
    odd = found[3 * microbatches % len(found)]
    left_out = [not in_slice(c) for c in found]
    rows = [(c, "planner", rare) for c, rare in zip(found, left_out, strict=True)]
    rows.append((odd, "random", name in EXPENSIVE and microbatches != 4))
    return [
        pytest.param(c, cuts, id=f"{c.name}-{cuts}", marks=[pytest.mark.full] if rare else [])
        for c, cuts, rare in rows
    ]


@cache
def facts(name: str) -> dict[str, Any]:
    """The model's line of the table. Captured a second time, when everything is imported and warm."""
    model, part, found = fresh(name), batch_of(case(name)).split(4)[0], case(name)
    captured(name, 4)
    start = time.perf_counter()
    graph = build_graph(record(model, part.args, part.kwargs, found.loss, part.target), model).graph
    seconds = time.perf_counter() - start
    return {
        "model": name,
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "units": len(graph.units),
        "capture_s": seconds,
    }


@pytest.mark.parametrize(("wanted", "cuts"), cells())
def test_the_split_run_equals_the_plain_loop(
    wanted: Combination,
    cuts: str,
    record_property: Callable[[str, Any], None],
    pytestconfig: pytest.Config,
) -> None:
    if pytestconfig.getoption("--all"):  # which prints the table
        for key, value in facts(wanted.model).items():
            record_property(key, value)
    plan = planned(wanted) if cuts == "planner" else at_random(wanted, seed=1)
    assert len(plan.stages) == wanted.stages
    found = compare(reference(wanted.model, wanted.microbatches), split_run(wanted.model, plan))
    record_property("cuts", cuts)
    record_property("equal", found.bit_equal)
    assert found.bit_equal, found


def test_the_slice_covers_every_pair_of_values() -> None:
    kept = [c for c in combinations("unet") if in_slice(c)]
    assert len(kept) * 2 == len(combinations("unet"))
    assert {(c.stages, c.microbatches) for c in kept} == set(product(STAGES, MICROBATCHES))
    assert {(c.stages, c.schedule) for c in kept} == set(product(STAGES, SCHEDULES))
    assert {(c.microbatches, c.schedule) for c in kept} == set(product(MICROBATCHES, SCHEDULES))


@pytest.mark.parametrize("name", EXPENSIVE)
def test_the_slice_of_an_expensive_model_has_every_value(name: str) -> None:
    kept = [c for c in combinations(name) if in_slice(c)]
    assert [c.microbatches for c in kept] == list(MICROBATCHES)
    assert {c.stages for c in kept} == set(STAGES)
    assert {c.schedule for c in kept} == set(SCHEDULES)


def test_random_cuts_are_not_the_planners() -> None:
    drawn = [c.values[0] for c in cells() if c.values[1] == "random"]
    assert len(drawn) == sum(len(counts(c.name)) for c in CASES)
    some = [wanted for wanted in drawn if wanted.microbatches == 4]
    odd = [wanted for wanted in some if at_random(wanted, seed=1).stages != planned(wanted).stages]
    assert len(odd) > 0.8 * len(some)


def dropout_cells() -> list[Any]:
    rare = [pytest.mark.full]
    cells = product(sorted(WITH_RANDOMNESS), SCHEDULES)
    return [pytest.param(name, how, marks=rare if name in EXPENSIVE else []) for name, how in cells]


@pytest.mark.parametrize(("name", "how"), dropout_cells())
def test_dropout_draws_the_same_in_one_stage_and_in_several(name: str, how: ScheduleName) -> None:
    one = split_run(name, planned(Combination(name, 3, 1, how), dropout=True), dropout=True)
    plain = compare(reference(name, 3, True), one)
    assert plain.bit_equal, plain
    assert any(i.random for i in captured(name, 3, True).tape.instructions), "dropout is off"
    for stages in (3,) if name in EXPENSIVE else STAGES:
        several = split_run(name, planned(Combination(name, 3, stages, how), dropout=True), dropout=True)
        found = compare(one, several)
        assert found.bit_equal, (stages, found)
