"""The promise, in one process: whatever the cut, the schedule and the microbatches, the same bits.

`make test` runs a slice: of small models each pair of two values occurs, of each other model one number of
microbatches; over these models each number of stages meets each schedule. `make parity` (`--all`) runs
everything and prints the table.
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

from outsize.capture.graph.build import build_graph
from outsize.capture.recording.fallbacks import record
from outsize.ir.plan import ScheduleName
from outsize.train.check.compare import compare

STAGES = (2, 3, 4)
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b")
MICROBATCHES = (1, 3, 4, 6)
# These models run half of the product, in which each pair of two values occurs. Boundaries with one value,
# with skips and with tied weights are among them, and BatchNorm, dropout and a recurrent layer.
SMALL = ("toy", "mlp", "unet", "lstm", "gpt2")
# These models of 22 to 61 million parameters run with --all alone. In `make test` the zoo's
# `deeplabv3_resnet` has the classes DeepLabV3 and ResNet (test_coverage.py), and test_zero_bubble.py has the
# two towers.
LARGE = ("resnet50", "deeplabv3", "late_fusion")


def counts(name: str) -> list[int]:
    """Microbatches that the model can be split into."""
    return [m for m in MICROBATCHES if BATCH_SIZE // m >= case(name).smallest_microbatch]


def combinations(name: str) -> list[Combination]:
    """All of a model; the number of microbatches changes slowest, so that references are shared."""
    return [Combination(name, m, s, how) for m, s, how in product(counts(name), STAGES, SCHEDULES)]


def in_slice(wanted: Combination) -> bool:
    """Returns whether `make test` runs this cell.

    Of a small model it runs every (stages, microbatches) with the schedules in turns, of another model one
    cell, by turns.
    """
    if wanted.model in SMALL:
        batch, stages = MICROBATCHES.index(wanted.microbatches), STAGES.index(wanted.stages)
        return SCHEDULES[(batch + stages) % 2] == wanted.schedule
    if wanted.model in LARGE:
        return False
    others = [known.name for known in CASES if known.name not in (*SMALL, *LARGE)]
    turn = others.index(wanted.model)
    cell = MICROBATCHES[turn % 4], STAGES[turn % 3], SCHEDULES[turn % 2]
    return cell == (wanted.microbatches, wanted.stages, wanted.schedule)


def cells() -> list[Any]:
    """The product with the planner's cuts, and among it a few cuts that no planner would choose."""
    return [cell for known in CASES for m in counts(known.name) for cell in _cells(known.name, m)]


def _cells(name: str, microbatches: int) -> list[Any]:
    product_cells = [c for c in combinations(name) if c.microbatches == microbatches]
    in_slices = [in_slice(c) for c in product_cells]
    rows = [(c, "planner", not taken) for c, taken in zip(product_cells, in_slices, strict=True)]
    random_cell = product_cells[3 * microbatches % len(product_cells)]
    rows.append((random_cell, "random", not _draws_cuts(name, microbatches)))
    return [
        pytest.param(c, cuts, id=f"{c.name}-{cuts}", marks=[pytest.mark.full] if rare else [])
        for c, cuts, rare in rows
    ]


def _draws_cuts(name: str, microbatches: int) -> bool:
    """Random cuts run with the last number of microbatches in the slice, of small models with each."""
    taken = [c.microbatches for c in combinations(name) if in_slice(c)]
    return bool(taken) and (name in SMALL or microbatches == taken[-1])


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


@pytest.mark.parametrize("name", SMALL)
def test_the_slice_covers_every_pair_of_values(name: str) -> None:
    cells_of_model = [c for c in combinations(name) if in_slice(c)]
    assert len(cells_of_model) * 2 == len(combinations(name))
    assert {(c.stages, c.microbatches) for c in cells_of_model} == set(product(STAGES, MICROBATCHES))
    assert {(c.stages, c.schedule) for c in cells_of_model} == set(product(STAGES, SCHEDULES))
    assert {(c.microbatches, c.schedule) for c in cells_of_model} == set(product(MICROBATCHES, SCHEDULES))


@pytest.mark.parametrize("name", [c.name for c in CASES if c.name not in (*SMALL, *LARGE)])
def test_the_slice_has_planned_and_random_cuts_of_every_other_model(name: str) -> None:
    taken = [c.values for c in cells() if not c.marks and c.values[0].model == name]
    assert [cuts for _, cuts in taken] == ["planner", "random"]
    assert len({wanted.microbatches for wanted, _ in taken}) == 1


def test_the_slice_of_the_other_models_has_every_value() -> None:
    taken = [c for known in CASES for c in combinations(known.name) if in_slice(c) and c.model not in SMALL]
    assert {(c.stages, c.schedule) for c in taken} == set(product(STAGES, SCHEDULES))
    assert {c.microbatches for c in taken} == set(MICROBATCHES)


def test_random_cuts_are_not_the_planners() -> None:
    drawn = [c.values[0] for c in cells() if c.values[1] == "random"]
    assert len(drawn) == sum(len(counts(c.name)) for c in CASES)
    some = [c.values[0] for c in cells() if c.values[1] == "random" and not c.marks]
    odd = [wanted for wanted in some if at_random(wanted, seed=1).stages != planned(wanted).stages]
    assert len(odd) > 0.8 * len(some)


def dropout_cells() -> list[Any]:
    """Each model with one schedule and one number of stages, the LSTM with all."""
    rows = [(name, s, how) for name in sorted(WITH_RANDOMNESS) for s, how in product((1, *STAGES), SCHEDULES)]
    return [pytest.param(*row, marks=[] if _draws_in_slice(*row) else [pytest.mark.full]) for row in rows]


def _draws_in_slice(name: str, stages: int, how: ScheduleName) -> bool:
    number = sorted(WITH_RANDOMNESS).index(name)
    cell = STAGES[number % len(STAGES)], SCHEDULES[number % len(SCHEDULES)]
    return name == "lstm" or (name not in LARGE and cell == (stages, how))


@pytest.mark.parametrize(("name", "stages", "how"), dropout_cells())
def test_dropout_draws_what_the_plain_loop_draws(name: str, stages: int, how: ScheduleName) -> None:
    plan = planned(Combination(name, 3, stages, how), dropout=True)
    assert any(i.random for i in captured(name, 3, True).tape.instructions), "dropout is off"
    found = compare(reference(name, 3, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found
