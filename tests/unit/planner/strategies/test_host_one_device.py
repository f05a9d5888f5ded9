"""Plans whose weights come to one device: when a search makes one, its stages, its four sums, its price."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from findings_of import findings
from planner_graphs import chain

from outsize.errors import BadOption, NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.findings import FullestDevice, HostRoofline, HostStates, SlowestStage, WeightsOnHost
from outsize.ir.hardware.devices import host_bytes_per_s
from outsize.ir.hardware.links import LINKS
from outsize.ir.plan import Plan
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.offload.host_traffic import block_ends
from outsize.planner.search.evaluate_plan import price, timeline
from outsize.planner.search.search import search
from outsize.policies.weights import HOSTED

HOST_BYTES_PER_S = host_bytes_per_s("")

MIB = 1 << 20


def one(memory_mib: int) -> Cluster:
    """A GPU of so much memory."""
    found = parse_cluster("1xh100-80gb")
    (device,) = found.devices
    return found.model_copy(
        update={
            "devices": (
                device.model_copy(update={"memory_bytes": memory_mib * MIB, "context_bytes": 530 * MIB}),
            )
        }
    )


def model(saved_mib: int = 1) -> dict[int, object]:
    """Eight units of 100 MiB of weights: 400 MiB each with AdamW."""
    fields = {"value_bytes": MIB, "weight_bytes": 100 * MIB, "saved_bytes": saved_mib * MIB}
    graph, profile = chain([0.01] * 8, **fields)
    return {2: (graph, profile.model_copy(update={"device": "h100-80gb"}))}


def asked(memory_mib: int, **wishes: object) -> Plan:
    request = PlanRequest(batch_size=2, **wishes)  # pyright: ignore[reportArgumentType]
    return search(request, model(), one(memory_mib))  # pyright: ignore[reportArgumentType]


def test_one_device_that_is_too_small_gets_a_plan_that_runs() -> None:
    plan = asked(1400)
    assert (plan.weights, plan.unsupported, plan.streams) == ("host", "", True)
    assert (plan.schedule, len(plan.stages), plan.axes.world_size) == ("gpipe", 8, 1)
    plan.check_runs()
    assert [reason.host_bytes // MIB for reason in findings(plan, WeightsOnHost)] == [3200]
    # 800 MiB of weights, twice as much of states, gradients of two units.
    (states,) = findings(plan, HostStates)
    assert (states.host_bytes // MIB, states.bytes_per_parameter) == (2600, pytest.approx(13.0))
    assert not findings(plan, SlowestStage)


def test_where_gradients_are_kept_the_host_has_them_all() -> None:
    """4 bytes a parameter each of weights and gradients; 8-bit states are 2 and a scale for each 256."""
    for wishes, each in (
        ({"schedule": "1f1b", "weights": "host"}, (16.0, True)),
        ({"optimizer": "adam8bit", "weights": "host"}, (10.0, False)),
    ):
        (states,) = findings(asked(9000, **wishes), HostStates)
        assert (round(states.bytes_per_parameter, 1), states.in_parts) == each


def test_a_device_too_small_for_the_degree_asked_for_hears_what_that_lacks() -> None:
    """Two units of 100 MiB and their gradients, and no states; not what a resident model would need."""
    with pytest.raises(NoFeasiblePlan) as refused:
        asked(700, weights="host")
    text = str(refused.value)
    assert "weights on the host, 2 microbatches, all recomputed: stage 0 needs 513.0 MiB" in text
    assert "weights 200.0 + gradients 200.0 + activations 113.0 MiB" in text
    assert refused.value.next_step == "--weights host-activations, or devices with more memory"
    assert asked(2300, weights="host").weights == "host"


def test_it_is_the_last_resort_unless_it_is_asked_for() -> None:
    """The least degree that fits, of those that are as fast."""
    assert asked(9000).weights == "resident"
    assert asked(2300).weights == "host-optimizer"
    assert asked(1400).weights == "host"
    assert asked(9000, weights="host").weights == "host"
    assert asked(9000, weights="host-optimizer").weights == "host-optimizer"
    with pytest.raises(NoFeasiblePlan):
        asked(1400, weights="resident")
    with pytest.raises(NoFeasiblePlan):
        asked(1400, weights="host-optimizer")
    with pytest.raises(NoFeasiblePlan):
        asked(700)


def test_the_faster_degree_is_taken() -> None:
    """40 MiB saved of each unit: beside all weights there is room for them only where they are recomputed."""
    ((graph, profile),) = model(saved_mib=40).values()  # pyright: ignore[reportGeneralTypeIssues]
    found = search(PlanRequest(batch_size=2), {2: (graph, profile)}, one(2100))
    assert (found.weights, found.recompute) == ("host", "none")
    assert found.expected is not None
    _, kept, host, _ = found.expected.degrees
    assert kept.fits
    assert (kept.recompute, host.recompute) == (True, False)
    assert kept.step_s > host.step_s


def test_what_each_degree_costs() -> None:
    """With all on the device nothing moves; weights that stay come once; the optimizer's time is the same."""
    plan = asked(2300)
    assert plan.expected is not None
    resident, kept, host, away = plan.expected.degrees
    assert [d.weights for d in plan.expected.degrees] == ["resident", *HOSTED]
    assert [d.fits for d in plan.expected.degrees] == [False, True, True, True]
    assert away.recompute
    assert resident.bound.parts == {**dict.fromkeys(host.bound.parts, 0.0), "compute": pytest.approx(0.48)}
    assert host.bound.to_device_s == pytest.approx(2 * kept.bound.to_device_s)
    assert kept.bound.to_device_s == pytest.approx(LINKS["pcie5"].seconds(800 * MIB))
    assert host.bound.to_host_s == kept.bound.to_host_s
    assert host.bound.optimizer_s == kept.bound.optimizer_s > 0
    assert kept.step_s == plan.expected.step_s
    # All weights instead of two stages': the gradients of two in both.
    assert kept.peak_bytes - host.peak_bytes == 600 * MIB
    assert resident.peak_bytes > kept.peak_bytes + 1600 * MIB


def test_one_microbatch_at_a_time_all_gradients_stay() -> None:
    layers, one_by_one = (asked(9000, weights="host-optimizer", schedule=s) for s in ("gpipe", "1f1b"))
    assert (layers.schedule, one_by_one.schedule) == ("gpipe", "naive")
    held = [plan.expected.degrees[1].peak_bytes for plan in (layers, one_by_one) if plan.expected]
    assert held[1] - held[0] == pytest.approx(600 * MIB, abs=16 * MIB)
    assert one_by_one.expected is not None
    bound = one_by_one.expected.degrees[1].bound
    assert bound.to_host_s == pytest.approx(LINKS["pcie5"].seconds(800 * MIB)), (
        "once, not for each microbatch"
    )


def test_what_has_no_memory_of_its_own_or_no_stages_is_told_so() -> None:
    cpu = parse_cluster("1xcpu")
    with pytest.raises(BadOption, match="'1xcpu' computes in the host's"):
        search(PlanRequest(batch_size=2, weights="host"), model(), cpu)  # pyright: ignore[reportArgumentType]
    ((graph, profile),) = model().values()  # pyright: ignore[reportGeneralTypeIssues]
    whole = {2: (graph.model_copy(update={"form": "modules"}), profile)}
    with pytest.raises(BadOption, match="runs by modules"):
        search(PlanRequest(batch_size=2, weights="host"), whole, one(1400))


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"weights": "host", "tp": 2}, "a pipeline with one device a rank; asked for: tp 2"),
        ({"weights": "host", "cp": 2}, "a pipeline with one device a rank; asked for: cp 2"),
        ({"weights": "host-optimizer", "dp_shard": 2}, "asked for: dp_shard 2"),
        ({"weights": "host-activations", "tp": 2}, "a pipeline with one device a rank; asked for: tp 2"),
        ({"weights": "host", "schedule": "1f1b", "stages": 2}, "pp 2, weights 'host': gpipe. Next"),
        ({"weights": "host", "schedule": "zero-bubble"}, "pp 1, weights 'host': gpipe, 1f1b, naive"),
    ],
)
def test_what_weights_on_the_host_are_not_for(wishes: dict[str, Any], said: str) -> None:
    """It lacks no memory, and no other microbatches would help."""
    with pytest.raises(BadOption, match=said):
        search(PlanRequest(batch_size=2, **wishes), model(), parse_cluster("2xh100-80gb"))  # pyright: ignore[reportArgumentType]


def test_naive_is_an_order_of_one_device() -> None:
    naive, alike = (asked(9000, weights="host", schedule=s) for s in ("naive", "1f1b"))
    assert naive == alike
    assert naive.schedule == "naive"


def test_stages_add_up_to_what_the_device_holds() -> None:
    """Weights of two places; no states."""
    plan = asked(1400)
    assert plan.expected is not None
    rows = plan.expected.stages
    assert sum(row.weights_bytes for row in rows) == 200 * MIB
    assert sum(row.optimizer_bytes for row in rows) == 0
    assert sum(row.parameters for row in rows) == 8 * 25 * MIB


def test_the_four_sums() -> None:
    """Two microbatches of 8 x (10 + 20) ms; weights twice, gradients once over the link; AdamW's bytes."""
    plan = asked(1400)
    link = LINKS["pcie5"]
    optimizer_s = 8 * (100 + 2 * 100 + 2 * 200) * MIB / HOST_BYTES_PER_S
    sums = (0.48, 2 * link.seconds(800 * MIB), link.seconds(800 * MIB), optimizer_s)
    (roofline,) = findings(plan, HostRoofline)
    assert tuple(roofline.bound.parts.values()) == pytest.approx(sums, rel=0.01)
    assert roofline.bound.longest == "compute"


@pytest.mark.parametrize(("memory_mib", "weights"), [(1400, "host"), (2300, "host-optimizer")])
def test_a_plan_is_priced_as_it_was_made(memory_mib: int, weights: str) -> None:
    plan = asked(memory_mib)
    assert plan.weights == weights
    ((graph, profile),) = model().values()  # pyright: ignore[reportGeneralTypeIssues]
    again = price(plan, graph, profile, one(memory_mib))
    assert again.expected is not None
    assert plan.expected is not None
    assert (again.expected.step_s, again.expected.stages) == (plan.expected.step_s, plan.expected.stages)
    assert again.expected.degrees == plan.expected.degrees
    played = timeline(plan, graph, profile, one(memory_mib))
    lanes = Counter(span.lane for span in played.spans)
    assert lanes["compute"] == 2 * 2 * 8
    assert lanes["load"] >= 2 * 8
    taken = next(degree for degree in plan.expected.degrees if degree.weights == weights)
    last_s = plan.expected.step_s - played.duration_s
    assert taken.bound.optimizer_s / 8 <= last_s + 1e-9 < taken.bound.optimizer_s, "beside the backwards"
    assert played.duration_s > sum(2 * (r.forward_s + r.backward_s) for r in plan.expected.stages)


def test_a_block_ends_where_little_crosses() -> None:
    """Values of 1, 5, 2, 9 bytes between five units: not before what reads 5 and 9."""
    graph, profile = chain([1.0] * 5)
    sizes = [1, 5, 2, 9]
    values = tuple(
        v.model_copy(update={"size_bytes": sizes[v.producer]}) for v in graph.values if v.consumers
    )
    graph = graph.model_copy(update={"values": values})
    assert block_ends(graph, UnitSeconds.of(profile), 64) == (0, 1, 3, 5)


def test_the_fullest_device_is_said_of_the_stages_that_were_cut() -> None:
    """The search had 64 blocks, of which 16 stages were made: two of those hold more than two blocks."""
    graph, profile = chain([0.01] * 64, value_bytes=MIB, weight_bytes=50 * MIB, saved_bytes=MIB)
    candidates = {2: (graph, profile.model_copy(update={"device": "h100-80gb"}))}
    plan = search(PlanRequest(batch_size=2, weights="host"), candidates, one(3000))
    assert plan.expected is not None
    (taken,) = [degree for degree in plan.expected.degrees if degree.weights == "host"]
    assert len(plan.stages) < 64
    assert [full.used_bytes for full in findings(plan, FullestDevice)] == [taken.peak_bytes]
