"""Weights on the host: two buffers played event by event, bytes by hand, and when a search takes it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from findings_of import findings
from hypothesis import given
from hypothesis import strategies as st
from planner_graphs import chain

from outsize.errors import NoFeasiblePlan, UnsupportedPlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.findings import ComputeBound, WeightsOnHost
from outsize.ir.hardware.devices import TABLE, host_bytes_per_s
from outsize.ir.hardware.links import LINKS, Link
from outsize.ir.plan import Axes, Plan, ScheduleName
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.account import InFlightState, Phase, peak_table
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.offload.host_traffic import (
    BlockTraffic,
    Host,
    StreamedBlocks,
    hosted,
    layerwise,
    staying,
    streamed,
)
from outsize.planner.partition.stage_prices import PricedModel
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search
from outsize.policies.activations import Recompute

HOST_BYTES_PER_S = host_bytes_per_s("")

BARE = Link(name="bare", latency_s=0.0, bytes_per_s=1.0)
FORWARD, BACKWARD = (InFlightState(1, 0, 0, 0, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
UPDATE = InFlightState(0, 0, 0, 0, Phase.UPDATE)


def layout(schedule: ScheduleName, microbatches: int, axes: Axes | None = None) -> Layout:
    axes = axes or Axes()
    captured = microbatches * axes.replicas
    return Layout(axes, axes.pp, schedule, microbatches, captured, "host")


# -- seconds ---------------------------------------------------------------------------------------------


def played_forward(compute: Sequence[int], move: Sequence[int]) -> int:
    """Two buffers: a block's weights are fetched once the block two before it is done, and one at a time."""
    done, fetched = [0, 0], [0]
    for block, seconds in enumerate(compute):
        fetched.append(max(fetched[-1], done[block]) + move[block])
        done.append(max(fetched[-1], done[-1]) + seconds)
    return done[-1]


def played_backward(compute: Sequence[int], taken: Sequence[int], given: Sequence[int]) -> int:
    """From the last block, which is there: beside it the one before comes, and the gradients after it go."""
    now = 0
    for block in reversed(range(len(compute))):
        come = taken[block - 1] if block else 0
        go = given[block + 1] if block + 1 < len(compute) else 0
        now += max(compute[block], come, go)
    return now + given[0]


blocks = st.lists(st.tuples(*[st.integers(1, 9)] * 4), min_size=1, max_size=6)


@given(blocks, st.integers(1, 4))
def test_layer_by_layer_is_what_two_buffers_do(rows: list[tuple[int, ...]], m: int) -> None:
    """All microbatches of a block, one move."""
    forward, backward, taken, given_ = (list(column) for column in zip(*rows, strict=True))
    seconds = UnitSeconds(*(np.array(c, float) for c in (forward, backward, [0] * len(rows))))
    cut = range(len(rows) + 1)
    found = streamed(seconds, BlockTraffic(cut, taken, given_), layout("gpipe", m), Host(BARE, 1e9))
    all_of = [m * c for c in forward], [m * c for c in backward]
    assert m * found.forward.sum() == pytest.approx(played_forward(all_of[0], taken))
    assert m * found.backward.sum() == pytest.approx(played_backward(all_of[1], taken, given_))


def played_once(
    rows: Sequence[tuple[int, ...]], together: int, forwards: int, backwards: int
) -> tuple[int, int]:
    """Weights queue from the beginning; gradients leave beside the backward of the block before, which waits
    for them; `forwards` and `backwards` of other microbatches wait for nothing.
    """
    fetched, now = 0, 0
    for forward, _, come, _ in rows:
        fetched += come
        now = max(now, fetched) + together * forward
    back = 0
    for (_, backward, _, _), go in zip(reversed(rows), (0, *(g for *_, g in reversed(rows))), strict=False):
        back += max(together * backward, go)
    everything = [sum(column) for column in zip(*rows, strict=True)]
    return now + forwards * everything[0], back + rows[0][-1] + backwards * everything[1]


@given(blocks, st.integers(1, 4), st.sampled_from(["gpipe", "1f1b"]))
def test_weights_that_stay_come_once(rows: list[tuple[int, ...]], m: int, name: ScheduleName) -> None:
    forward, backward, taken, given_ = (list(column) for column in zip(*rows, strict=True))
    seconds = UnitSeconds(*(np.array(c, float) for c in (forward, backward, [0] * len(rows))))
    traffic = BlockTraffic(range(len(rows) + 1), taken, given_)
    found = staying(seconds, traffic, layout(name, m), Host(BARE, 1e9))
    passes, back = played_once(rows, *((m, 0, 0) if name == "gpipe" else (1, m - 1, m - 1)))
    assert m * found.forward.sum() == pytest.approx(passes)
    assert m * found.backward.sum() == pytest.approx(back)


def test_one_microbatch_after_the_other_moves_all_weights_each_time() -> None:
    """Two blocks of 4 and 6 s of link against 1 s of compute: 6 s beside the first one's forward, then 1."""
    seconds = UnitSeconds(np.ones(2), np.ones(2), np.zeros(2))
    found = streamed(seconds, BlockTraffic((0, 1, 2), (4, 6), (4, 6)), layout("1f1b", 2), Host(BARE, 1e9))
    assert found.forward.tolist() == [6 + 4 / 2, 1]
    assert found.backward.tolist() == [6 + 4 / 2, 4]
    once = streamed(seconds, BlockTraffic((0, 1, 2), (4, 6), (4, 6)), layout("gpipe", 2), Host(BARE, 1e9))
    assert once.forward.tolist() == [3 + 2, 1]


def test_what_a_block_waits_for_is_with_its_first_unit() -> None:
    seconds = UnitSeconds(np.ones(4), np.ones(4), np.zeros(4))
    found = streamed(seconds, BlockTraffic((0, 2, 4), (1, 9), (0, 0)), layout("1f1b", 1), Host(BARE, 1e9))
    assert found.forward.tolist() == [1 + (9 - 2) + 1, 1, 1, 1]


def test_a_slow_memory_is_slower_than_its_link() -> None:
    host = Host(BARE, 0.5)
    assert (host.move_s(3), host.move_s(3, 1), host.move_s(0, 2, adding=4)) == (6, 8, 16)
    assert (Host(BARE, 1e9).move_s(3, 5), Host(BARE, 1e9).move_s(0)) == (5, 0)


@pytest.mark.parametrize(
    ("name", "link", "devices"),
    [("1xh100-80gb", "pcie5", 1), ("2x8xh100-80gb", "pcie5", 8), ("4xv100-32gb+2xa100-40gb", "pcie3", 4)],
)
def test_devices_of_a_node_share_its_memory(name: str, link: str, devices: int) -> None:
    found = parse_cluster(name)
    assert Host.of(found, len(found.devices)) == Host(LINKS[link], HOST_BYTES_PER_S / devices)
    assert Host.of(found, 1).bytes_per_s == HOST_BYTES_PER_S


def test_gpipe_goes_layer_by_layer() -> None:
    assert layerwise(layout("gpipe", 4))
    assert not layerwise(layout("1f1b", 4))


# -- bytes -----------------------------------------------------------------------------------------------


def case_of(
    where: Layout, recompute: Recompute = "none", n: int = 4, name: str = "1xh100-80gb"
) -> PricedModel:
    """A chain: 100 bytes of weights a unit, 10 saved, 8 handed on; a block is a unit."""
    graph, profile = chain([1.0] * n)
    whole = PricedModel.of(graph, profile, where.captured, "adamw")
    alone = UnitSeconds.of(profile)
    blocks = StreamedBlocks.of(graph, profile, alone, optimizer_bytes("adamw"))
    return hosted(whole, blocks, range(n + 1), where, parse_cluster(name), recompute)


def peak(case: PricedModel, moment: InFlightState, n: int = 4) -> int:
    return int(peak_table(case.ranges, (moment,))[0, n])


def test_a_device_has_two_blocks_and_all_that_is_saved() -> None:
    graph, profile = chain([1.0] * 4)
    resident = PricedModel.of(graph, profile, 1, "adamw")
    here = case_of(layout("1f1b", 2)).ranges.of_run(0, 4)
    assert (here.weights, here.gradients, here.optimizer, here.update) == (200, 200, 0, 0)
    assert here.saved == 40
    assert case_of(layout("1f1b", 2)).ranges.of_run(2, 3).weights == 100, "a stage of one block has no other"
    # The four units' 400 bytes of weights are 200, and so are their gradients; a fifth is being made in both.
    for moment in (FORWARD, BACKWARD):
        states = int(resident.ranges.of_run(0, 4).optimizer)
        assert peak(case_of(layout("1f1b", 2)), moment) == peak(resident, moment) - states - 2 * 200
    assert peak(case_of(layout("1f1b", 2)), UPDATE) == 400


def test_layer_by_layer_each_microbatch_has_the_end_of_a_block() -> None:
    one, by_layer = (case_of(layout(name, 4)).ranges.of_run(0, 4) for name in ("1f1b", "gpipe"))
    assert by_layer.saved == one.saved + 8
    assert by_layer.backward == one.backward + 8


def test_recomputed_blocks_keep_what_they_receive() -> None:
    """Three of four receive 8 bytes; the one at work has 10 saved, a gradient of 100, and both its ends."""
    here = case_of(layout("1f1b", 2), "full").ranges.of_run(0, 4)
    assert here.saved == 3 * 8
    graph, profile = chain([1.0] * 4)
    middle = PricedModel.of(graph, profile, 1, "adamw").ranges.of_run(1, 2)
    ends = middle.received + middle.sent + middle.gradient_in + middle.gradient_out
    assert here.backward == 24 + (middle.backward - 100) + ends + 200
    assert case_of(layout("1f1b", 2), "full").recompute == "full"


def test_recomputing_needs_no_other_move() -> None:
    """100 bytes take 10 us, a block 1 s in its forward and 3 s in its backward with the second forward."""
    kept, anew = (case_of(layout("1f1b", 2), how).seconds for how in ("none", "full"))
    assert anew.forward.tolist() == kept.forward.tolist()
    assert anew.backward.sum() - kept.backward.sum() == pytest.approx(4)


def test_the_optimizer_goes_through_all_that_the_host_has() -> None:
    """A float32 weight of 100 bytes: its gradient read, itself and 204 bytes of states read and written."""
    after = case_of(layout("1f1b", 2)).after_s
    assert after is not None
    each_s = (100 + 2 * 100 + 2 * 204) / HOST_BYTES_PER_S
    assert after[0, 4] == pytest.approx(4 * each_s)
    assert after[1, 3] == pytest.approx(2 * each_s)


# -- when it is taken ------------------------------------------------------------------------------------

MIB = 2**20


def small(memory_mib: int, kind: str = "h100-80gb", devices: int = 1) -> Cluster:
    """Devices with so little memory; a context of 530 MiB and segments leave nothing below 600 MiB."""
    one = TABLE[kind].device("cuda:0", memory_mib * MIB).model_copy(update={"context_bytes": 530 * MIB})
    found = parse_cluster(f"{devices}x{kind}")
    same = (one.model_copy(update={"name": device.name}) for device in found.devices)
    return found.model_copy(update={"devices": tuple(same)})


def asked(cluster: Cluster, forward_s: float = 0.01, **wishes: object) -> Plan:
    """Eight units of 100 MiB of weights: 3.2 GiB with AdamW, 1 MiB saved of each."""
    fields = {"value_bytes": MIB, "weight_bytes": 100 * MIB, "saved_bytes": MIB}
    graph, profile = chain([forward_s] * 8, **fields)
    profile = profile.model_copy(update={"device": cluster.devices[0].kind})
    request = PlanRequest(batch_size=2, **wishes)  # pyright: ignore[reportArgumentType]
    return search(request, {2: (graph, profile)}, cluster)


def test_what_fits_nowhere_is_planned_with_weights_on_the_host() -> None:
    plan = asked(small(1400))
    assert (plan.weights, plan.unsupported) == ("host", "")
    (host,) = findings(plan, WeightsOnHost)
    assert host.host_bytes // MIB == 3200
    assert "PCIe 5.0 x16" in host.link
    assert plan.expected is not None
    assert isinstance(plan.expected.limited_by, ComputeBound), "the optimizer is beside the backward"
    assert sum(row.weights_bytes for row in plan.expected.stages) == 200 * MIB
    beside = plan.model_copy(update={"axes": Axes(dp_replicate=2)})
    with pytest.raises(UnsupportedPlan, match="weights on the host"):
        beside.check_runs()
    assert Plan.model_validate_json(plan.to_json()) == plan


def test_its_seconds_are_the_passes_and_the_optimizer() -> None:
    """10 ms a unit in the forward and 20 in the backward, twice: 100 MiB come in 2 ms beside that, and the
    optimizer is beside the backwards but for the last unit.
    """
    plan = asked(small(1400))
    move_s = LINKS["pcie5"].seconds(100 * MIB)
    last_s = (100 + 2 * 100 + 2 * 200) * MIB / HOST_BYTES_PER_S
    assert plan.expected is not None
    assert plan.expected.step_s == pytest.approx(2 * 8 * 0.03 + 2 * move_s + last_s, rel=1e-4)


def test_a_cpu_has_no_other_memory_and_two_blocks_may_not_fit() -> None:
    for cluster in (small(900, "cpu"), small(700), small(700, devices=2)):
        with pytest.raises(NoFeasiblePlan, match="stage 0 needs"):
            asked(cluster)


def test_it_is_the_last_resort() -> None:
    assert asked(small(1400, devices=8)).weights != "host"
    assert asked(small(9000)).weights == "resident"


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_plan_on_the_host_is_priced_as_it_was_made(schedule: ScheduleName) -> None:
    cluster = small(1400)
    plan = asked(cluster, schedule=schedule)
    assert plan.weights == "host"
    graph, profile = chain([0.01] * 8, value_bytes=MIB, weight_bytes=100 * MIB, saved_bytes=MIB)
    again = price(plan, graph, profile.model_copy(update={"device": "h100-80gb"}), cluster)
    assert again.expected is not None
    assert plan.expected is not None
    assert again.expected.step_s == pytest.approx(plan.expected.step_s)
    assert again.expected.stages == plan.expected.stages
    assert all(a < b for a, b in pairwise(plan.bounds(graph)))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_floor_is_below_both_ways(recompute: Recompute) -> None:
    """What a block waits for is with its first unit: where it recomputes it works longer and waits less."""
    graph, profile = chain([20e-6] * 130, weight_bytes=2_000_000)
    where, cluster = Layout(Axes(pp=100), 100, "1f1b", 2, 2, "host"), parse_cluster("100xh100-80gb")
    menu = Pricing({2: (graph, profile)}, cluster, "adamw")
    seconds = menu.stages.case(where, cluster.devices[0], recompute).seconds.total
    assert menu.bounds.least_s(where) <= 2 * max(seconds.sum() / 100, seconds.max()) * (1 + 1e-9)
