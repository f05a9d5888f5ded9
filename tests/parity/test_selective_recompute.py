"""Some units of a stage are recomputed: the same bits for any choice of units."""

from __future__ import annotations

import random

import pytest
from parity_runs import Combination, at_random, captured, interleaved, reference, split_run

from outsize.ir.names import compress
from outsize.ir.plan import Plan, ScheduleName
from outsize.train.parity import compare


def some_again(plan: Plan, name: str, draw: random.Random) -> Plan:
    """In each stage about half of the units, in one of them all."""
    graph = captured(name, plan.microbatches).graph
    names, bounds, stages = [u.name for u in graph.units], plan.bounds(graph), []
    for number, stage in enumerate(plan.stages):
        units = range(bounds[number], bounds[number + 1])
        chosen = [u for u in units if draw.random() < 0.6] or [units[0]]
        patterns = tuple(p for u in chosen for p in compress(names, u, u))
        stages.append(stage.model_copy(update={"recompute": "selective", "recomputed": patterns}))
    return plan.model_copy(update={"stages": tuple(stages)})


CASES: list[tuple[str, int, ScheduleName]] = [
    *(
        (name, stages, "1f1b")
        for name in ("mlp", "unet", "resnet18", "gpt2", "t5", "lstm")
        for stages in (1, 3)
    ),
    *((name, 2, "1f1b") for name in ("bert", "swin", "mixtral", "mamba")),
    *((name, 3, "zero-bubble") for name in ("unet", "gpt2", "resnet18")),
]


@pytest.mark.parametrize(("name", "stages", "how"), CASES)
def test_any_units_recomputed_change_no_bit(name: str, stages: int, how: ScheduleName) -> None:
    wanted = Combination(name, 3, stages, how)
    plan = some_again(at_random(wanted, seed=1), name, random.Random(f"{wanted.name} units"))
    found = compare(reference(name, 3, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found


@pytest.mark.parametrize("name", ["unet", "gpt2"])
def test_interleaved(name: str) -> None:
    plan = some_again(interleaved(Combination(name, 3, 4, "interleaved"), 2), name, random.Random(name))
    found = compare(reference(name, 3, True), split_run(name, plan, dropout=True))
    assert found.bit_equal, found
