"""What is played of replicas: closed forms, bounds, and the sum that is left where nothing overlaps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graph_of, graphs, parameter, profile_of, unit, value
from torch import Tensor, nn

import outsize
from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan, ScheduleName, stages_from_bounds
from outsize.ir.profile import Profile
from outsize.planner.costs.efficiency import Efficiency
from outsize.planner.costs.parallel_times import WeightCollectives
from outsize.planner.evaluate import played_step as module
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.played_step import BUCKET_BYTES, PlayedStep, is_collective
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.policies.activations import Recompute
from outsize.policies.weights import Weights

Model = tuple[ModelGraph, Profile]
few = settings(max_examples=10, deadline=None, derandomize=True)


def joined(devices: int, kind: str = "h100-80gb", bytes_per_s: float = 100.0) -> Cluster:
    """Links that take a quarter of a second and so many bytes a second."""
    cluster = make_cluster(f"{devices}x{kind}", kind, 1, devices)
    update = {"latency_s": 0.25, "bytes_per_s": bytes_per_s, "hop_s": 0.25, "switch_bytes_per_s": None}
    link = cluster.inner.model_copy(update=update)
    return cluster.model_copy(update={"inner": link, "outer": link})


def cut(
    model: Model, layout: Layout, cluster: Cluster, bounds: tuple[int, ...], again: Recompute = "none"
) -> Candidate:
    pipeline = Pricing({layout.captured: model}, cluster, "sgd").pipeline(layout, (again,))
    assert pipeline is not None
    return Candidate.of(pipeline, bounds, [0] * layout.stages)


def step_of(model: Model, layout: Layout, cluster: Cluster) -> PlayedStep:
    """A single stage."""
    return cut(model, layout, cluster, (0, len(model[0].units))).step


@pytest.fixture(autouse=True, scope="module")
def apart() -> Iterator[None]:
    """Nothing is slower beside a collective, and copies cost nothing, but where a test is about them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Efficiency, "copied_s", lambda *_: 0.0)
        patch.setattr(Efficiency, "beside_s", lambda _, compute_s, __: compute_s)
        yield


COPY_S, CROWDED = 0.125, 0.189  # arXiv 2507.03114
CORE = 0.66  # the share of a collective in which it has the core of a CPU
as_it_is = Efficiency.beside_s


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of 100 bytes take `COPY_S`, and computing beside a collective is slower."""
    monkeypatch.setattr(Efficiency, "copied_s", lambda _, size, __: COPY_S * size / 100)
    monkeypatch.setattr(Efficiency, "beside_s", as_it_is)


@pytest.mark.usefixtures("together")
def test_blocks_are_slower_beside_their_collectives_and_copies() -> None:
    """Passes of 1 and 2 s beside a gather of 0.75 s, and in the backward beside as long a scatter."""
    layout = Layout(Axes(dp_shard=2), 1, "1f1b", 1, 2, "sharded")
    passes_s = 4 * (1 + CROWDED * 0.75 + COPY_S) + 4 * (2 + CROWDED * 1.5 + 2 * COPY_S)
    assert step_of(chain([1.0] * 4), layout, joined(2)).seconds() == pytest.approx(passes_s + 2 * 0.75)


@pytest.mark.usefixtures("together")
def test_whole_weights_are_beside_their_collectives_once_a_step() -> None:
    """Of three microbatches one gathers each block in its forward, and one scatters in its backward; weights
    and gradients are copied as often.
    """
    layout = Layout(Axes(dp_shard=2), 1, "1f1b", 3, 6)
    passes_s = 36 + 4 * (CROWDED * 1.5 + 2 * COPY_S)
    assert step_of(chain([1.0] * 4), layout, joined(2)).seconds() == pytest.approx(passes_s + 2 * 0.75)


@pytest.mark.usefixtures("together")
def test_the_last_backward_is_slower_beside_its_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buckets of 200 bytes: a ring of two sums each in 2 x (0.25 + 1) s, the first one within the
    backward, the second one behind it. Gradients are copied in and out.
    """
    monkeypatch.setattr(module, "BUCKET_BYTES", 200)
    layout = Layout(Axes(dp_replicate=2), 1, "1f1b", 1, 2)
    played = step_of(chain([1.0] * 4), layout, joined(2))
    assert played.costs[0].backward_s == pytest.approx(8 + CROWDED * 2.5 + 2 * 4 * COPY_S)


@pytest.mark.usefixtures("together")
def test_on_a_cpu_a_gather_takes_the_core_and_sums_are_waited_for() -> None:
    """The backward has no gather of its own and is not slower for the sum, which begins when it ends."""
    layout = Layout(Axes(dp_shard=2), 1, "1f1b", 1, 2)
    costs = step_of(chain([1.0] * 4), layout, joined(2, "cpu")).costs
    assert [c.forward_s for c in costs] == pytest.approx([1 + CORE * 0.75 + COPY_S] * 4)
    assert [c.backward_s for c in costs] == pytest.approx([2 + COPY_S] * 4)


def test_the_core_of_a_cpu_copies_what_it_sends() -> None:
    """Two units of 1 and 2 s and messages of 8 bytes, 0.33 s. An accelerator sends beside what it computes:
    two microbatches take F, F, F, B, B, B and what is sent there and back once. A CPU sends four times.
    """
    layout, bounds = Layout(Axes(pp=2), 2, "gpipe", 2, 2), (0, 1, 2)
    model, sent_s = chain([1.0, 1.0]), 0.25 + 8 / 100
    beside = cut(model, layout, joined(2), bounds).step.seconds()
    assert beside == pytest.approx(3 * (1 + 2) + 2 * sent_s)
    assert cut(model, layout, joined(2, "cpu"), bounds).step.seconds() == pytest.approx(9 + 4 * sent_s)


def test_gradients_of_a_tied_weight_are_not_put_off() -> None:
    """The last stage computes them with those of its inputs, because it sends them to the first one."""
    units = [unit(0, ("tied",)), unit(1, ("own",)), unit(2, ("tied",))]
    values = [value(0, 0, (1,), 8), value(1, 1, (2,), 8)]
    weights = [parameter("tied", size_bytes=100), parameter("own", size_bytes=100)]
    graph = graph_of(units, values, weights)
    layout = Layout(Axes(pp=2), 2, "zero-bubble", 2, 2)
    estimate = cut((graph, profile_of(graph, [1.0, 2.0, 4.0])), layout, joined(2), (0, 1, 3))
    assert [cost.weight_s for cost in estimate.costs] == [1.0, 2.0]
    assert [cost.backward_s for cost in estimate.costs] == [2.0, 12.0]


def test_states_alone_are_slower_than_replicas_on_cpus() -> None:
    """Whose collectives use the cores that compute; gloo sums whole tensors to give each rank its part. Real
    steps over two processes took 1.26 times as long (benchmarks/axes).
    """
    model, cluster = chain([1.0] * 8), joined(2, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Efficiency, "beside_s", as_it_is)
        states = step_of(model, Layout(Axes(dp_shard=2), 1, "1f1b", 4, 8), cluster).seconds()
        replicas = step_of(model, Layout(Axes(dp_replicate=2), 1, "1f1b", 4, 8), cluster).seconds()
    assert states > replicas > 4 * 24


def test_blocks_are_gathered_one_ahead() -> None:
    """Four units of 1 s and 100 bytes, each a block, over two: 0.75 s a gather and a scatter. Only the first
    gather and the last scatter are seen; at 10 B/s, 5.25 s each, the queue of 7 gathers and 4 scatters sets
    the pace, and waits where the pass turns: the block there is whole, and the next one is asked for behind
    its forward.
    """
    layout = Layout(Axes(dp_shard=2), 1, "1f1b", 1, 2, "sharded")
    model = chain([1.0] * 4)
    assert step_of(model, layout, joined(2)).seconds() == pytest.approx(12 + 2 * 0.75)
    assert step_of(model, layout, joined(2, bytes_per_s=10.0)).seconds() == pytest.approx(11 * 5.25 + 1)


def test_a_cpu_waits_for_each_scatter() -> None:
    """Which is an all-reduce there: 2 x (0.25 + 0.5) s for each of four blocks."""
    layout = Layout(Axes(dp_shard=2), 1, "1f1b", 1, 2, "sharded")
    model, cluster = chain([1.0] * 4), joined(2, "cpu")
    assert step_of(model, layout, cluster).seconds() == pytest.approx(12 + 0.75 + 4 * 1.5)


def test_whole_weights_are_gathered_and_scattered_once_a_step() -> None:
    layout = Layout(Axes(dp_shard=2), 1, "1f1b", 3, 6)
    step = step_of(chain([1.0] * 4), layout, joined(2))
    names = [span.action for span in step.timeline().spans if span.lane == "load"]
    assert sorted(names) == sorted(f"{s}{kind}" for s in range(4) for kind in ("UNSHARD", "REDUCE_GRAD"))
    assert step.seconds() == pytest.approx(3 * 12 + 2 * 0.75)


def test_a_stack_of_kernels_may_sum_more_gradients_together() -> None:
    """Five blocks of 100 bytes, of which 200 or more, and 120 for each rank, are gathered and scattered
    together: from the last unit on three of them, and the other two.
    """
    graph, profile = chain([1.0] * 5)
    model = graph.model_copy(update={"bucket_bytes": (200, 120)}), profile
    step = step_of(model, Layout(Axes(dp_shard=2), 1, "1f1b", 1, 2), joined(2))
    names = [span.action for span in step.timeline().spans if span.lane == "load"]
    assert sorted(names) == ["0REDUCE_GRAD", "0UNSHARD", "1REDUCE_GRAD", "1UNSHARD"]
    assert [cost.forward_s for cost in step.costs] == [2, 3]
    replicas = step_of(model, Layout(Axes(dp_replicate=2), 1, "1f1b", 1, 2), joined(2))
    assert len(replicas.buckets[0]) == 2


def test_buckets_leave_within_the_last_backward() -> None:
    """Three units of a bucket each, backwards of 2 s, over two at 10 MB/s: 3 s for each sum. The first is
    complete at 2 s of the backward, so the queue ends at 2 + 9 s, 5 s behind the backward.
    """
    layout, model = Layout(Axes(dp_replicate=2), 1, "1f1b", 2, 4), chain([1.0] * 3, weight_bytes=BUCKET_BYTES)
    step = step_of(model, layout, joined(2, bytes_per_s=10e6))
    assert step.seconds() == pytest.approx(2 * 9 + 5)
    assert step.exposed_s(is_collective) == pytest.approx(5)
    starts = [span.start_s for span in step.timeline().spans if span.action == "0REDUCE_GRAD"]
    assert starts == pytest.approx([9 + 3 + 2, 9 + 3 + 5, 9 + 3 + 8])


def test_a_stage_that_recomputes_everything_has_its_first_gradients_late() -> None:
    """3 s of forwards again, then backwards as before."""
    layout, model = Layout(Axes(dp_replicate=2), 1, "1f1b", 2, 4), chain([1.0] * 3, weight_bytes=BUCKET_BYTES)
    step = cut(model, layout, joined(2, bytes_per_s=10e6), (0, 3), "full").step
    starts = [span.start_s for span in step.timeline().spans if span.action == "0REDUCE_GRAD"]
    assert starts[0] == pytest.approx(12 + 3 + 3 + 2)


def test_small_gradients_are_one_bucket_behind_the_backward() -> None:
    layout = Layout(Axes(dp_replicate=2), 1, "1f1b", 2, 4)
    step = step_of(chain([1.0] * 3), layout, joined(2))
    assert step.exposed_s(is_collective) == pytest.approx(2 * (0.25 + 1.5))


def test_halves_of_backwards_have_all_gradients_at_their_end() -> None:
    model = chain([1.0] * 4, weight_bytes=BUCKET_BYTES)
    for schedule, hidden in (("1f1b", True), ("zero-bubble", False)):
        layout = Layout(Axes(pp=2, dp_replicate=2), 2, schedule, 2, 4)
        found = cut(model, layout, joined(4, bytes_per_s=1e9), (0, 2, 4)).step.timeline()
        ends = max(s.end_s for s in found.spans if s.rank == 0 and s.lane == "compute")
        assert (min(s.start_s for s in found.spans if s.action == "0REDUCE_GRAD") < ends) == hidden


AXES = [
    *((Axes(dp_shard=2), weights) for weights in ("sharded", "resident")),
    *((Axes(pp=2, dp_shard=2), weights) for weights in ("sharded", "resident")),
    *((Axes(pp=2, dp_replicate=2, dp_shard=2), weights) for weights in ("sharded", "resident")),
    (Axes(dp_replicate=2), "resident"),
    (Axes(pp=3, dp_replicate=2), "resident"),
]


@pytest.mark.parametrize(("axes", "weights"), AXES)
@pytest.mark.parametrize("kind", ["cpu", "h100-80gb"])
@few
@given(graphs(max_units=5), st.integers(1, 3), st.sampled_from((1.0, 20.0, 1e4)))
def test_no_cut_is_played_faster_than_its_bounds(
    axes: Axes, weights: Weights, kind: str, model: Model, microbatches: int, speed: float
) -> None:
    """The bound of the collectives, and that of the work; without collectives the work alone is left."""
    pp, n = axes.pp, len(model[0].units)
    layout = Layout(axes, pp, "1f1b", microbatches, microbatches * axes.replicas, weights)
    cluster = joined(axes.world_size, kind, speed)
    tables = Pricing({layout.captured: model}, cluster, "sgd")
    bound_s, pipeline = tables.bounds.collectives_s(layout), tables.pipeline(layout, ("none",))
    bound_s = max(bound_s, tables.bounds.bound(layout, ("none",)).sharpened())
    assert pipeline is not None
    for inner in combinations(range(1, n), pp - 1):
        found = Candidate.of(pipeline, (0, *inner, n), [0] * pp)
        step_s = found.step.seconds()
        assert found.least_s <= found.step_s * (1 + 1e-9)
        assert max(bound_s, tables.units.work(layout).least_s(pp, microbatches)) <= step_s * (1 + 1e-9)
        whole = Layout(Axes(pp=pp), pp, "1f1b", microbatches, microbatches)
        alone = cut(model, whole, joined(pp, kind, speed), found.bounds)
        insist_on_laws(found.step, alone.step.seconds())


@pytest.mark.parametrize(("axes", "weights"), [*AXES, (Axes(pp=3), "resident")])
@pytest.mark.parametrize("kind", ["cpu", "h100-80gb"])
@pytest.mark.parametrize("chunks", [1, 2])
@few
@given(graphs(max_units=6), st.integers(1, 3), st.sampled_from((1.0, 20.0, 1e4)))
def test_no_cut_is_played_faster_than_the_longest_path_of_another(
    axes: Axes, weights: Weights, kind: str, chunks: int, model: Model, rounds: int, speed: float
) -> None:
    """Whether both wait for the same or not. Its own longest path is the step, where a rank has one stage."""
    m, stages = rounds * axes.pp, axes.pp * chunks
    schedule: ScheduleName = "1f1b" if chunks == 1 else "interleaved"
    layout = Layout(axes, stages, schedule, m, m * axes.replicas, weights)
    pipeline = Pricing({layout.captured: model}, joined(axes.world_size, kind, speed), "sgd").pipeline(
        layout, ("none", "full")
    )
    assert pipeline is not None
    n = len(model[0].units)
    cuts = list(combinations(range(1, n), stages - 1))[:6]
    played = [Candidate.of(pipeline, (0, *inner, n), [way] * stages) for inner in cuts for way in (0, 1)]
    for found, other in product(played, repeat=2):
        assert found.least_beside(other) <= found.step_s * (1 + 1e-9)
    for found in played if chunks == 1 else ():
        assert found.least_beside(found) == pytest.approx(found.step_s)


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "naive"])
@few
@given(
    st.lists(st.sampled_from((0.25, 1.0, 4.0)), min_size=9, max_size=12),
    st.integers(1, 6),
    st.sampled_from((30.0, 100.0, 1000.0)),
    st.integers(0, 2**16),
)
def test_no_chain_is_played_faster_than_its_queue(
    pp: int, schedule: ScheduleName, costs: list[float], microbatches: int, speed: float, draw: int
) -> None:
    """Stages of many blocks, whose gathers take longer than they compute, or not."""
    if schedule == "naive" and pp > 1:
        microbatches = min(microbatches, 3)
    layout = Layout(Axes(pp=pp, dp_shard=2), pp, schedule, microbatches, 2 * microbatches, "sharded")
    model = chain(costs, weight_bytes=100)
    tables = Pricing({layout.captured: model}, joined(2 * pp, bytes_per_s=speed), "sgd")
    pipeline, n = tables.pipeline(layout, ("none", "full")), len(costs)
    bound_s = tables.bounds.bound(layout, ("none", "full")).sharpened()
    assert pipeline is not None
    cuts = list(combinations(range(1, n), pp - 1))
    for inner in cuts[draw % 7 :: 7] or cuts:
        for ways in ([0] * pp, [1] * pp):
            found = Candidate.of(pipeline, (0, *inner, n), ways)
            assert max(bound_s, found.least_s) <= found.step_s * (1 + 1e-9)


@few
@given(graphs(max_units=8), st.sampled_from((1.0, 20.0, 1e4)), st.integers(0, 2**16))
def test_stages_that_are_whole_take_no_longer(model: Model, speed: float, draw: int) -> None:
    """Skips, branches and tied weights, with several stages on a rank: what is played first is a bound."""
    layout = Layout(Axes(pp=2, dp_shard=2), 4, "interleaved", 2, 4, "sharded")
    n = len(model[0].units)
    cuts = list(combinations(range(1, n), 3))
    for inner in cuts[draw % 5 :: 5]:
        found = cut(model, layout, joined(4, bytes_per_s=speed), (0, *inner, n))
        assert found.least_s <= found.step_s * (1 + 1e-9)


def test_whole_stages_are_a_tight_bound_where_collectives_are_hidden() -> None:
    """Four blocks on two ranks: the pipeline's own law, which a step without links takes."""
    layout = Layout(Axes(pp=2, dp_shard=2), 2, "1f1b", 4, 8, "sharded")
    found = cut(chain([1.0] * 4), layout, joined(4, bytes_per_s=1e12), (0, 2, 4))
    no_message_s = sum((4 + 2 - 1) * passed_s for passed_s in (2.0, 4.0))
    assert no_message_s <= found.least_s < found.step_s
    assert len(found.step.costs) > len(found.costs)


def test_gathers_pace_a_pipeline() -> None:
    """Sixty-four blocks of two units that are gathered in 10 s and computed in next to nothing, on two
    stages: the bound is above what an average rank gathers, and below the step.
    """
    graph, _ = chain([0.001] * 128)
    units = [u.model_copy(update={"name": f"h.{u.index // 2}.{u.index % 2}.a"}) for u in graph.units]
    graph = graph.model_copy(update={"units": tuple(units)})
    layout = Layout(Axes(pp=2, dp_shard=2), 2, "1f1b", 2, 4, "sharded")
    model = graph, profile_of(graph, [0.001] * 128)
    tables = Pricing({4: model}, joined(4, bytes_per_s=10.0), "sgd")
    pipeline = tables.pipeline(layout, ("none",))
    assert pipeline is not None
    bound_s = tables.bounds.bound(layout, ("none",)).sharpened()
    step_s = Candidate.of(pipeline, (0, 64, 128), [0, 0]).step_s
    assert 1.2 * tables.bounds.collectives_s(layout) < bound_s <= step_s
    assert step_s < 1.2 * bound_s


def insist_on_laws(step: PlayedStep, alone_s: float) -> None:
    """No rank's collectives overlap; a step is no shorter than a lane, and no longer than all in a row."""
    spans = step.timeline().spans
    for rank in range(step.layout.axes.pp):
        for lane in ("compute", "load"):
            own = sorted((s for s in spans if (s.rank, s.lane) == (rank, lane)), key=lambda s: s.start_s)
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(own))
            assert sum(s.duration_s for s in own) <= step.seconds() * (1 + 1e-9)
    if len(step.counts) == len(step.costs):  # Blocks on two ranks send messages of their own.
        moved_s = sum(s.duration_s for s in spans if s.lane == "load")
        assert alone_s <= step.seconds() * (1 + 1e-9) <= (alone_s + moved_s) * (1 + 2e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("axes", [Axes(dp_shard=2), Axes(pp=2, dp_shard=2)])
def test_a_part_of_the_microbatches_says_the_whole(
    schedule: ScheduleName, axes: Axes, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = chain([1.0, 0.5, 2.0, 1.5])
    layout = Layout(axes, axes.pp, schedule, 40, 80, "sharded")
    bounds = (0, 4) if axes.pp == 1 else (0, 2, 4)
    monkeypatch.setattr(module, "BLOCKS_PLAYED", 1)
    for speed in (10.0, 100.0, 1000.0):
        part = cut(model, layout, joined(4, bytes_per_s=speed), bounds).step
        assert part.simulated < 40
        with monkeypatch.context() as patch:
            patch.setattr(module, "BLOCKS_PLAYED", 10**6)
            whole_s = part.seconds()
        assert part.seconds() == pytest.approx(whole_s, rel=2e-3)


def test_devices_of_another_kind_have_their_own_prices() -> None:
    layout = Layout(Axes(dp_shard=2), 1, "1f1b", 1, 2, "sharded")
    slow, quick = (WeightCollectives(layout, joined(2, bytes_per_s=s)) for s in (10.0, 100.0))
    assert slow.gather_s(100) == 5.25
    assert quick.gather_s(100) == 0.75


@pytest.mark.parametrize(("schedule", "pp"), [("gpipe", 1), ("gpipe", 2), ("1f1b", 2)])
def test_activations_leave_and_come_back_as_they_are_played(schedule: ScheduleName, pp: int) -> None:
    """The actions of a measured step, in their order, are those of the rows that are played."""
    torch.manual_seed(0)
    width, count = 8, 5
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))
    x = torch.randn(count, width)
    graph = outsize.capture(net, (x[:1],), loss_fn=Tensor.sum)
    bounds = tuple(len(graph.units) * stage // pp for stage in range(pp + 1))
    plan = Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{pp}xcpu",
        axes=Axes(pp=pp),
        batch_size=count,
        microbatches=count,
        schedule=schedule,
        recompute="offload",
        stages=stages_from_bounds(graph, bounds, ("cpu",) * pp),
    )
    engine = outsize.parallelize(net, (x,), plan=plan, loss_fn=Tensor.sum)
    engine.step(x)
    ran = engine.timeline().spans
    model = graph, profile_of(graph, [1.0] * len(graph.units))
    layout = Layout(plan.axes, pp, schedule, count, count)
    rows = cut(model, layout, joined(pp, "cpu"), bounds, "offload").step.schedule(count).actions
    for rank, row in enumerate(rows):
        own = [s.action for s in ran if s.rank == rank and s.lane in ("compute", "load")]
        assert own == [str(action) for action in row]
    assert any("OFFLOAD" in str(action) for action in rows[0])
