"""All axes that run: what comes out runs, nothing asked for is faster, what no row holds has a plan."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from findings_of import findings
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain

from outsize.errors import NoFeasiblePlan, PlanError, TooManyStages
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster, parse_cluster
from outsize.ir.findings import FirstReplicaStatistics, NoPipelineFits, NotChosen, SumOrder
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import TABLE
from outsize.ir.plan import Axes, Plan
from outsize.ir.profile import Profile
from outsize.ir.units.tensor_styles import TensorStyles
from outsize.planner.evaluate.ranking import BITS, CLOSE
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search

Models = dict[int, tuple[ModelGraph, Profile]]
BATCH = 8
# Steps within one percent count as equal; the one that needs less memory is chosen. A mesh has to be faster
# than a pipeline by more than a prediction's error.
TIE = BITS * CLOSE * (1 + 1e-9)
few = settings(max_examples=5, derandomize=True, deadline=None)
rows = st.lists(st.integers(1, 9), min_size=4, max_size=6)
MIB = 1 << 20


def models(seconds: list[int], value_bytes: int = 64) -> Models:
    """A row whose seconds and bytes shrink with the microbatch; units of 400 bytes of weights."""
    return {
        m: chain([s / m for s in seconds], value_bytes // m, 400, saved_bytes=800 // m, batch_size=BATCH // m)
        for m in (2, 4, 8)
    }


def undivided(found: Models) -> Models:
    """The same, and tp finds nothing to divide."""
    nothing = {"tensor": TensorStyles(modules=(), divided=())}
    return {count: (graph.model_copy(update=nothing), profile) for count, (graph, profile) in found.items()}


def routed(found: Models, count: int = 4) -> Models:
    """The same, and every second unit has `count` experts, of which a token chooses two."""

    def changed(graph: ModelGraph) -> ModelGraph:
        units = [
            unit.model_copy(update={"routed_bytes": 64 // len(found), "choices": 2})
            if unit.index % 2
            else unit
            for unit in graph.units
        ]
        parameters = [
            p.model_copy(update={"experts": count, "shape": (count, p.size_bytes // count)}) if at % 2 else p
            for at, p in enumerate(graph.parameters)
        ]
        return graph.model_copy(update={"units": tuple(units), "parameters": tuple(parameters)})

    return {count: (changed(graph), profile) for count, (graph, profile) in found.items()}


def small(memory_bytes: int, devices: int = 4, bytes_per_s: float = 1e6) -> Cluster:
    cluster = make_cluster(f"{devices}xcpu", "cpu", 1, devices, memory_bytes)
    link = cluster.inner.model_copy(update={"latency_s": 0.0, "bytes_per_s": bytes_per_s})
    return cluster.model_copy(update={"inner": link})


def asked(candidates: Models, cluster: Cluster, **wishes: object) -> Plan:
    request = PlanRequest(batch_size=BATCH, optimizer="sgd", **wishes)  # pyright: ignore[reportArgumentType]
    return search(request, candidates, cluster)


def step_s(candidates: Models, cluster: Cluster, **wishes: object) -> float:
    """Infinite where there is no such plan."""
    try:
        plan = asked(candidates, cluster, **wishes)
    except PlanError:
        return float("inf")
    assert plan.expected is not None
    return plan.expected.step_s


@few
@given(
    rows, st.sampled_from((1100, 1700, 3000, 10**6)), st.sampled_from((2, 4, 6)), st.sampled_from((1e3, 1e6))
)
def test_every_plan_of_all_axes_runs(seconds: list[int], memory: int, devices: int, speed: float) -> None:
    found, cluster = models(seconds), small(memory, devices, speed)
    try:
        plan = asked(found, cluster, axes="all")
    except PlanError:
        assert step_s(found, cluster) == float("inf")
        return
    plan.check_runs()
    assert (plan.unsupported, plan.axes.cp) == ("", 1)
    assert plan.axes.world_size <= devices
    again = price(plan, *found[plan.microbatches * plan.axes.replicas], cluster)
    assert plan.expected is not None
    assert again.expected is not None
    assert again.expected.step_s == pytest.approx(plan.expected.step_s)


@few
@given(rows, st.sampled_from((1700, 3000, 10**6)), st.sampled_from((1e3, 1e6)))
def test_nothing_that_is_asked_for_is_faster(seconds: list[int], memory: int, speed: float) -> None:
    """The pipeline of the default, and every mesh of four devices by its flags."""
    found, cluster = models(seconds), small(memory, 4, speed)
    best_s = step_s(found, cluster, axes="all")
    assert best_s <= step_s(found, cluster, exact=True) * TIE
    for replicate, shard, tp in product((1, 2, 4), repeat=3):
        if replicate * shard * tp in (2, 4):
            flags = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp, "schedule": "1f1b", "axes": "pp"}
            assert best_s <= step_s(found, cluster, **flags) * TIE, flags


@few
@given(rows, st.sampled_from((1500, 2500, 10**6)), st.sampled_from((1e3, 1e6)))
def test_nothing_that_is_asked_for_with_experts_is_faster(
    seconds: list[int], memory: int, speed: float
) -> None:
    """Every mesh with ep of four devices by its flags, tp too."""
    found, cluster = routed(models(seconds)), small(memory, 4, speed)
    best_s = step_s(found, cluster, axes="all")
    for replicate, shard, tp, ep in product((1, 2, 4), repeat=4):
        if ep > 1 and replicate * shard * tp * ep in (2, 4):
            flags = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp, "ep": ep}
            asked_s = step_s(found, cluster, **flags, schedule="1f1b", axes="pp")
            assert best_s <= asked_s * TIE, flags


def test_experts_are_divided_where_links_are_fast_and_nothing_else_is_to_divide() -> None:
    """A quarter of the batch takes 12 s on a rank with all weights, which has no room for them; where links
    are slow, stages are divided, too.
    """
    rows_of = {m: chain([8 / m] * 6, 64 // m, 4000, saved_bytes=8, batch_size=BATCH // m) for m in (2, 4, 8)}
    found = undivided(routed(rows_of))
    assert asked(found, small(36_000, 4, 1e5), axes="all").axes == Axes(ep=4)
    assert asked(found, small(36_000, 4, 1e3), axes="all").axes == Axes(pp=2, ep=2)


def test_experts_are_divided_over_ep_and_tp_where_a_batch_has_few_microbatches() -> None:
    """Two samples are shared by two replicas at most, layers by the two devices of a node, whose memory holds
    no half of all weights.
    """
    found = routed({2: chain([8.0] * 6, 64, 4000, saved_bytes=8, batch_size=1)})
    cluster, link = make_cluster("2x2xcpu", "cpu", 2, 2, 20_000), small(1, 2, 1e3).inner
    plan = search(
        PlanRequest(batch_size=2, optimizer="sgd"),
        found,
        cluster.model_copy(update={"inner": link, "outer": link}),
    )
    assert plan.axes == Axes(ep=2, tp=2)


@few
@given(rows, st.sampled_from((1e3, 1e6)))
def test_more_memory_never_makes_the_best_of_all_axes_slower(seconds: list[int], speed: float) -> None:
    times = [step_s(models(seconds), small(size, 4, speed), axes="all") for size in (1100, 1700, 3000, 10**6)]
    assert all(after <= before * TIE for before, after in pairwise(times))
    assert times[-1] < float("inf")


def test_what_was_given_stays() -> None:
    found, cluster = models([4] * 6), small(10**6)
    assert asked(found, cluster, axes="all", dp_replicate=2).axes.dp_replicate == 2
    assert asked(found, cluster, axes="all", tp=4).axes == Axes(tp=4)
    assert asked(found, cluster, axes="all", stages=2, microbatches=2).axes.pp == 2
    assert asked(found, cluster, axes="all", weights="resident").weights == "resident"
    assert asked(found, cluster, axes="pp").axes == asked(found, cluster, exact=True).axes == Axes(pp=4)


def test_a_tie_is_the_pipelines_and_says_both() -> None:
    found, slow = undivided(models([4] * 4)), small(10**6, 2, 20.0)
    plan = asked(found, slow, axes="all")
    assert plan.axes == Axes(pp=2)
    assert any(other.axes != plan.axes for other in plan.alternatives)
    assert any(not other.as_fast for other in findings(plan, NotChosen))
    fast = asked(found, small(10**6, 2), axes="all")
    assert (fast.axes.pp, fast.axes.replicas) == (1, 2)
    assert Axes(pp=2) in [other.axes for other in fast.alternatives]
    assert any(other.axes == {"pp": 2} and other.bit_identical for other in findings(fast, NotChosen))
    assert findings(fast, SumOrder) == [SumOrder(replicas=2, tp=1)]
    assert not findings(plan, SumOrder)


def test_statistics_of_replicas_are_stated() -> None:
    graph, profile = undivided(models([4] * 4))[2]
    norms = tuple(u.model_copy(update={"kind": "BatchNorm2d"}) for u in graph.units[:2])
    normed = {2: (graph.model_copy(update={"units": (*norms, *graph.units[2:])}), profile)}
    first = findings(asked(normed, small(10**6, 2), axes="all"), FirstReplicaStatistics)
    assert first == [FirstReplicaStatistics(layers=2, replicas=2)]
    assert not findings(asked(normed, small(10**6, 2), exact=True), FirstReplicaStatistics)
    one = {1: (graph.model_copy(update={"batch_size": BATCH}), profile)}
    whole = asked(one, small(10**6, 2), axes="all", bn="sync", microbatches=1)
    assert whole.axes.replicas == 1


def wide(first: int = 4000) -> Models:
    """A unit with nearly all weights, which no cut divides, and tp may: nobody has asked the program."""
    found = models([4] * 4)
    heavy = {
        c: g.parameters[0].model_copy(update={"size_bytes": first, "shape": (first // 4,)})
        for c, (g, _) in found.items()
    }
    return {
        c: (g.model_copy(update={"parameters": (heavy[c], *g.parameters[1:])}), p)
        for c, (g, p) in found.items()
    }


def test_what_no_pipeline_holds_is_planned_on_a_mesh_and_says_why() -> None:
    cluster = small(9000, 2)
    with pytest.raises(NoFeasiblePlan) as refused:
        asked(wide(), cluster, exact=True)
    plan = asked(wide(), cluster, axes="all")
    assert plan.axes.group_size == 2
    assert plan.unsupported == ""
    (refused_pipeline,) = findings(plan, NoPipelineFits)
    assert refused_pipeline.refusal.error_code == "E201"
    assert refused_pipeline.refusal.what == refused.value.what
    with pytest.raises(NoFeasiblePlan, match="or outsize plan MODEL without --axes pp or --exact"):
        asked(wide(), cluster, axes="pp")
    with pytest.raises(NoFeasiblePlan, match="stage 0 needs"):
        asked(wide(), small(2000, 2), axes="all")


def test_more_devices_than_units() -> None:
    with pytest.raises(TooManyStages):
        asked(models([4] * 4), small(10**6, 6), exact=True)
    plan = asked(models([4] * 4), small(10**6, 6), axes="all")
    assert (plan.axes.world_size, plan.axes.pp) in ((6, 1), (6, 2), (6, 3))


def hosted(devices: int) -> tuple[Models, Cluster]:
    """Units of 100 MiB on GPUs of 1,668, of which about 600 are left."""
    fields = {"value_bytes": MIB, "weight_bytes": 100 * MIB, "saved_bytes": MIB}
    graph, profile = chain([0.01] * 8, **fields, batch_size=4)
    device = TABLE["h100-80gb"].device("cuda:0", 1668 * MIB)
    found = parse_cluster(f"{devices}xh100-80gb")
    same = tuple(device.model_copy(update={"name": d.name}) for d in found.devices)
    return {2: (graph, profile.model_copy(update={"device": "h100-80gb"}))}, found.model_copy(
        update={"devices": same}
    )


def test_the_last_way_has_weights_or_their_optimizer_on_the_hosts() -> None:
    request = PlanRequest(batch_size=BATCH, axes="all")
    plan, alone = (search(request, *hosted(devices)) for devices in (2, 1))
    assert (plan.weights, plan.axes, plan.unsupported) == ("host-optimizer", Axes(pp=2), "")
    assert (plan.streams, alone.weights, alone.axes) == (True, "host", Axes())
    assert findings(plan, NoPipelineFits)
    assert plan.expected is not None
    assert alone.expected is not None
    assert plan.expected.step_s < 0.7 * alone.expected.step_s


def test_a_model_by_modules_takes_turns_and_is_not_divided() -> None:
    found = {
        count: (graph.model_copy(update={"form": "modules"}), profile)
        for count, (graph, profile) in models([4] * 4).items()
    }
    plan = asked(found, small(10**6, 2), axes="all")
    assert (plan.axes.tp, plan.unsupported) == (1, "")
    assert plan.schedule in ("naive", "1f1b")
    with pytest.raises(NoFeasiblePlan):
        asked(found, small(1000, 2), tp=2)
