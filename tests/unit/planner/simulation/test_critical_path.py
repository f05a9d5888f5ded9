"""Longest paths against the simulator, second by second."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import cut_graphs

from outsize.errors import InvalidSchedule
from outsize.ir.cluster import Link, parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, ScheduleName
from outsize.ir.profile import Profile
from outsize.ir.schedule import Kind, Schedule, partners
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.played_step import is_message
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.simulation.critical_path import Cost, Network, behind
from outsize.planner.simulation.simulate import StageCost, simulate
from outsize.policies.activations import Recompute
from outsize.schedules.builders import build
from outsize.schedules.families import built
from outsize.schedules.lower import lower

Edge = tuple[int, int]
WAYS: tuple[Recompute, ...] = ("none", "full")


@final
@dataclass(frozen=True)
class Step:
    """A lowered schedule with costs of stages and messages."""

    lowered: Schedule
    network: Network
    costs: list[StageCost]
    down: dict[Edge, int]
    up: dict[Edge, int]

    def link(self, a: int, b: int) -> Link:
        """Another one for each pair of ranks and direction."""
        return Link(name="slow", latency_s=0.1 / (1 + a + 2 * b), bytes_per_s=7.0 + a + 3 * b)

    def simulated_s(self) -> float:
        return simulate(self.lowered, self.costs, self.down, self.up, self.link).duration_s

    def seconds(self) -> dict[Cost, float]:
        rank_of, found = self.lowered.rank_of, dict[Cost, float]()
        for stage, cost in enumerate(self.costs):
            parts = cost.forward_s, cost.backward_s, cost.backward_s - cost.weight_s, cost.weight_s
            kinds = Kind.F, Kind.B, Kind.I, Kind.W
            found |= {(kind, stage, -1): part for kind, part in zip(kinds, parts, strict=True)}
        for kind, sizes in ((Kind.F, self.down), (Kind.B, self.up)):
            for (source, to), size in sizes.items():
                found[kind, source, to] = self.link(rank_of[source], rank_of[to]).seconds(size)
        for forward, backward in (pair for row in self.lowered.actions for pair in partners(row).items()):
            beside_s = self.costs[backward.stage].beside_s(backward.kind, self.costs[forward.stage])
            found[backward.kind, backward.stage, behind(forward.stage)] = beside_s
        return found


def random_step(name: str, seed: int) -> Step:
    """A chain that may be broken, skip edges, step edges of their own and beside others."""
    dice = random.Random(seed)
    ranks, microbatches = dice.randint(1, 4), dice.randint(1, 7)
    stages = ranks * (dice.randint(1, 3) if name == "interleaved" else 2 if name == "dualpipe-v" else 1)
    pairs = [(a, b) for b in range(stages) for a in range(b)]
    forward = {edge for edge in pairs if dice.random() < (0.9 if edge[1] == edge[0] + 1 else 0.3)}
    backward = {(b, a) for a, b in sorted(forward) if dice.random() < 0.8}
    step = {edge for edge in pairs if dice.random() < 0.2}
    halves = [(dice.random(), dice.random()) for _ in range(stages)]
    costs = [StageCost(f, b, b * dice.random(), 0.0, f * dice.random(), b * dice.random()) for f, b in halves]
    built = build(name, stages, microbatches, ranks)
    return Step(
        lower(built, forward, backward, step),
        Network.of(built, forward, backward, step),
        costs,
        {edge: dice.randint(0, 9) for edge in sorted(forward | step)},
        {edge: dice.randint(0, 9) for edge in sorted(backward)},
    )


@pytest.mark.parametrize("name", built())
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_a_step_lasts_as_long_as_in_the_simulator(name: str, seed: int) -> None:
    step = random_step(name, seed)
    assert step.network.step_s(step.seconds()) == step.simulated_s()


def test_one_network_serves_all_cuts() -> None:
    """Two stages, one microbatch: F, message, F, B, message, B, one after the other."""
    network = Network.of(build("1f1b", 2, 1), {(0, 1)}, {(1, 0)})
    kinds = [
        (Kind.F, 0, -1),
        (Kind.F, 0, 1),
        (Kind.F, 1, -1),
        (Kind.B, 1, -1),
        (Kind.B, 1, 0),
        (Kind.B, 0, -1),
    ]
    assert [network.costs[kind] for kind in network.kinds] == kinds
    nothing = dict.fromkeys(network.costs, 0.0)
    assert network.step_s(nothing | dict.fromkeys(kinds, 0.5)) == 3.0
    assert network.step_s(nothing | {kind: float(at) for at, kind in enumerate(kinds)}) == 15.0


def test_a_schedule_that_hangs_has_no_longest_path() -> None:
    crossed = "0B0,0F0\n1F0,1B0\n"
    with pytest.raises(InvalidSchedule, match="hangs"):
        Network.of(Schedule.from_csv(crossed), {(0, 1)}, {(1, 0)})


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    cut_graphs(),
    st.sampled_from(("naive", "gpipe", "1f1b", "zero-bubble")),
    st.integers(1, 5),
    st.integers(0, 15),
)
def test_what_the_search_estimates_is_what_is_played(
    cut: tuple[ModelGraph, Profile, tuple[int, ...]], name: ScheduleName, microbatches: int, ways: int
) -> None:
    """On four nodes, skips and tied weights included; what messages expose is what links add."""
    graph, profile, bounds = cut
    stages = len(bounds) - 1
    cluster = parse_cluster("2x2xcpu")
    layout = Layout(Axes(pp=stages), stages, name, microbatches, microbatches)
    pipeline = Pricing({microbatches: (graph, profile)}, cluster, "sgd").pipeline(layout, WAYS)
    assert pipeline is not None
    found = Candidate.of(pipeline, bounds, [ways >> stage & 1 for stage in range(stages)])
    assert found.step_s == found.step.timeline().duration_s
    instant = cluster.inner.model_copy(update={"latency_s": 0.0, "bytes_per_s": float("inf")})
    free = cluster.model_copy(update={"inner": instant, "outer": instant})
    same = Pricing({microbatches: (graph, profile)}, free, "sgd").pipeline(layout, WAYS)
    assert same is not None
    apart = Candidate.of(same, bounds, [ways >> stage & 1 for stage in range(stages)])
    assert found.step.exposed_s(is_message) == found.step_s - apart.step_s
