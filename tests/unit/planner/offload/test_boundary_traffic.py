"""What blocks hand to each other on the host: bytes by hand, seconds played, and when it is chosen."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from findings_of import findings
from planner_graphs import chain, graph_of, parameter, profile_of, unit, value

from outsize.errors import BadOption, NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.findings import WeightsOnHost
from outsize.ir.hardware.links import LINKS, Link
from outsize.ir.plan import Axes, Plan
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.range_tables import RangeTables
from outsize.planner.offload.boundary_traffic import BoundaryTraffic
from outsize.planner.offload.host_traffic import BlockTraffic, Host, StreamedBlocks, streamed
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search

MIB = 1 << 20
BARE = Link(name="bare", latency_s=0.0, bytes_per_s=1.0)
COUNTS = (2, 8, 32)


def test_what_moves_by_hand() -> None:
    """A value of 4 MiB from 0 to 1 and 3, one of 2 MiB from 1 to 2, one of 1 kB from 2 to 3."""
    values = [value(0, 0, (1, 3), 4 * MIB), value(1, 1, (2,), 2 * MIB), value(2, 2, (3,), 1000)]
    graph = graph_of([unit(u) for u in range(4)], values)
    ranges = RangeTables.of(graph, profile_of(graph, [1.0] * 4), optimizer_bytes("adamw"))
    traffic = BoundaryTraffic.of(graph, ranges)
    received, sent = [0, 4 * MIB, 2 * MIB, 4 * MIB + 1000], [4 * MIB, 2 * MIB, 1000, 0]
    assert traffic.comes[0].tolist() == received
    assert traffic.goes[0].tolist() == [a + b for a, b in zip(received, sent, strict=True)]
    back = [4 * MIB, 6 * MIB, 1000 + 0, 0]
    assert traffic.goes[1].tolist() == received, "a gradient for each value"
    assert (traffic.comes[1] - received).tolist()[0] == back[0]
    assert traffic.small.tolist() == [0, 0, 0, 1000]
    assert traffic.moved_bytes == (
        int(sum(traffic.comes[0] + traffic.comes[1])),
        int((traffic.goes[0] + traffic.goes[1]).sum()),
    )


def test_what_moves_where_blocks_are_dealt_to_devices() -> None:
    """Blocks 0 and 2 are on one device, 1 and 3 on another: 4 MiB go from 0 to both of these, and 2 MiB from
    0 to 2, which stay with their device.
    """
    values = [value(0, 0, (1, 3), 4 * MIB), value(1, 0, (2,), 2 * MIB), value(2, 2, (3,), 1000)]
    graph = graph_of([unit(u) for u in range(4)], values)
    traffic = BoundaryTraffic.of_turns(graph, (0, 1, 0, 1))
    received = [0, 4 * MIB, 2 * MIB, 4 * MIB]
    assert traffic.comes[0].tolist() == [0, 0, 2 * MIB, 0], "a message comes by itself"
    assert traffic.goes[0].tolist() == [2 * MIB, *received[1:]], (
        "what was received leaves, and what stays here"
    )
    assert traffic.comes[1].tolist() == [2 * MIB, *received[1:]], "a gradient, and what was received"
    assert traffic.goes[1].tolist() == [0, 0, 2 * MIB, 0], "that gradient"
    assert traffic.small.tolist() == [0, 0, 0, 1000]
    assert traffic.moved_by([0, 2]) == (6 * MIB, 6 * MIB)


def test_they_move_beside_the_weights() -> None:
    """Two blocks, three microbatches: 3 x 2 bytes beside the 5 of the next block's weights."""
    one = np.array([0, 2]), np.array([2, 0])
    boundary = BoundaryTraffic((one[0], one[0] + one[1]), (one[0] + one[1], one[0]), np.zeros(2, np.int64))
    seconds = UnitSeconds(np.ones(2), np.ones(2), np.zeros(2))
    layout = Layout(Axes(), 1, "gpipe", 3, 3, "host-activations")
    found = streamed(seconds, BlockTraffic((0, 1, 2), (4, 5), (1, 1)), layout, Host(BARE, 1e9), boundary)
    assert (3 * found.forward).tolist() == pytest.approx([max(3, 5, 3 * 2) + 4, max(3, 3 * 2)])
    assert (3 * found.backward).tolist() == pytest.approx([max(3, 3 * 2, 1) + 1, max(3, 4 + 3 * 2, 3 * 2)])


# -- when it is chosen -----------------------------------------------------------------------------------


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


def model(forward_s: float = 0.001, units: int = 16) -> dict[int, object]:
    """100 MiB of weights a unit, and 640 MiB which the batch hands from one unit to the next."""
    found = dict[int, object]()
    for count in COUNTS:
        size = 640 * MIB // count
        fields = {"value_bytes": size, "weight_bytes": 100 * MIB, "saved_bytes": size}
        graph, profile = chain([32 * forward_s / count] * units, **fields)
        found[count] = graph, profile.model_copy(update={"device": "h100-80gb"})
    return found


def asked(memory_mib: int, forward_s: float = 0.001, units: int = 16, **wishes: object) -> Plan:
    request = PlanRequest(batch_size=32, **wishes)  # pyright: ignore[reportArgumentType]
    return search(request, model(forward_s, units), one(memory_mib))  # pyright: ignore[reportArgumentType]


def test_the_last_degree_where_values_of_all_microbatches_do_not_fit() -> None:
    plan = asked(1500)
    assert (plan.weights, plan.recompute, plan.schedule) == ("host-activations", "full", "gpipe")
    assert plan.streams
    plan.check_runs()
    assert [host.weights for host in findings(plan, WeightsOnHost)] == ["host-activations"]
    assert plan.expected is not None
    degrees = {degree.weights: degree for degree in plan.expected.degrees}
    assert list(degrees) == ["resident", "host-optimizer", "host", "host-activations"]
    assert degrees["host-activations"].step_s == plan.expected.step_s
    assert degrees["host-activations"].fits
    assert not degrees["host"].fits or degrees["host"].step_s > plan.expected.step_s
    with pytest.raises(NoFeasiblePlan):
        asked(700)


def test_its_peak_knows_neither_depth_nor_microbatches() -> None:
    """With 32 microbatches of 20 MiB, whatever there are of units."""
    peaks = [
        plan.expected.degrees[-1].peak_bytes
        for units in (8, 12, 16)
        if (plan := asked(3000, units=units, weights="host-activations", microbatches=32)).expected
    ]
    assert max(peaks) == min(peaks)
    found = asked(3000, weights="host-activations", microbatches=8).expected
    assert found is not None
    assert found.degrees[-1].peak_bytes > peaks[1], "four times as large ones"


def test_units_that_read_casts_alone() -> None:
    """Half of a weight that one unit casts; nothing of one that a norm reads, or that two units use."""
    parts = [parameter("a", size_bytes=800), parameter("b", size_bytes=80), parameter("t", size_bytes=400)]
    units = [unit(0, ("a", "b")), unit(1, ("t",)), unit(2, ("t",))]
    units = [u.model_copy(update={"cast_bytes": n}) for u, n in zip(units, (400, 0, 200), strict=True)]
    graph = graph_of(units, [value(0, 0, (1,), 8), value(1, 1, (2,), 8)], parts)
    assert graph.cast_alone_bytes == (400, 0, 0)
    blocks = StreamedBlocks.of_stages(graph, profile_of(graph, [1.0] * 3), "sgd")
    assert blocks.traffic.weights == (800 + 80 - 400, 400, 400)
    assert blocks.traffic.cast == (400, 0, 0)


def test_the_bound_has_what_moves() -> None:
    """Each value comes twice and its gradient once; goes twice, and its gradient once."""
    plan = asked(3000, weights="host-activations", microbatches=32)
    assert plan.expected is not None
    *_, host, away = plan.expected.degrees
    link, values = LINKS["pcie5"], 15 * 640 * MIB
    assert away.bound.to_device_s - host.bound.to_device_s == pytest.approx(
        link.seconds(3 * values), rel=1e-3
    )
    assert away.bound.to_host_s - host.bound.to_host_s == pytest.approx(link.seconds(3 * values), rel=1e-3)
    assert away.step_s >= away.bound.step_s


def test_it_is_priced_as_it_was_made() -> None:
    plan = asked(1500)
    graph, profile = model()[plan.microbatches]  # pyright: ignore[reportGeneralTypeIssues]
    again = price(plan, graph, profile, one(1500))
    assert again.expected is not None
    assert plan.expected is not None
    assert again.expected.degrees[-1] == plan.expected.degrees[-1]
    assert (again.expected.step_s, again.expected.stages) == (plan.expected.step_s, plan.expected.stages)


@pytest.mark.parametrize("forward_s", [1e-4, 1e-3, 1e-2])
@pytest.mark.sample("0.001")
def test_more_memory_never_hurts(forward_s: float) -> None:
    """From the least that fits to all of it."""
    steps = [
        plan.expected.step_s
        for memory in (1500, 1600, 1800, 2200, 3000, 4000, 8000, 16000)
        if (plan := asked(memory, forward_s)).expected
    ]
    assert all(b <= a * 1.02 for a, b in pairwise(steps)), "stages within 2 % are as good"


@pytest.mark.parametrize("recompute", ["none", "offload"])
def test_stages_compute_anew_what_they_do_not_receive(recompute: str) -> None:
    with pytest.raises(BadOption, match="what stages receive"):
        asked(3000, weights="host-activations", recompute=recompute)
