"""The step of weights on the host: what is played is what runs, and playing a part of it says the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import outsize
from outsize.ir.hardware.links import Link
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.planner.costs.stage_edges import Edges
from outsize.planner.evaluate import hosted_step
from outsize.planner.evaluate.hosted_step import FEW, HostedStep
from outsize.planner.layout.layout import Layout
from outsize.planner.simulation.host_copies import CopyCosts
from outsize.planner.simulation.simulate import StageCost
from outsize.policies.weights import HOSTED, Weights

WIDTH, SAMPLES, MICROBATCHES, STAGES = 8, 6, 3, 4
BARE = Link(name="bare", latency_s=0.0, bytes_per_s=1.0)
NONE = Edges({}, {}, {})


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def planned(model: nn.Module, weights: Weights, schedule: ScheduleName) -> Plan:
    graph = outsize.capture(model, (torch.zeros(SAMPLES // MICROBATCHES, WIDTH),), loss_fn=loss)
    bounds = [len(graph.units) * stage // STAGES for stage in range(STAGES + 1)]
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster="1xcpu",
        axes=Axes(),
        batch_size=SAMPLES,
        microbatches=MICROBATCHES,
        schedule=schedule,
        weights=weights,
        recompute="full",
        stages=stages_from_bounds(graph, bounds, ("cpu",) * STAGES),
    )


@pytest.mark.parametrize("schedule", ["gpipe", "naive"])
@pytest.mark.parametrize("weights", HOSTED)
def test_what_is_played_is_what_runs(weights: Weights, schedule: ScheduleName) -> None:
    """The actions of a measured step, in their order, are those of the row that is simulated."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(STAGES) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    plan, x = planned(model, weights, schedule), torch.randn(SAMPLES, WIDTH)
    engine = outsize.parallelize(model, (x,), plan=plan, loss_fn=loss)
    engine.step(x)
    ran = [span.action for span in engine.timeline().spans if span.lane in ("compute", "load")]
    layout = Layout(plan.axes, STAGES, schedule, MICROBATCHES, MICROBATCHES, weights)
    step = HostedStep(layout, (), CopyCosts(BARE, 1.0, (), ()), NONE, lambda _a, _b: BARE)
    (row,) = step.schedule(MICROBATCHES).actions
    assert ran == [str(action) for action in row]


def step_of(weights: Weights, schedule: ScheduleName, m: int, sizes: list[tuple[int, ...]]) -> HostedStep:
    forward, backward, held, gradients, comes, goes = zip(*sizes, strict=True)
    costs = [StageCost(f, b) for f, b in zip(forward, backward, strict=True)]
    copies = CopyCosts(BARE, 1e9, held, gradients, (comes, comes), (goes, goes))
    layout = Layout(Axes(), len(sizes), schedule, m, m, weights)
    return HostedStep(layout, costs, copies, NONE, lambda _a, _b: BARE)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["host", "host-optimizer"]),
    st.sampled_from(["gpipe", "naive"]),
    st.lists(st.tuples(*[st.integers(1, 9)] * 6), min_size=2, max_size=4),
    st.integers(FEW + 1, 9),
)
def test_a_part_says_the_whole(
    weights: Weights, schedule: ScheduleName, sizes: list[tuple[int, ...]], m: int
) -> None:
    step = step_of(weights, schedule, m, sizes)
    whole_s = step.timeline().duration_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosted_step, "ACTIONS", 2 * len(sizes))
        assert step.seconds() == pytest.approx(whole_s)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["gpipe", "naive"]),
    st.lists(st.tuples(*[st.integers(1, 9)] * 6), min_size=2, max_size=4),
    st.integers(1, 9),
    st.integers(0, 40),
)
def test_the_hosts_optimizer_works_beside_the_backward(
    schedule: ScheduleName, sizes: list[tuple[int, ...]], m: int, update: int
) -> None:
    """Not before its last gradients have landed, so the last stage to land counts in full; one that steps all
    at once follows all.
    """
    step = step_of("host", schedule, m, sizes)
    updated = replace(step, updates=[update] * len(sizes), copies=replace(step.copies, host_bytes_per_s=4.0))
    bare_s = replace(updated, updates=()).seconds()
    each_s = update / 4.0
    beside_s, behind_s = updated.seconds(), replace(updated, in_parts=False).seconds()
    assert behind_s == pytest.approx(bare_s + len(sizes) * each_s)
    assert bare_s + each_s <= beside_s + 1e-9
    assert beside_s <= behind_s + 1e-9


def test_an_optimizer_that_is_short_hides_but_for_its_last_stage() -> None:
    """Eight stages that compute for 100 s each in the backward, and 10 s of the optimizer for each."""
    step = step_of("host", "gpipe", 1, [(100, 100, 1, 1, 0, 0)] * 8)
    slow = replace(step.copies, host_bytes_per_s=1.0)
    updated = replace(step, updates=[10] * 8, copies=slow)
    assert updated.seconds() == pytest.approx(replace(updated, updates=()).seconds() + 10)


@pytest.mark.parametrize("m", [2, 5])
def test_values_on_the_host_take_their_copies(m: int) -> None:
    """Each compute of 1 s waits for 4 s of what comes: nearly all of the step is copies."""
    sizes = [(1, 1, 1, 1, 4, 1)] * 3
    slow, fast = (step_of(w, "gpipe", m, sizes).seconds() for w in ("host-activations", "host"))
    assert slow > 2 * 3 * m * 4 - 4 * 2
    assert fast < 2 * 3 * m * 1 + 12
