"""Several devices whose weights live on the hosts: stages in turns, seconds and bytes by hand, the choice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from findings_of import findings
from planner_graphs import chain

from outsize.errors import NoFeasiblePlan, PlanError, UnknownDevice
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.findings import DevicesInTurns, MemoryShortage, NoPipelineFits, StageValuesOnHost
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import Device, host_bytes_per_s
from outsize.ir.hardware.links import LINKS
from outsize.ir.plan import Axes, Plan
from outsize.ir.profile import Profile
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.memory.account import component_counts, joint_states
from outsize.planner.memory.in_flight_states import states_by_rank
from outsize.planner.search.evaluate_plan import price, timeline
from outsize.planner.search.search import search
from outsize.planner.strategies import host_round_robin
from outsize.policies.weights import DEGREES
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

HOST_BYTES_PER_S = host_bytes_per_s("")

MIB = 1 << 20
Models = dict[int, tuple[ModelGraph, Profile]]
UNITS = 8


def models(weight_mib: int = 100, saved_mib: int = 2, counts: tuple[int, ...] = (2, 4)) -> Models:
    """Eight units of 100 MiB of weights, 400 MiB each with AdamW; 20 ms forward of a batch of 8."""
    found: Models = {}
    for count in counts:
        sizes = {"value_bytes": 2 * MIB // count, "saved_bytes": saved_mib * MIB // count}
        where = {"weight_bytes": weight_mib * MIB, "batch_size": 8 // count}
        graph, profile = chain([0.02 / count] * UNITS, **sizes, **where)
        found[count] = graph, profile.model_copy(update={"device": "h100-80gb"})
    return found


def several(memory_mib: int, devices: int = 2) -> Cluster:
    found = parse_cluster(f"{devices}xh100-80gb")
    same = (
        d.model_copy(update={"memory_bytes": memory_mib * MIB, "context_bytes": 530 * MIB})
        for d in found.devices
    )
    return found.model_copy(update={"devices": tuple(same)})


def asked(memory_mib: int, devices: int = 2, found: Models | None = None, **wishes: object) -> Plan:
    request = PlanRequest(batch_size=8, **wishes)  # pyright: ignore[reportArgumentType]
    return search(request, found or models(), several(memory_mib, devices))


def test_what_fits_nowhere_is_shared_in_turns_and_runs() -> None:
    plan = asked(1250, axes="all")
    assert (plan.axes, plan.schedule, plan.weights) == (Axes(pp=2), "gpipe", "host")
    assert (plan.unsupported, plan.streams) == ("", True)
    plan.check_runs()
    assert plan.ranks == (0, 1) * (UNITS // 2)
    assert [stage.device for stage in plan.stages] == ["cuda:0", "cuda:1"] * (UNITS // 2)
    assert findings(plan, NoPipelineFits)
    assert findings(plan, DevicesInTurns)


def test_it_is_asked_for_by_its_degree() -> None:
    assert [asked(9000, weights=degree).weights for degree in ("host", "host-optimizer")] == [
        "host",
        "host-optimizer",
    ]
    assert asked(9000, axes="all").weights == "resident"
    assert asked(1430, axes="all").weights == "host-optimizer", "no slower, and nothing comes twice"
    assert asked(1250, 4, weights="host", stages=2).axes.pp == 2
    assert asked(1250, 4, weights="host").axes.pp == 4
    assert asked(1250, weights="host", stages=1).axes.world_size == 1
    assert asked(1250, weights="host", schedule="1f1b").axes.world_size == 1, "not breadth first"


def test_seconds_by_hand() -> None:
    """Four stages a device, 20 ms forward and 40 backward a batch; the pipeline fills once. A device waits
    the weights of its first stage, gradients of that leave behind it, then the optimizer goes through a half
    of the states with a half of the host's memory, beside the backwards of others.
    """
    plan = asked(9000, weights="host", microbatches=4, recompute="none")
    assert plan.expected is not None
    one, move = 0.06 / 4, LINKS["pcie5"].seconds(100 * MIB)
    optimizer_s = UNITS // 2 * (100 + 2 * 100 + 2 * 200) * MIB / (HOST_BYTES_PER_S / 2)
    # Its last stage, behind the last gradients; each of the other three has a backward of 4 x 10 ms.
    least = (4 * UNITS // 2 + 1) * one + optimizer_s / 4
    assert least + move < plan.expected.step_s < least + 3 * move
    parts = plan.expected.degrees[2].bound
    assert parts.compute_s == pytest.approx(0.06 * UNITS / 2)
    assert parts.to_device_s == pytest.approx(2 * LINKS["pcie5"].seconds(100 * MIB * UNITS // 2))
    assert parts.to_host_s == pytest.approx(LINKS["pcie5"].seconds(100 * MIB * UNITS // 2))
    assert parts.optimizer_s == pytest.approx(optimizer_s)


@pytest.mark.parametrize(("degree", "places"), [("host", 2), ("host-optimizer", UNITS // 2)])
def test_a_device_has_two_of_its_own_stages(degree: str, places: int) -> None:
    """Weights of two, or of all; gradients of two; values of all microbatches at each end of a stage."""
    plan = asked(9000, weights=degree, microbatches=2, recompute="full")
    assert plan.expected is not None
    rows = plan.expected.stages[::2]
    assert sum(row.weights_bytes for row in rows) == places * 100 * MIB
    assert sum(row.gradients_bytes for row in rows) == 2 * 100 * MIB
    assert sum(row.optimizer_bytes for row in rows) == 0
    ends = sum(row.boundary_bytes + row.activations_bytes for row in rows)
    kept = 2 * (2 * UNITS // 2 - 1) * MIB  # two microbatches of 1 MiB in and out of each stage
    assert kept <= ends <= kept + (100 + 8) * MIB, "and a gradient that is being made"


def test_a_tied_weight_stays_with_its_owner() -> None:
    """The last unit uses the first one's: the owner has it beside its two places, and its gradient."""
    graph, profile = models()[2]
    tied = graph.units[-1].model_copy(update={"parameters": graph.units[0].parameters})
    parameters = tuple(p for p in graph.parameters if p.name not in graph.units[-1].parameters)
    shared = graph.model_copy(update={"units": (*graph.units[:-1], tied), "parameters": parameters})
    plan = asked(9000, weights="host", found={2: (ModelGraph.model_validate(shared.model_dump()), profile)})
    assert plan.expected is not None
    owner, user = (sum(r.weights_bytes for r in plan.expected.stages[rank::2]) // MIB for rank in (0, 1))
    assert (owner, user) == (300, 300), "two places and the tied weight, here kept and there received"


@pytest.mark.parametrize(("memory_mib", "weights"), [(1250, "host"), (1430, "host-optimizer")])
def test_such_a_plan_is_priced_as_it_was_made(memory_mib: int, weights: str) -> None:
    plan, cluster = asked(memory_mib, axes="all"), several(memory_mib)
    assert (plan.weights, plan.axes.pp) == (weights, 2)
    model = models()[plan.microbatches]
    again = price(plan, *model, cluster)
    assert plan.expected is not None
    assert again.expected == plan.expected
    assert tuple(d.weights for d in plan.expected.degrees) == DEGREES
    assert [d.fits for d in plan.expected.degrees] == [False, weights != "host", True, True]
    played = timeline(plan, *model, cluster)
    assert played.ranks == 2
    optimizer_s, stages = plan.expected.degrees[2].bound.optimizer_s, len(plan.stages) // 2
    last_s = plan.expected.step_s - played.duration_s
    assert optimizer_s / stages <= last_s + 1e-9 < optimizer_s, "beside the backwards, but for the last stage"
    small = price(plan, *model, several(900))
    assert "cuda:0" in [shortage.device for shortage in findings(small, MemoryShortage)]
    elsewhere = plan.stages[0].model_copy(update={"device": "cuda:7"})
    with pytest.raises(UnknownDevice, match="names 'cuda:7'"):
        price(plan.model_copy(update={"stages": (elsewhere, *plan.stages[1:])}), *model, cluster)


def of_values_model(units: int, microbatches: int) -> tuple[ModelGraph, Profile]:
    """Units that hand on 160 MiB of the batch."""
    size = 160 * MIB // microbatches
    fields = {"value_bytes": size, "weight_bytes": 100 * MIB, "saved_bytes": size}
    graph, profile = chain([0.02 / microbatches] * units, **fields)
    return graph, profile.model_copy(update={"device": "h100-80gb"})


def of_values(units: int, microbatches: int, **wishes: object) -> Plan:
    """The same on two devices."""
    found = {microbatches: of_values_model(units, microbatches)}
    return search(PlanRequest(batch_size=microbatches, **wishes), found, several(1500))  # pyright: ignore[reportArgumentType]


def test_inputs_of_all_microbatches_that_do_not_fit_are_on_the_hosts() -> None:
    plan = of_values(16, 32, axes="all")
    assert (plan.weights, plan.axes.pp, plan.recompute) == ("host-activations", 2, "full")
    plan.check_runs()
    (held,) = findings(plan, StageValuesOnHost)
    assert held.host_bytes == 15 * 160 * MIB
    assert plan.expected is not None
    *_, host, away = plan.expected.degrees
    assert (host.fits, away.fits) == (False, True)
    moved = LINKS["pcie5"].seconds(8 * 160 * MIB)
    assert away.bound.to_device_s - host.bound.to_device_s == pytest.approx(moved, rel=0.01), (
        "once, for backwards"
    )
    assert away.bound.to_host_s - host.bound.to_host_s == pytest.approx(moved, rel=0.01)
    again = price(plan, *of_values_model(16, 32), several(1500))
    assert again.expected == plan.expected


def test_their_peak_hardly_knows_the_depth() -> None:
    """The account has a message of 5 MiB for each stage of a device, not the inputs of 32 microbatches."""
    peaks = [
        plan.expected.degrees[-1].peak_bytes
        for units in (8, 12, 16)
        if (plan := of_values(units, 32, weights="host-activations", stages=2)).expected
    ]
    assert len(peaks) == 3
    assert max(peaks) - min(peaks) <= (16 - 8) // 2 * 5 * MIB


def test_more_memory_and_more_devices_never_make_it_slower() -> None:
    def step_s(memory_mib: int, devices: int) -> float:
        try:
            plan = asked(memory_mib, devices, models(saved_mib=40), axes="all")
        except PlanError:
            return float("inf")
        assert plan.expected is not None
        return plan.expected.step_s

    times = {n: [step_s(size, n) for size in (900, 1150, 1250, 1430, 2300, 9000)] for n in (1, 2, 4)}
    for found in times.values():
        assert all(after <= 1.01 * before for before, after in pairwise(found))
    for fewer, more in pairwise(times.values()):
        assert all(b <= 1.01 * a for a, b in zip(fewer, more, strict=True))
    assert times[2][2] < 0.7 * times[1][2] < float("inf")


@pytest.mark.parametrize("counts", [(1, 2), (2, 4), (8,)])
def test_no_step_is_shorter_than_its_bound(counts: tuple[int, ...]) -> None:
    """Which is what all devices compute, and a share of the update for each host."""
    cluster, found = several(9000, 4), models(counts=counts)
    request = PlanRequest(batch_size=8, weights="host")
    bounded = list(host_round_robin._layouts_and_cuts(request, found, cluster, [False, True]))
    assert {layout.axes.pp for _, layout, _ in bounded} == {2, 4}
    for least_s, layout, cut in bounded:
        pp, count = layout.axes.pp, layout.microbatches
        plan = host_round_robin._plan(request, found[count][0], cluster, pp, count, cut.bounds)
        changes = {"weights": layout.weights, "recompute": "full" if cut.choices[0] else "none"}
        made = price(plan.model_copy(update=changes), *found[count], cluster)
        assert made.expected is not None
        assert 0 < least_s <= made.expected.step_s


@pytest.mark.parametrize(("memory_mib", "saved_mib"), [(1250, 200), (900, 2), (1430, 400), (2300, 700)])
def test_what_is_left_out_for_its_bytes_fits_nowhere(memory_mib: int, saved_mib: int) -> None:
    found, request = models(saved_mib=saved_mib), PlanRequest(batch_size=8)
    kept, everything = (
        {
            (layout.axes.pp, layout.microbatches, layout.weights, cut.bounds, cut.choices)
            for _, layout, cut in host_round_robin._layouts_and_cuts(request, found, cluster, [False, True])
        }
        for cluster in (several(memory_mib, 4), several(90000, 4))
    )
    assert kept < everything
    for pp, count, weights, bounds, choices in everything - kept:
        plan = host_round_robin._plan(request, found[count][0], several(memory_mib, 4), pp, count, bounds)
        changes = {"weights": weights, "recompute": "full" if choices[0] else "none"}
        assert findings(
            price(plan.model_copy(update=changes), *found[count], several(memory_mib, 4)), MemoryShortage
        )


@pytest.mark.parametrize(("stages", "microbatches", "ranks"), [(4, 2, 2), (4, 7, 2), (6, 9, 3), (8, 12, 2)])
def test_a_turn_of_many_microbatches_is_played_in_part(stages: int, microbatches: int, ranks: int) -> None:
    """Whatever the bytes are: the peak is that of the whole step."""
    edges = frozenset(pairwise(range(stages)))
    whole = lower(build("gpipe", stages, microbatches, ranks), edges, frozenset((b, a) for a, b in edges))
    drawn = np.random.default_rng(0)
    for rank, found in enumerate(states_by_rank("gpipe", stages, microbatches, ranks)):
        moments = (joint_states(whole, rank), found)
        all_of, part = (
            np.array([[n for a in m for n in component_counts(a)] for m in each]) for each in moments
        )
        sizes = drawn.random((20, all_of.shape[1]))
        assert (all_of @ sizes.T).max(0) == pytest.approx((part @ sizes.T).max(0))


def test_where_it_is_not() -> None:
    """Two stages do not fit; a device without a link to its host is none."""
    with pytest.raises(NoFeasiblePlan):
        asked(700, axes="all")
    request = PlanRequest(batch_size=8, weights="host")
    assert not list(host_round_robin._layouts_and_cuts(request, models(), parse_cluster("2xcpu"), [True]))


def unlike(slower: float, memory_mib: int = 9000) -> tuple[Cluster, Models]:
    """Two devices of one node, the second of which computes at a share of the first's speed; 32 units."""
    cluster, found = several(memory_mib), Models()
    first, second = cluster.devices
    peaks = {dtype: slower * flops for dtype, flops in second.flops_per_s.items()}
    reached = {"bytes_per_s": slower * second.bytes_per_s, "flops_per_s": peaks, "kind": "slower"}
    cluster = cluster.model_copy(update={"devices": (first, second.model_copy(update=reached))})
    for count in (4, 8):
        graph, profile = chain(
            [0.02 / count] * 4 * UNITS, value_bytes=2 * MIB // count, batch_size=8 // count
        )
        found[count] = graph, profile.model_copy(update={"device": "h100-80gb"})
    return cluster, found


def test_devices_that_differ_have_stages_as_they_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """At half of the speed a device has half of the units, and the step is that of three half devices; in
    equal stages it would be that of two of the slower ones.
    """
    cluster, found = unlike(0.5)
    alone = UnitSeconds.of
    halves = {"h100-80gb": 1.0, "slower": 2.0}

    def on_kind(_graph: object, profile: Profile, _timed: object, device: Device) -> UnitSeconds:
        seconds, times = alone(profile), halves[device.kind]
        return UnitSeconds(
            *(times * part for part in (seconds.forward, seconds.backward_input, seconds.backward_weight))
        )

    monkeypatch.setattr(host_round_robin, "on_kind", on_kind)
    plan = search(PlanRequest(batch_size=8, weights="host", stages=2, recompute="none"), found, cluster)
    assert (plan.axes.pp, plan.ranks) == (2, (0, 1) * (len(plan.stages) // 2))
    units = [len(stage.units) for stage in plan.stages]
    assert sum(units[::2]) == pytest.approx(2 * sum(units[1::2]), abs=len(plan.stages) // 2)
    assert plan.expected is not None
    alone_s = 0.06 * 4 * UNITS
    assert alone_s * 2 / 3 <= plan.expected.step_s < alone_s * 0.85
    again = price(plan, *found[plan.microbatches], cluster)
    assert again.expected == plan.expected
    assert timeline(plan, *found[plan.microbatches], cluster).duration_s <= plan.expected.step_s
