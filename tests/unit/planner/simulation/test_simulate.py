"""The simulator against closed forms, a longest path, and what must hold for any costs."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import BadOption, InvalidSchedule
from outsize.ir.cluster import Link, parse_cluster
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule, partners
from outsize.ir.timeline import Span, Timeline
from outsize.planner.simulation.simulate import StageCost, bound_s, played, simulate
from outsize.schedules.builders import build
from outsize.schedules.families import built
from outsize.schedules.lower import lower
from outsize.schedules.message import RECEIVES, SENDS, Ends, Message, message_of

FREE = Link(name="free", latency_s=0.0, bytes_per_s=float("inf"))
SIZES = [(1, 1), (1, 4), (2, 1), (2, 4), (4, 4), (3, 6), (5, 2)]
few = settings(max_examples=40, deadline=None, derandomize=True)


@final
@dataclass(frozen=True)
class Case:
    """A lowered schedule with all that `simulate` asks for."""

    schedule: Schedule
    costs: list[StageCost]
    down: dict[tuple[int, int], int]
    up: dict[tuple[int, int], int]

    def run(self, link: Link = FREE) -> Timeline:
        return simulate(self.schedule, self.costs, self.down, self.up, lambda a, b: link)


def chain_case(name: str, stages: int, microbatches: int, costs: list[StageCost], size: int = 0) -> Case:
    down = {(s, s + 1): size for s in range(stages - 1)}
    up = {(b, a): size for a, b in down}
    return Case(lower(build(name, stages, microbatches), down.keys(), up.keys()), costs, down, up)


def random_cost(dice: random.Random) -> StageCost:
    backward_s = dice.uniform(0.1, 4)
    return StageCost(dice.uniform(0.1, 2), backward_s, backward_s * dice.random())


def random_case(name: str, seed: int) -> Case:
    """Two to four stages, chain plus skips, every cost and size of its own."""
    dice = random.Random(seed)
    stages, microbatches = dice.randint(2, 4), dice.randint(1, 6)
    edges = [(a, b) for a in range(stages) for b in range(a + 1, stages) if b == a + 1 or dice.random() < 0.5]
    down = {edge: dice.randint(0, 50) for edge in edges}
    up = {(b, a): dice.randint(0, 50) for a, b in edges if b == a + 1 or dice.random() < 0.5}
    costs = [random_cost(dice) for _ in range(stages)]
    return Case(lower(build(name, stages, microbatches), down.keys(), up.keys()), costs, down, up)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_closed_form_of_pipelines(name: str, stages: int, microbatches: int) -> None:
    timeline = chain_case(name, stages, microbatches, [StageCost(1.0, 2.5)] * stages).run()
    assert timeline.duration_s == pytest.approx((microbatches + stages - 1) * 3.5)
    assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert (timeline.source, timeline.ranks, timeline.samples) == ("predicted", stages, ())


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (3, 3, 6), (4, 3, 9)])
def test_closed_form_of_interleaved(ranks: int, chunks: int, microbatches: int) -> None:
    """The bubble of (p - 1)(f + b) seconds has stages v times as short."""
    stages = ranks * chunks
    edges = {(s, s + 1): 0 for s in range(stages - 1)}
    back = {(b, a): 0 for a, b in edges}
    schedule = lower(build("interleaved", stages, microbatches, ranks), edges.keys(), back.keys())
    timeline = Case(schedule, [StageCost(1.0, 1.0)] * stages, edges, back).run()
    assert timeline.duration_s == pytest.approx(2 * (chunks * microbatches + ranks - 1))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (3, 6), (4, 7)])
@pytest.mark.parametrize(("forward_s", "input_s", "weight_s"), [(1.0, 1.0, 1.0), (2.0, 2.5, 1.0)])
def test_closed_form_of_zero_bubble(
    stages: int, microbatches: int, forward_s: float, input_s: float, weight_s: float
) -> None:
    costs = [StageCost(forward_s, input_s + weight_s, weight_s)] * stages
    timeline = chain_case("zero-bubble", stages, microbatches, costs).run()
    full = microbatches * (forward_s + input_s + weight_s)
    assert timeline.duration_s == pytest.approx(full + (stages - 1) * (forward_s + input_s - weight_s))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_closed_form_of_naive(stages: int, microbatches: int) -> None:
    timeline = chain_case("naive", stages, microbatches, [StageCost(1.0, 2.5)] * stages).run()
    assert timeline.duration_s == pytest.approx(microbatches * stages * 3.5)
    assert timeline.bubble == pytest.approx(1 - 1 / stages)


def test_closed_form_with_links() -> None:
    """Naive: everything is one after the other, so the step is the plain sum."""
    link = Link(name="slow", latency_s=0.25, bytes_per_s=10.0)
    timeline = chain_case("naive", 3, 4, [StageCost(1.0, 2.0)] * 3, size=5).run(link)
    assert timeline.duration_s == pytest.approx(4 * (3 * (1 + 2) + 4 * (0.25 + 0.5)))


def test_a_step_with_seconds_of_its_own_for_each_action() -> None:
    case = chain_case("1f1b", 2, 3, [StageCost(1, 2), StageCost(1, 2)])
    actions = [action for row in case.schedule.actions for action in row if action.kind in COMPUTE]
    even = {action: 1.0 if action.kind is Kind.F else 2.0 for action in actions}
    assert played(case.schedule, even, lambda _: 0.0) == case.run()
    late = even | {Action(1, Kind.F, 1): 5.0}  # on the rank that sets the pace
    assert played(case.schedule, late, lambda _: 0.0).duration_s == case.run().duration_s + 4


def test_spans_of_a_small_step() -> None:
    """Two stages, one microbatch, 3 s on the link each way; the timeline by hand."""
    link = Link(name="slow", latency_s=1.0, bytes_per_s=4.0)
    spans = chain_case("gpipe", 2, 1, [StageCost(1.0, 2.0)] * 2, size=8).run(link).spans
    assert [(s.rank, s.lane, s.action, s.start_s, s.end_s) for s in spans] == [
        (0, "compute", "0F0", 0.0, 1.0),
        (0, "send", "0SEND_F0", 1.0, 4.0),
        (1, "compute", "1F0", 4.0, 5.0),
        (1, "compute", "1B0", 5.0, 7.0),
        (1, "send", "1SEND_B0", 7.0, 10.0),
        (0, "compute", "0B0", 10.0, 12.0),
    ]


def test_transfers_overlap_compute_and_each_wire_moves_one_message() -> None:
    case = chain_case("gpipe", 2, 4, [StageCost(1.0, 1.0)] * 2, size=2)
    spans = case.run(Link(name="slow", latency_s=0.0, bytes_per_s=1.0)).spans
    down = [s for s in spans if s.lane == "send" and s.rank == 0]
    assert [s.start_s for s in down] == [1.0, 3.0, 5.0, 7.0]
    assert any(s.lane == "compute" and s.rank == 0 and s.start_s < down[0].end_s <= s.end_s for s in spans)


def test_a_transfer_waits_until_its_receive_is_posted() -> None:
    late = (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"
    )
    case = Case(Schedule.from_csv(late), [StageCost(1.0, 1.0), StageCost(5.0, 1.0)], {(0, 1): 1}, {(1, 0): 1})
    spans = {s.action: s for s in case.run(Link(name="slow", latency_s=0.0, bytes_per_s=2.0)).spans}
    assert spans["0F1"].end_s == 2.0
    assert spans["0SEND_F1"].start_s == spans["1F0"].end_s == 6.5


def test_links_are_asked_by_rank() -> None:
    case = chain_case("1f1b", 4, 1, [StageCost(1.0, 1.0)] * 4, size=1000)
    cluster = parse_cluster("2x2xcpu")
    spans = simulate(case.schedule, case.costs, case.down, case.up, cluster.link).spans
    seconds = {s.action: s.duration_s for s in spans if s.lane == "send"}
    assert seconds["0SEND_F0"] == pytest.approx(cluster.inner.seconds(1000))
    assert seconds["1SEND_F0"] == pytest.approx(cluster.outer.seconds(1000))
    assert seconds["2SEND_B0"] == pytest.approx(cluster.outer.seconds(1000))


@pytest.mark.parametrize("name", built())
@few
@given(seed=st.integers(0, 10_000))
def test_longest_path_is_the_step_time(name: str, seed: int) -> None:
    case = random_case(name, seed)
    link = Link(name="slow", latency_s=0.1, bytes_per_s=30.0)
    assert case.run(link).duration_s == pytest.approx(longest_path(case, link))


@pytest.mark.parametrize("name", built())
@few
@given(seed=st.integers(0, 10_000))
def test_busy_time_is_the_sum_of_costs_and_no_lane_does_two_things(name: str, seed: int) -> None:
    case = random_case(name, seed)
    timeline = case.run(Link(name="slow", latency_s=0.1, bytes_per_s=30.0))
    for rank, cost in enumerate(case.costs):
        per_microbatch = cost.forward_s + cost.backward_s
        assert timeline.busy_s(rank) == pytest.approx(case.schedule.microbatches * per_microbatch)
    lanes: dict[tuple[int, str, int], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        lanes[span.rank, span.lane, Action.parse(span.action).peer].append(span)
    assert all(_disjoint(spans) for spans in lanes.values())


@few
@given(seed=st.integers(0, 10_000))
def test_pipelines_are_never_slower_than_naive(seed: int) -> None:
    dice = random.Random(seed)
    stages, microbatches = dice.randint(1, 4), dice.randint(1, 6)
    costs = [StageCost(dice.uniform(0.1, 2), dice.uniform(0.1, 4)) for _ in range(stages)]
    link = Link(name="slow", latency_s=0.1, bytes_per_s=30.0)
    naive, gpipe, one = (
        chain_case(name, stages, microbatches, costs, size=20).run(link).duration_s
        for name in ("naive", "gpipe", "1f1b")
    )
    assert one <= naive + 1e-9
    assert gpipe <= naive + 1e-9


@pytest.mark.parametrize("name", built())
@few
@given(seed=st.integers(0, 10_000))
def test_slower_links_never_help(name: str, seed: int) -> None:
    case = random_case(name, seed)
    speeds = [float("inf"), 100.0, 30.0, 5.0]
    times = [case.run(Link(name="l", latency_s=0.0, bytes_per_s=speed)).duration_s for speed in speeds]
    assert all(fast <= slow + 1e-9 for fast, slow in pairwise(times))
    assert times[0] == pytest.approx(bound_s(case.schedule, case.costs))


@pytest.mark.parametrize("name", built())
@few
@given(seed=st.integers(0, 10_000))
def test_more_microbatches_take_longer(name: str, seed: int) -> None:
    dice = random.Random(seed)
    costs = [StageCost(dice.uniform(0.1, 2), dice.uniform(0.1, 4)) for _ in range(dice.randint(1, 4))]
    times = [bound_s(chain_case(name, len(costs), m, costs).schedule, costs) for m in range(1, 7)]
    assert all(fewer < more for fewer, more in pairwise(times))


@few
@given(seed=st.integers(0, 10_000))
def test_bound_is_no_less_than_the_busiest_rank(seed: int) -> None:
    case = random_case("1f1b", seed)
    busiest = max(c.forward_s + c.backward_s for c in case.costs) * case.schedule.microbatches
    assert bound_s(case.schedule, case.costs) >= busiest - 1e-9


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda c: Case(c.schedule, c.costs[:1], c.down, c.up), BadOption, "2 stages, 1 costs"),
        (lambda c: Case(c.schedule, c.costs, {}, c.up), BadOption, "0SEND_F0 has no size; edge_bytes knows"),
        (lambda c: Case(c.schedule, c.costs, c.down, {}), BadOption, "1SEND_B0 has no size; gradient_bytes"),
        (lambda c: Case(edited(c, "0SEND_F0,", ""), c.costs, c.down, c.up), InvalidSchedule, "hangs; 3"),
        (lambda c: Case(edited(c, "0F0", "0LOAD,0F0"), c.costs, c.down, c.up), InvalidSchedule, "0LOAD has"),
    ],
)  # fmt: skip
def test_bad_input(change: Callable[[Case], Case], error: type[Exception], text: str) -> None:
    case = change(chain_case("gpipe", 2, 1, [StageCost(1.0, 1.0)] * 2, size=1))
    with pytest.raises(error, match=text):
        case.run()


def edited(case: Case, old: str, new: str) -> Schedule:
    return Schedule.from_csv(case.schedule.to_csv().replace(old, new, 1))


def longest_path(case: Case, link: Link) -> float:
    """Step time as the heaviest path through cells and transfers, with none of the simulator's code."""
    before: dict[Action | Message, set[Action | Message]] = defaultdict(set)
    wires: dict[tuple[int, int, Kind], list[Message]] = defaultdict(list)
    ends = Ends(case.schedule)
    for row in case.schedule.actions:
        first_of = {backward: forward for forward, backward in partners(row).items()}
        for first, second in pairwise(row):
            before[second].add(first)
        for action in row:
            if action.kind in SENDS:
                wires[action.stage, action.peer, SENDS[action.kind]].append(message_of(action))
            if action.kind in RECEIVES:
                message = message_of(action)
                before[message] |= {action, message.send}
                before[first_of.get(ends.consumer(message), ends.consumer(message))].add(message)
    for queue in wires.values():
        for first, second in pairwise(queue):
            before[second].add(first)
    end: dict[Action | Message, float] = {}
    for node in TopologicalSorter(before).static_order():
        end[node] = max((end[b] for b in before[node]), default=0.0) + _seconds(node, case, link)
    return max(end.values())


def _seconds(node: Action | Message, case: Case, link: Link) -> float:
    if isinstance(node, Message):
        table = case.down if node.kind is Kind.F else case.up
        return link.seconds(table[node.source, node.destination])
    cost = case.costs[node.stage]
    split = {Kind.I: cost.backward_s - cost.weight_s, Kind.W: cost.weight_s}
    return {Kind.F: cost.forward_s, Kind.B: cost.backward_s, **split}.get(node.kind, 0.0)


def _disjoint(spans: list[Span]) -> bool:
    return all(a.end_s <= b.start_s for a, b in pairwise(sorted(spans, key=lambda s: s.start_s)))
