"""Units on several devices: figures by hand, and the products of a Llama."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planner_graphs import chain, graph_of, parameter, profile_of, value
from tiny_transformers import SMALL, transformers

from outsize.capture.graph.build import build_graph
from outsize.capture.graph.tensor_parallel import with_styles
from outsize.capture.recording.fallbacks import record
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.graph import ModelGraph, OpFamily, Parameter, ShardedFraction, Unit, Value, Work
from outsize.ir.plan import Axes, ScheduleName
from outsize.ir.profile import Profile
from outsize.ir.units.tensor_styles import TensorStyles
from outsize.planner.costs.efficiency import default_of
from outsize.planner.costs.parallel_times import Sharing, WeightCollectives, routed_times, split_times
from outsize.planner.costs.roofline import roofline, seconds
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.layout.layout import Layout
from outsize.policies.weights import Weights


def cluster(name: str = "4xh100-80gb", latency_s: float = 0.25, bytes_per_s: float = 100.0) -> Cluster:
    """Links of round figures."""
    found = parse_cluster(name)
    link = found.inner.model_copy(
        update={
            "latency_s": latency_s,
            "bytes_per_s": bytes_per_s,
            "hop_s": latency_s,
            "switch_bytes_per_s": None,
        }
    )
    return found.model_copy(update={"inner": link})


@pytest.mark.parametrize(
    ("axes", "sent", "ranks"),
    [
        (Axes(ep=2), 2 * 400, [0, 1]),
        (Axes(ep=4), 3 * 400, [0, 1, 2, 3]),
        (Axes(ep=2, tp=2), 3 * 400 // 2, [0, 1, 2, 3]),
        (Axes(ep=2, cp=2), 2 * 400 // 2, [0, 2]),
    ],
)
def test_rows_are_sent_to_the_ranks_of_their_experts_and_back(
    axes: Axes, sent: int, ranks: list[int]
) -> None:
    """The smaller of both forms, of this rank's part of the tokens; all other units are as they were."""
    graph, _ = chain([1.0, 1.0, 1.0])
    units = [
        u.model_copy(update={"routed_bytes": 400, "choices": 3}) if u.index == 1 else u for u in graph.units
    ]
    graph = graph.model_copy(update={"units": tuple(units)})
    alone = UnitSeconds.from_rows([[1.0, 1.0, 0.0]] * 3)
    found = routed_times(graph, alone, axes, cluster())
    n = len(ranks)
    # There and back: n - 1 hops of a quarter second, and what a ring sends at 100 bytes a second.
    wait_s = 2 * ((n - 1) * 0.25 + sent * (n - 1) / n / 100)
    assert (found.forward - alone.forward).tolist() == pytest.approx([0, wait_s, 0])
    assert (found.backward_input - alone.backward_input).tolist() == pytest.approx([0, wait_s, 0])


def test_a_rank_reads_the_weights_of_its_own_experts() -> None:
    """Products that wait for 90 of 100 GB of weights take less than half of the time where a rank has a third
    of nine experts; products that wait for their flops, and other units, take as long as before.
    """
    graph, _ = chain([1.0, 1.0, 1.0])
    moved = Work(family="matmul", dtype="bfloat16", flops=0, moved_bytes=100 * 10**9)
    busy = moved.model_copy(update={"flops": 10**18})
    experts = graph.units[1].model_copy(
        update={"routed_bytes": 1, "choices": 1, "forward": (moved,), "backward_input": (busy,)}
    )
    weight = graph.parameters[1].model_copy(update={"experts": 9, "size_bytes": 90 * 10**9})
    changed = {
        "units": (graph.units[0], experts, graph.units[2]),
        "parameters": (graph.parameters[0], weight, graph.parameters[2]),
    }
    alone, fast = UnitSeconds.from_rows([[1.0, 1.0, 1.0]] * 3), cluster(latency_s=0.0, bytes_per_s=1e12)
    found = routed_times(ModelGraph(**{**dict(graph), **changed}), alone, Axes(ep=3), fast)
    less = moved.model_copy(update={"moved_bytes": 40 * 10**9})
    share = seconds([less], fast.devices[0]) / seconds([moved], fast.devices[0])
    assert share < 0.5
    assert found.forward.tolist() == pytest.approx([1.0, share, 1.0], abs=1e-9)
    assert found.backward_input.tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-9)
    assert found.backward_weight.tolist() == [1.0, 1.0, 1.0]


SUMS: dict[str | None, int] = {"o": 400, "down": 1000}


def work(flops: int, family: OpFamily = "matmul") -> Work:
    return Work(family=family, dtype="bfloat16", flops=flops, moved_bytes=0)


def made_of(index: int, family: OpFamily, flops: int, weight: str | None = None) -> Unit:
    works = (work(flops, family),)
    return Unit(
        index=index,
        name=weight or f"op.{index}",
        kind="Linear" if weight else "Op",
        parameters=(weight,) if weight else (),
        buffer_bytes=0,
        flops=flops,
        moved_bytes=1,
        saved_bytes=0,
        forward=works,
        backward_input=works,
        backward_weight=works if weight else (),
        divided=ShardedFraction(work=1.0, forward_sum=SUMS.get(weight, 0), backward_sum=SUMS.get(weight, 0)),
    )


def matrix(name: str, *shape: int) -> Parameter:
    return parameter(name, size_bytes=16).model_copy(update={"shape": shape})


BLOCK: tuple[tuple[str, OpFamily, str | None, tuple[int, ...]], ...] = (
    ("embed", "embedding", "embed", ()),
    ("norm", "normalisation", "norm", (0,)),
    ("q", "matmul", "q", (1,)),
    ("k", "matmul", "k", (1,)),
    ("v", "matmul", "v", (1,)),
    ("attention", "attention", None, (2, 3, 4)),
    ("o", "matmul", "o", (5,)),
    ("add", "elementwise", None, (0, 6)),
    ("gate", "matmul", "gate", (7,)),
    ("up", "matmul", "up", (7,)),
    ("times", "elementwise", None, (8, 9)),
    ("down", "matmul", "down", (10,)),
    ("add2", "elementwise", None, (7, 11)),
    ("head", "matmul", "head", (12,)),
)


def block(flops: int = 10**15) -> ModelGraph:
    """One layer of a Llama between its embedding and its head; every value has 1,000 bytes but o's 400."""
    units = [made_of(at, family, flops, weight) for at, (_, family, weight, _) in enumerate(BLOCK)]
    users: dict[int, list[int]] = {}
    for at, (*_, given) in enumerate(BLOCK):
        for producer in given:
            users.setdefault(producer, []).append(at)
    values: list[Value] = [
        value(i, made, tuple(by), 400 if BLOCK[made][0] == "o" else 1000)
        for i, (made, by) in enumerate(sorted(users.items()))
    ]
    shapes = {name: (4,) if name == "norm" else (2, 2) for *_, name, _ in BLOCK if name}
    at = [name for name, *_ in BLOCK].index("attention")
    units[at] = units[at].model_copy(update={"row_gather_bytes": 2000})
    graph = graph_of(units, values, [matrix(name, *shape) for name, shape in shapes.items()])
    return graph.model_copy(update={"tensor": TensorStyles(modules=(), divided=())})


def seconds_of(found: Profile) -> dict[str, tuple[float, float, float]]:
    names = (name for name, *_ in BLOCK)
    costs = ((c.forward_s, c.backward_input_s, c.backward_weight_s) for c in found.units)
    return dict(zip(names, costs, strict=True))


def spread_profile(graph: ModelGraph, profile: Profile, layout: Layout, among: Cluster) -> Profile:
    return split_times(Sharing.of(graph), UnitSeconds.of(profile), layout, among).written(profile)


def test_a_captured_llama_adds_up_twice_in_a_layer() -> None:
    layers = range(2)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": len(layers)})
    )
    tokens = torch.zeros(2, 9, dtype=torch.long)
    given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    graph = with_styles(build_graph(record(model, (), given), model), model)
    hidden = 2 * 9 * SMALL["hidden_size"] * 4
    pairs = [(f"layers.{i}.self_attn.o_proj", f"layers.{i}.mlp.down_proj") for i in layers]
    sums = {u.name: u.divided.forward_sum for u in graph.units if u.divided.forward_sum == hidden}
    assert list(sums) == ["model.embed_tokens", *(f"model.{name}" for pair in pairs for name in pair)]
    assert sum(u.divided.backward_sum for u in graph.units) == hidden * (
        2 * len(layers) + 1
    )  # and the head's
    assert {u.name for u in graph.units if u.divided.work == 0} >= {"model.norm", "model.embed_tokens"}


def test_two_devices_take_half_and_add_up_after_the_second_product() -> None:
    """A ring of two: 2 x (0.25 s + half the bytes at 100 B/s)."""
    graph = block()
    profile = profile_of(graph, [1.0] * len(BLOCK))
    layout = Layout(Axes(pp=2, tp=2), 2, "1f1b", 2, 2)
    found = seconds_of(spread_profile(graph, profile, layout, cluster()))
    assert found.pop("o") == pytest.approx((5.0, 5.0, 0.5), rel=1e-3)
    assert found.pop("down") == pytest.approx((11.0, 11.0, 0.5), rel=1e-3)
    for name, passes in found.items():
        assert passes == pytest.approx((0.5, 0.5, 0.5), rel=1e-3), name


def test_half_of_a_small_product_takes_almost_as_long() -> None:
    graph = block(flops=10**6)
    layout = Layout(Axes(pp=2, tp=2), 2, "1f1b", 2, 2)
    found = seconds_of(spread_profile(graph, profile_of(graph, [1.0] * len(BLOCK)), layout, cluster()))
    assert 0.99 < found["q"][0] < 1.0


def test_a_share_that_is_launched_slower_than_it_runs_waits_for_the_host() -> None:
    """Both ranks launch as many ops as one device would: halves of what is just long enough are too short."""
    found = parse_cluster("2xa100-80gb")
    curves = default_of(found.devices[0])
    host_s = curves.host_s
    flops = int(host_s * found.devices[0].flops("bfloat16"))
    units = tuple(made_of(index, "matmul", flops) for index in range(4))
    weight = Parameter(names=("w",), shape=(1,), dtype="bfloat16", size_bytes=2, trainable=True)
    graph = ModelGraph(model="m", fingerprint="f", batch_size=1, units=units, values=(), parameters=(weight,))
    alone = UnitSeconds.of(roofline(graph, found.devices[0]))
    assert alone.total.min() > 2 * host_s
    shared = split_times(Sharing.of(graph), alone, Layout(Axes(tp=2), 1, "1f1b", 1, 1), found)
    half_s = seconds((work(flops // 2),), found.devices[0])
    assert shared.total.sum() == pytest.approx(4 * 2 * (host_s + curves.lateness(2) * half_s), rel=1e-3)


def test_a_collective_is_a_kernel_to_launch_and_makes_ranks_wait_for_the_last() -> None:
    """Four layers that wait for their host: one all-reduce each way has a launch of its own in each."""
    found, works = parse_cluster("8xa100-80gb"), (work(10**6),)
    curves = default_of(found.devices[0])
    sums = ShardedFraction(work=1.0, forward_sum=8, backward_sum=8)
    units = tuple(
        made_of(i, "matmul", 10**6).model_copy(
            update={"name": f"layers.{i}", "backward_input": works, "divided": sums}
        )
        for i in range(4)
    )
    graph = ModelGraph(model="m", fingerprint="f", batch_size=1, units=units, values=(), parameters=())
    alone = UnitSeconds.of(roofline(graph, found.devices[0]))

    def seconds_of_layer(tp: int) -> float:
        layout = Layout(Axes(tp=tp), 1, "1f1b", 1, 1)
        return split_times(Sharing.of(graph), alone, layout, found).total.sum() / 4

    assert seconds_of_layer(2) > 4 * curves.host_s
    later = curves.lateness(8) - curves.lateness(2)
    assert seconds_of_layer(8) - seconds_of_layer(2) > later * curves.launch_s


def test_two_devices_take_half_of_the_tokens_and_gather_keys_and_values() -> None:
    """Keys and values of 2,000 bytes: 0.25 s and half of them at 100 B/s, beside 0.5 s of compute.

    Behind the backward their gradients are scattered, which is as long.
    """
    graph = block()
    profile = profile_of(graph, [1.0] * len(BLOCK))
    layout = Layout(Axes(cp=2), 1, "1f1b", 1, 1)
    found = seconds_of(spread_profile(graph, profile, layout, cluster()))
    assert found.pop("attention") == pytest.approx((0.5 + 10.25, 0.5 + 10.25, 0.5), rel=1e-3)
    for name, passes in found.items():
        assert passes == pytest.approx((0.5, 0.5, 0.5), rel=1e-3), name
    quick = seconds_of(spread_profile(graph, profile, layout, cluster(latency_s=0.0, bytes_per_s=1e9)))
    assert quick["attention"] == pytest.approx((0.5, 0.5, 0.5), rel=1e-3)


def test_tokens_and_layers_may_both_be_split() -> None:
    """Each of two times two: half of the heads is gathered, the pair adds up half of the tokens."""
    graph = block()
    layout = Layout(Axes(cp=2, tp=2), 1, "1f1b", 1, 1)
    found = seconds_of(spread_profile(graph, profile_of(graph, [1.0] * len(BLOCK)), layout, cluster()))
    assert found["attention"][0] == pytest.approx(0.25 + 5.25, rel=1e-3)
    assert found["o"] == pytest.approx((0.25 + 2.5, 0.25 + 2.5, 0.25), rel=1e-3)
    assert found["q"] == pytest.approx((0.25, 0.25, 0.25), rel=1e-3)


def test_units_that_nobody_looked_into_are_divided() -> None:
    graph, profile = chain([1.0, 2.0])
    found = spread_profile(graph, profile, Layout(Axes(tp=4), 1, "1f1b", 1, 1), cluster())
    assert [(c.forward_s, c.backward_s) for c in found.units] == [(0.25, 0.5), (0.5, 1.0)]


@pytest.mark.parametrize(
    ("axes", "seconds"),
    [
        (Axes(dp_replicate=2), 10.5),
        (Axes(tp=2, dp_replicate=2), 10.5),
        (Axes(dp_shard=4), 8.25),
        (Axes(dp_replicate=2, dp_shard=2), 5.25 + 5.5),
        (Axes(cp=4), 16.5),
        (Axes(cp=2, dp_replicate=2), 16.5),
        (Axes(cp=2, dp_shard=2), 0.75 + 7.5),
        (Axes(cp=2, tp=2), 10.5),
        (Axes(tp=4), 0.0),
    ],
)
def test_the_last_gradients_of_a_step_are_scattered_and_summed(axes: Axes, seconds: float) -> None:
    """1,000 bytes at 100 B/s: a ring of two sums in 2 x (0.25 + 5), one of four in 2 x (0.75 + 7.5), which
    are two halves where it scatters. Shards add their halves among two: 2 x (0.25 + 2.5).
    """
    prices = WeightCollectives(Layout(axes, 1, "1f1b", 1, axes.replicas), cluster())
    assert prices.reduce_s(1000, last=True) == pytest.approx(seconds)
    scatter_s = {1: 0.0, 2: 5.25, 4: 8.25}[axes.dp_shard * axes.cp if axes.dp_shard > 1 else 1]
    assert prices.reduce_s(1000, last=False) == prices.gather_s(1000) == pytest.approx(scatter_s)
    assert prices.reduce_s(0, last=True) == prices.gather_s(0) == 0.0


@pytest.mark.parametrize(
    ("axes", "weights", "gathered", "summed"),
    [
        # 500 bytes of experts and 500 others, each scattered over two or over four, and nothing summed.
        (Axes(dp_shard=2, ep=2), "sharded", (2, 4), ()),
        # No two ranks have the same experts; all have the others.
        (Axes(ep=4), "resident", (), (4,)),
        (Axes(dp_replicate=2, ep=2), "resident", (), (2, 4)),
    ],
)
def test_experts_are_summed_among_the_ranks_that_have_them(
    axes: Axes, weights: Weights, gathered: tuple[int, ...], summed: tuple[int, ...]
) -> None:
    """A ring of n at 100 B/s: (n - 1) x 0.25 s and (n - 1) / n x 5 s, twice for a sum."""

    def ring_s(n: int) -> float:
        return (n - 1) * 0.25 + (n - 1) / n * 5.0

    layout = Layout(axes, 1, "1f1b", 1, axes.replicas, weights)
    prices = WeightCollectives(layout, cluster(), experts=0.5)
    gather_s = sum(map(ring_s, gathered))
    assert prices.gather_s(1000) == pytest.approx(gather_s)
    assert prices.reduce_s(1000, last=True) == pytest.approx(gather_s + 2 * sum(map(ring_s, summed)))


def test_ranks_that_share_experts_are_apart_where_ep_is_within_a_node() -> None:
    """As the mesh of a run: of two nodes of two, ep 2 is within a node and dp_shard 2 between them."""
    nodes = cluster("2x2xh100-80gb")
    nodes = nodes.model_copy(update={"outer": nodes.inner.model_copy(update={"bytes_per_s": 1.0})})
    layout = Layout(Axes(dp_shard=2, ep=2), 1, "1f1b", 1, 4, "sharded")
    assert WeightCollectives(layout, nodes, experts=1.0).gather_s(1000) >= 500.0
    within = Layout(Axes(dp_shard=2), 1, "1f1b", 1, 2, "sharded")
    assert WeightCollectives(within, nodes).gather_s(1000) < 10.0


def test_gloo_sums_whole_gradients_to_scatter_them() -> None:
    """An all-reduce of two in 2 x (0.25 + 5) s, and copies of 1,000 bytes and of the own half."""
    among = cluster("2xcpu")
    copied_s = default_of(among.devices[0]).copied_s(1500, among.devices[0])
    prices = WeightCollectives(Layout(Axes(dp_shard=2), 1, "1f1b", 1, 2), among)
    assert prices.reduce_s(1000, last=False) == pytest.approx(10.5 + copied_s, rel=1e-12)
    assert prices.gather_s(1000) == pytest.approx(5.25)


@pytest.mark.parametrize(
    ("schedule", "bytes_per_s", "seen_s"),
    [
        ("1f1b", 800.0, 0.189 * 1.0),  # 0.75 s in all, of which computing is slower
        ("1f1b", 100.0, 10.5 - 2.0),
        ("zero-bubble", 800.0, 0.25 + 0.5 + 0.25),
    ],
)
def test_a_collective_that_only_begins_is_hidden_by_gradients_of_weights(
    schedule: ScheduleName, bytes_per_s: float, seen_s: float
) -> None:
    """Gate and up compute 1 s each of such gradients while the sum of what they read is on its way: 400 bytes
    in 2 x (0.25 s + half of them), or 1,000. Where the backward is split, they come later.
    """
    plain, names = block(), ("gate", "up")
    gate = next(unit for unit in plain.units if unit.name == "gate")
    size = 1000 if bytes_per_s == 100.0 else 400
    begun = ShardedFraction(work=1.0, backward_sum=size, begun_sum=size, beside=names)
    units = tuple(u.model_copy(update={"divided": begun}) if u is gate else u for u in plain.units)
    layout, among = Layout(Axes(tp=2), 1, schedule, 1, 1), cluster(bytes_per_s=bytes_per_s)
    before, after = (
        split_times(
            Sharing.of(graph), UnitSeconds.of(profile_of(graph, [2.0] * len(BLOCK))), layout, among
        ).backward.sum()
        for graph in (plain, plain.model_copy(update={"units": units}))
    )
    assert after - before == pytest.approx(seen_s, rel=1e-2)


def test_groups_across_nodes_wait_for_the_network() -> None:
    """Two ranks of a pipeline on one node each: their replicas are within it, whatever the network is."""
    nodes = cluster("2x2xh100-80gb")
    slow = nodes.model_copy(update={"outer": nodes.inner.model_copy(update={"bytes_per_s": 1.0})})
    inside = Layout(Axes(pp=2, dp_replicate=2), 2, "1f1b", 1, 2)
    for among in (nodes, slow):
        assert WeightCollectives(inside, among).reduce_s(1000, last=True) == pytest.approx(10.5)
    across = Layout(Axes(dp_replicate=4), 1, "1f1b", 1, 4)
    assert WeightCollectives(across, slow).reduce_s(1000, last=True) > 2 * 1000 / 4, (
        "half of a quarter at 1 B/s, there and back"
    )


def test_a_copy_on_other_links_has_prices_of_its_own() -> None:
    axes = Axes(dp_shard=16)
    layout = Layout(axes, 1, "1f1b", 1, axes.replicas)
    quick = WeightCollectives(layout, parse_cluster("2x8xh100"))
    first_s, slow = quick.gather_s(10**9), parse_cluster("2x8xh100@eth100")
    assert first_s < replace(quick, cluster=slow).gather_s(10**9)
    assert replace(quick, cluster=slow).gather_s(10**9) == WeightCollectives(layout, slow).gather_s(10**9)
