"""The predicted counter against the expected peak, moment by moment."""

from __future__ import annotations

import pytest

from outsize.ir.cluster import Link
from outsize.ir.plan import Expected, StageFigures
from outsize.ir.timeline import Timeline
from outsize.planner.memory.memory_samples import with_memory_samples
from outsize.planner.simulation.simulate import StageCost, simulate
from outsize.schedules.builders import build
from outsize.schedules.lower import lower
from outsize.schedules.refine import divided

FREE = Link(name="free", latency_s=0, bytes_per_s=1)
FIGURES = StageFigures(
    units=1,
    parameters=1,
    forward_s=1,
    backward_s=1,
    weights_bytes=10,
    gradients_bytes=10,
    optimizer_bytes=20,
    activations_bytes=600,
    boundary_bytes=5,
    busy=1,
    device_bytes=0,
)


def step(name: str) -> Timeline:
    schedule = lower(build(name, 2, 3), frozenset({(0, 1)}), frozenset({(1, 0)}))
    sizes = {(0, 1): 0, (1, 0): 0}
    costs = [StageCost(1, 2, 1), StageCost(1, 2, 1)]
    return simulate(schedule, costs, sizes, sizes, lambda _a, _b: FREE)


@pytest.mark.parametrize(("name", "alive"), [("gpipe", 200), ("1f1b", 300), ("zero-bubble", 300)])
def test_it_rises_with_forwards_and_falls_with_backwards(name: str, alive: int) -> None:
    """Three microbatches of 200 are in flight under gpipe, two of 300 under the others, on rank 0."""
    expected = Expected(step_s=1, bubble=0, samples_per_s=1, stages=(FIGURES, FIGURES), source="roofline")
    found = [
        s.alive_bytes for s in with_memory_samples(step(name), expected, range(2)).samples if s.rank == 0
    ]
    assert found[:2] == [40, 40 + alive]
    assert max(found) == 40 + 600
    assert found[-1] == 40
    assert len(found) == 1 + 2 * 3


def test_a_stage_in_blocks_holds_a_microbatch_between_its_last_forward_and_its_first_backward() -> None:
    """Two blocks on one rank: forwards end at 1 and 2 s, backwards at 4 and 6 s."""
    schedule, costs = divided(build("1f1b", 1, 1), [2]), [StageCost(1, 2)] * 2
    played = simulate(schedule, costs, {}, {}, lambda _a, _b: FREE)
    expected = Expected(step_s=1, bubble=0, samples_per_s=1, stages=(FIGURES,), source="roofline")
    found = with_memory_samples(played, expected, (0, 0)).samples
    assert [(s.time_s, s.alive_bytes) for s in found] == [(0, 40), (2, 640), (6, 40)]
