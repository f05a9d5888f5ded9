"""Advice by hand: each rule speaks on a model made for it, with its figures, and is silent else."""

from __future__ import annotations

import pytest
from planner_graphs import chain, graph_of, parameter, profile_of, unit, value

from outsize.ir.answers.advice import Advice
from outsize.ir.cluster import Cluster, Link, make_cluster
from outsize.ir.findings import CheapestDevices
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.ir.profile import Profile
from outsize.planner.advice.plan_rules import advise
from outsize.planner.search.evaluate_plan import price

Model = tuple[ModelGraph, Profile]
ROOM = 10**9


def cluster(devices: int = 2, memory_bytes: int = ROOM, bytes_per_s: float = 1e12) -> Cluster:
    made = make_cluster(f"{devices}xcpu", "cpu", 1, devices, memory_bytes)
    return made.model_copy(update={"inner": Link(name="wire", latency_s=0.0, bytes_per_s=bytes_per_s)})


def advice(
    model: Model, bounds: tuple[int, ...], where: Cluster, microbatches: int = 32, **changes: object
) -> dict[str, Advice]:
    graph, profile = model
    devices = tuple(d.name for d in where.devices)
    plan = Plan(
        model="toy",
        fingerprint=graph.fingerprint,
        cluster=where.name,
        axes=Axes(pp=len(bounds) - 1),
        batch_size=microbatches,
        microbatches=microbatches,
        schedule="1f1b",
        stages=stages_from_bounds(graph, bounds, devices),
    ).model_copy(update=changes)
    return {a.code: a for a in advise(price(plan, graph, profile, where), graph, profile, where)}


def test_a_balanced_pipeline_that_needs_its_devices_is_left_alone() -> None:
    model = chain([0.1] * 8, weight_bytes=10_000)
    assert advice(model, (0, 4, 8), cluster(memory_bytes=200_000)) == {}


def test_replicas_where_one_device_is_enough() -> None:
    found = advice(chain([0.1] * 8), (0, 4, 8), cluster(), microbatches=4)["data-parallelism"]
    # 2 microbatches a replica of 8 x 0.3 s; the pipeline needs 4 + 1 turns of half of that
    assert found.samples_per_s == pytest.approx(4 / 4.8, rel=1e-3)
    assert found.ratio == pytest.approx(5 * 1.2 / 4.8, rel=1e-3)


def test_no_replicas_of_devices_that_differ_nor_where_money_counts() -> None:
    """A group is of one kind; and a plan on one of two devices may have been chosen for its price."""
    (graph, profile), where = chain([0.1] * 8), cluster()
    stages = stages_from_bounds(graph, (0, 8), ("cpu:0",))
    how = Axes(pp=1), 4, 4, "1f1b", stages
    names = "axes", "batch_size", "microbatches", "schedule", "stages"
    plan = Plan.model_validate(
        {"model": "toy", "fingerprint": graph.fingerprint, "cluster": where.name}
        | dict(zip(names, how, strict=True))
    )
    plan = price(plan, graph, profile, where)
    assert "data-parallelism" in {a.code for a in advise(plan, graph, profile, where)}
    other = where.devices[1].model_copy(update={"kind": "slower"})
    unequal = where.model_copy(update={"devices": (where.devices[0], other)})
    assert "data-parallelism" not in {a.code for a in advise(plan, graph, profile, unequal)}
    cheap = CheapestDevices(
        devices=1,
        of_devices=2,
        price_per_million=1.0,
        fastest_devices=2,
        fastest_step_s=1.0,
        fastest_price_per_million=2.0,
    )
    plan = plan.model_copy(update={"why": (cheap, *plan.why)})
    assert "data-parallelism" not in {a.code for a in advise(plan, graph, profile, where)}


def test_replicas_that_share_what_one_device_cannot_hold() -> None:
    """160,000 bytes of each device for good, beside 320,000 in two stages with a bubble of a quarter."""
    model, room = chain([0.1] * 8, weight_bytes=10_000), cluster(memory_bytes=230_000)
    found = advice(model, (0, 4, 8), room, microbatches=2)["data-parallelism"]
    # one microbatch of 8 x 0.3 s each, against 2 + 1 turns of half of that
    assert found.ratio == pytest.approx(3 * 1.2 / 2.4, rel=1e-3)
    assert (found.cluster, found.sharded) == ("2xcpu", True)
    assert advice(model, (0, 4, 8), room, microbatches=3).keys() == set(), "three cannot be shared by two"


def test_links_too_slow_for_tensor_parallelism() -> None:
    model = chain([0.1] * 8, value_bytes=4_000, weight_bytes=10_000)
    slow = advice(model, (0, 4, 8), cluster(memory_bytes=200_000, bytes_per_s=1e4))["slow-links"]
    # units 1, 3, 5 are reduced (7 makes no value): forward and backward, each 2 messages of half the bytes
    assert slow.sent_s == pytest.approx(3 * 2 * 4_000 / 1e4)
    assert slow.saved_s == pytest.approx(8 * 0.3 / 2)
    assert slow.ratio == pytest.approx(2.0)


def test_a_heavy_unit_and_the_small_stage_beside_it() -> None:
    found = advice(chain([0.1, 0.1, 0.1, 0.9], weight_bytes=10_000), (0, 3, 4), cluster())
    heavy = found["heavy-unit"]
    assert (heavy.unit, heavy.amount, heavy.share) == ("h.3", "compute", pytest.approx(0.75))
    thin = advice(chain([0.1, 0.1, 0.1, 0.9]), (0, 1, 4), cluster())["small-stage"]
    assert thin.share == pytest.approx(1 / 12)


def test_branches_in_another_order() -> None:
    """Five towers of 3, 2, 3, 2, 2 and what joins them: 7 by runs, 6 in any order."""
    graph = graph_of([unit(i) for i in range(6)], [value(i, i, (5,), 8) for i in range(5)])
    model = graph, profile_of(graph, [1.0, 2 / 3, 1.0, 2 / 3, 2 / 3, 0.0])
    found = advice(model, (0, 2, 6), cluster())["branches"]
    assert (found.runs_s, found.stages_s) == pytest.approx((7.0, 6.0))
    assert found.moved == "h.3", "the first unit of the first stage that its own order has later"


def test_a_fat_boundary_names_its_values() -> None:
    values = [value(0, 0, (1,), 4), value(1, 1, (2,), 400), value(2, 0, (3,), 4_000, grad=False)]
    parameters = [parameter(f"h.{i}.weight", size_bytes=4) for i in range(4)]
    graph = graph_of([unit(i, (f"h.{i}.weight",)) for i in range(4)], values, parameters)
    fat = advice((graph, profile_of(graph, [0.1] * 4)), (0, 2, 4), cluster(bytes_per_s=1e4))["fat-boundary"]
    assert fat.moved_bytes == 2 * 400 + 4_000
    assert fat.moved_s == pytest.approx(0.48)
    assert (fat.largest, fat.more_values) == ((("h.0", 4_000), ("h.1", 400)), 0)


def test_optimizer_state_on_the_fuller_device() -> None:
    heavy = [400, 400, *[2_000] * 20]
    graph = graph_of(
        [unit(i, (f"h.{i}.weight",), saved_bytes=10) for i in range(22)],
        [value(i, i, (i + 1,), 8) for i in range(21)],
        [parameter(f"h.{i}.weight", size_bytes=size) for i, size in enumerate(heavy)],
    )
    found = advice((graph, profile_of(graph, [0.1] * 22)), (0, 2, 22), cluster(memory_bytes=180_000))
    states = found["optimizer-state"]
    assert states.states_share * states.full_share * 180_000 >= 80_000


def test_devices_without_work() -> None:
    idle = advice(chain([0.1] * 8), (0, 4, 8), cluster(3))["unused-devices"]
    assert (idle.unused, idle.devices) == (1, 3)
    few = advice(chain([0.1] * 8), (0, 4, 8), cluster(), microbatches=2, schedule="naive", batch_size=8)
    assert few["idle-devices"].try_microbatches == 8


def test_a_plan_without_figures_has_no_advice() -> None:
    graph, profile = chain([0.1] * 4)
    plan = Plan(
        model="toy",
        fingerprint=graph.fingerprint,
        cluster="2xcpu",
        axes=Axes(pp=2),
        batch_size=2,
        microbatches=2,
        schedule="1f1b",
        stages=stages_from_bounds(graph, (0, 2, 4), ("cpu:0", "cpu:1")),
    )
    assert advise(plan, graph, profile, cluster()) == ()
