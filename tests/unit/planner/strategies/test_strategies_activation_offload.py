"""Activations on the host: bytes by hand, seconds by hand, and when they are chosen."""

from __future__ import annotations

import pytest
from findings_of import findings
from planner_graphs import graph_of, profile_of, unit, value

from outsize.errors import BadOption, NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.findings import ActivationsOffloaded
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import host_link
from outsize.ir.plan import Plan, ScheduleName, StageFigures
from outsize.ir.profile import Profile
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.local_search import polish
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search
from outsize.planner.strategies import activation_offload
from outsize.policies.activations import Recompute

GB = 10**9
UNITS, COUNT, KEPT, CROSSING, SMALL = 8, 8, GB // 10, GB // 1000, 1000
Model = tuple[ModelGraph, Profile]


def model(forward_s: float) -> Model:
    """Each unit keeps 100 MB, of which 1 kB in small storages, and sends 1 MB to the next."""
    units = [unit(u, saved_bytes=KEPT).model_copy(update={"saved_small_bytes": SMALL}) for u in range(UNITS)]
    graph = graph_of(units, [value(u, u, (u + 1,), CROSSING) for u in range(UNITS - 1)])
    return graph, profile_of(graph, [forward_s] * UNITS)


def cluster(devices: int, memory_bytes: int = 80 * GB, kind: str = "h100-80gb") -> Cluster:
    """Devices of which 530 MiB are their driver's."""
    found = make_cluster(f"{devices}x{kind}", kind, 1, devices, memory_bytes)
    context = {"context_bytes": 530 << 20}
    return found.model_copy(update={"devices": tuple(d.model_copy(update=context) for d in found.devices)})


def planned(
    found: Model,
    where: Cluster,
    recompute: Recompute | None = None,
    schedule: ScheduleName = "gpipe",
) -> Plan:
    request = PlanRequest(
        exact=True,
        batch_size=COUNT,
        microbatches=COUNT,
        schedule=schedule,
        recompute=recompute,
        optimizer="sgd",
    )
    return search(request, {COUNT: found}, where)


def figures(plan: Plan) -> tuple[StageFigures, ...]:
    assert plan.expected is not None
    return plan.expected.stages


def step_s(plan: Plan) -> float:
    assert plan.expected is not None
    return plan.expected.step_s


def test_all_but_two_microbatches_are_away() -> None:
    """One stage: nothing is received or sent; small storages stay."""
    kept, away = (figures(planned(model(0.1), cluster(1), how))[0] for how in ("none", "offload"))
    gone = UNITS * (KEPT - SMALL)
    assert kept.activations_bytes - away.activations_bytes == (COUNT - 2) * gone
    assert kept.boundary_bytes == away.boundary_bytes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_under_1f1b_the_late_stages_gain_nothing(stage: int) -> None:
    """4, 3, 2, 1 microbatches are in flight, and two are there in any case."""
    kept, away = (figures(planned(model(0.1), cluster(4), how, "1f1b"))[stage] for how in ("none", "offload"))
    gone = UNITS // 4 * (KEPT - SMALL)
    assert kept.activations_bytes - away.activations_bytes == max(0, 4 - stage - 2) * gone


def test_what_hides_behind_compute_costs_two_copies_a_step() -> None:
    where, found = cluster(1), model(0.1)
    link = host_link(where.devices[0])
    assert link is not None
    moved_s = link.seconds(UNITS * (KEPT - SMALL))
    assert moved_s < 0.1 * UNITS
    plain, away = (step_s(planned(found, where, how)) for how in ("none", "offload"))
    assert away == pytest.approx(plain + 2 * moved_s)


def test_a_slow_link_sets_the_pace() -> None:
    where, found = cluster(1), model(1e-4)
    link = host_link(where.devices[0])
    assert link is not None
    moved_s = link.seconds(UNITS * (KEPT - SMALL))
    first_and_last_s = 3 * UNITS * 1e-4
    assert step_s(planned(found, where, "offload")) == pytest.approx(2 * COUNT * moved_s + first_and_last_s)


def test_a_cpu_copies_in_between() -> None:
    """Its memory reads and writes: each copy takes twice the bytes, and nothing hides it."""
    where, found = cluster(1, kind="cpu"), model(0.1)
    copy_s = 2 * UNITS * (KEPT - SMALL) / where.devices[0].bytes_per_s
    plain, away = (step_s(planned(found, where, how)) for how in ("none", "offload"))
    assert away == pytest.approx(plain + 2 * COUNT * copy_s)


def test_it_is_chosen_where_it_is_faster_than_recompute() -> None:
    """A device for half of what all microbatches keep: heavy units hide the copies, light ones do not."""
    memory = round(UNITS * KEPT * COUNT / 2)
    heavy, light = (planned(model(seconds), cluster(1, memory)) for seconds in (0.1, 1e-4))
    assert heavy.recompute_of(0) == "offload"
    assert light.recompute_of(0) in ("full", "selective")
    assert step_s(heavy) < step_s(planned(model(0.1), cluster(1, memory), "selective"))
    assert [offload.stages for offload in findings(heavy, ActivationsOffloaded)] == [(0,)]
    assert heavy.expected is not None
    assert heavy.expected.gap is None


def test_a_cut_that_is_far_from_what_it_has_to_beat_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heavy units offload and are moved; of light ones the copies take many times the second forward."""
    moved = list[Candidate]()

    def seen(estimate: Candidate) -> Candidate:
        moved.append(estimate)
        return polish(estimate)

    monkeypatch.setattr(activation_offload, "polish", seen)
    for seconds, tries in ((0.1, 1), (1e-4, 0)):
        moved.clear()
        planned(model(seconds), cluster(1, round(UNITS * KEPT * COUNT / 2)))
        assert len(moved) == tries


def test_stages_with_room_keep_theirs() -> None:
    """1f1b over four: 4, 3, 2, 1 microbatches are in flight, and there is room for three."""
    where = cluster(4, round(UNITS // 4 * KEPT * 3.3 * 1.12) + 600_000_000)
    plan = planned(model(0.1), where, schedule="1f1b")
    assert [plan.recompute_of(stage) for stage in range(4)] == ["offload", "none", "none", "none"]
    assert step_s(price(plan, *model(0.1), where)) == pytest.approx(step_s(plan))


def test_a_cpu_is_only_asked() -> None:
    memory = round(UNITS * KEPT * COUNT / 2)
    assert planned(model(0.1), cluster(1, memory, "cpu")).recompute_of(0) != "offload"
    assert planned(model(0.1), cluster(1, memory, "cpu"), "offload").recompute == "offload"


def test_two_microbatches_that_do_not_fit() -> None:
    with pytest.raises(NoFeasiblePlan):
        planned(model(0.1), cluster(1, round(1.5 * UNITS * KEPT)), "offload")


def test_weights_and_activations_on_the_host_are_refused() -> None:
    request = PlanRequest(batch_size=COUNT, microbatches=COUNT, recompute="offload", weights="host")
    with pytest.raises(BadOption, match="at once are not run"):
        search(request, {COUNT: model(0.1)}, cluster(1))
