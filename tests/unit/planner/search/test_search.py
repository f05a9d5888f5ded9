from __future__ import annotations

import pytest
from findings_of import findings
from planner_graphs import chain, graph_of, parameter, profile_of, unit, value

from outsize.errors import BadOption, NoFeasiblePlan, TooFewSamples, TooManyStages
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import GIB, Cluster, make_cluster, parse_cluster
from outsize.ir.findings import DoesNotFit, FullestDevice, NotChosen, SlowestStage
from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.planner.search.search import search

MIB = 1024**2
TWO = parse_cluster("2xcpu")
OTHERS = "or outsize plan MODEL without --axes pp or --exact, which looks beyond pipelines"


def small(devices: int, memory_bytes: int) -> Cluster:
    return make_cluster(f"{devices}xcpu", "cpu", 1, devices, memory_bytes)


def scaled(
    seconds: list[float], counts: tuple[int, ...], batch: int
) -> dict[int, tuple[ModelGraph, Profile]]:
    """A chain whose seconds and saved bytes shrink with the microbatch."""
    return {
        m: chain([s / m for s in seconds], value_bytes=8, saved_bytes=4096 // m, batch_size=batch // m)
        for m in counts
    }


def test_a_plan_of_equal_units_on_two_devices() -> None:
    plan = search(PlanRequest(exact=True, batch_size=8), scaled([0.1] * 6, (1, 2, 4, 8), 8), TWO)
    assert plan.schedule == "1f1b"
    assert plan.microbatches == 8
    assert [s.units for s in plan.stages] == [("h.0-2",), ("h.3-5",)]
    assert [s.device for s in plan.stages] == ["cpu:0", "cpu:1"]
    assert plan.expected is not None
    assert plan.expected.step_s == pytest.approx(0.9 * (8 + 2 - 1) / 8, rel=0.01)
    assert plan.expected.bubble == pytest.approx(1 / 9, abs=0.01)
    assert plan.expected.samples_per_s == pytest.approx(8 / plan.expected.step_s)
    assert plan.expected.source == "roofline"
    assert [f.busy for f in plan.expected.stages] == pytest.approx([8 / 9, 8 / 9], abs=0.01)
    assert [f.parameters for f in plan.expected.stages] == [75, 75]


def test_equal_input_gives_equal_bytes() -> None:
    texts = {
        search(PlanRequest(exact=True, batch_size=8), scaled([0.1] * 9, (2, 4), 8), TWO).to_json()
        for _ in range(2)
    }
    assert len(texts) == 1
    backwards = dict(reversed(scaled([0.1] * 9, (2, 4), 8).items()))
    assert search(PlanRequest(exact=True, batch_size=8), backwards, TWO).to_json() in texts


def test_reasons_name_the_bottleneck_and_the_rejected() -> None:
    plan = search(PlanRequest(exact=True, batch_size=8), scaled([0.1, 0.1, 0.1, 0.4], (4, 8), 8), TWO)
    slowest, fullest = plan.why[:2]
    assert isinstance(slowest, SlowestStage)
    assert (slowest.stage, slowest.units, slowest.even_share) == (1, ("h.3",), 0.5)
    assert (slowest.compute_s, slowest.share) == (pytest.approx(0.15), pytest.approx(4 / 7))
    assert isinstance(fullest, FullestDevice)
    assert fullest.device == "cpu:0"
    others = {(other.schedule, other.microbatches): other for other in findings(plan, NotChosen)}
    assert others["gpipe", 8].as_fast
    assert not others["naive", 8].as_fast
    assert others["naive", 8].step_s > others["naive", 8].chosen_step_s
    assert ("1f1b", 4) in others


def test_what_is_fixed_stays_fixed() -> None:
    request = PlanRequest(
        exact=True, batch_size=8, microbatches=2, stages=3, schedule="naive", optimizer="sgd"
    )
    plan = search(request, scaled([0.1] * 6, (1, 2, 4), 8), parse_cluster("4xcpu"))
    assert (plan.microbatches, len(plan.stages), plan.axes.pp) == (2, 3, 3)
    assert (plan.schedule, plan.optimizer) == ("naive", "sgd")


def test_a_slow_link_moves_the_cut_to_the_small_value() -> None:
    units = [unit(i) for i in range(4)]
    graph = graph_of(units, [value(0, 0, (1,), 1), value(1, 1, (2,), 10**6), value(2, 2, (3,), 10**6)])
    slow = TWO.inner.model_copy(update={"bytes_per_s": 1e6})
    model, request = (
        {2: (graph, profile_of(graph, [0.1] * 4))},
        PlanRequest(exact=True, batch_size=2, schedule="1f1b"),
    )
    assert search(request, model, TWO).stages[0].units == ("h.0-1",)
    cut = search(request, model, TWO.model_copy(update={"inner": slow}))
    assert cut.stages[0].units == ("h.0",)


def test_memory_moves_the_cut_and_chooses_the_schedule() -> None:
    """GPipe holds four microbatches, 1F1B two on stage 0 and one on stage 1."""
    model = {4: chain([0.1] * 4, saved_bytes=MIB)}
    request = PlanRequest(exact=True, batch_size=4, recompute="none")
    plan = search(request, model, small(2, 5 * MIB))
    assert plan.schedule == "1f1b"
    (rejected,) = [no for no in findings(plan, DoesNotFit) if "gpipe" in no.schedules]
    assert rejected.microbatches == 4
    assert rejected.shortage is not None
    tight = search(request, model, small(2, int(3.5 * MIB)))
    assert tight.stages[0].units == ("h.0",)


def heavy(memory_gib: float, units: int = 4) -> tuple[ModelGraph, Profile]:
    graph = graph_of(
        [unit(i, (f"h.{i}.weight",)) for i in range(units)],
        [value(i, i, (i + 1,), 8) for i in range(units - 1)],
        [parameter(f"h.{i}.weight", size_bytes=int(memory_gib * GIB)) for i in range(units)],
    )
    return graph, profile_of(graph, [0.1] * units)


def test_nothing_fits_and_more_devices_would_help() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        search(PlanRequest(exact=True, batch_size=2, microbatches=2), {2: heavy(3.0)}, TWO)
    assert str(caught.value) == (
        "NoFeasiblePlan [E201]: stage 0 needs 33.0 GiB, cpu:0 has room for 23.8; weights 6.0 + "
        "gradients 6.0 + optimizer 12.0 + activations 9.0 GiB; nearest fit: pp=4, 2 microbatches, 1f1b "
        "-> 21.0 GiB. Next: --cluster 4xcpu --stages 4; " + OTHERS
    )


def test_the_nearest_fit_is_really_one() -> None:
    model = {2: heavy(3.0)}
    with pytest.raises(NoFeasiblePlan):
        search(PlanRequest(exact=True, batch_size=2), model, parse_cluster("3xcpu"))
    assert len(search(PlanRequest(exact=True, batch_size=2), model, parse_cluster("4xcpu")).stages) == 4


def test_nothing_fits_and_smaller_microbatches_would_help() -> None:
    models = {m: chain([0.1] * 4, saved_bytes=8 * MIB // m, batch_size=8 // m) for m in (1, 2, 8)}
    request = PlanRequest(exact=True, batch_size=8, microbatches=1)
    with pytest.raises(
        NoFeasiblePlan, match=r"nearest fit: pp=2, 8 microbatches, 1f1b -> .*--microbatches 8"
    ):
        search(request, models, small(2, 5 * MIB))
    assert (
        search(PlanRequest(exact=True, batch_size=8, microbatches=8), models, small(2, 5 * MIB)).microbatches
        == 8
    )


def test_nothing_fits_and_another_schedule_would_help() -> None:
    model = {4: chain([0.1] * 4, saved_bytes=MIB)}
    with pytest.raises(
        NoFeasiblePlan, match=r"pp=2, 4 microbatches, 1f1b -> 3.0 MiB. Next: --schedule 1f1b; or"
    ):
        search(
            PlanRequest(exact=True, batch_size=4, schedule="gpipe", recompute="none"),
            model,
            small(2, 5 * MIB),
        )


def test_nothing_fits_at_all() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        search(PlanRequest(exact=True, batch_size=2), {2: heavy(10.0)}, TWO)
    assert "nothing near fits; the largest unit there is h.0 with 40.0 GiB" in str(caught.value)
    assert str(caught.value).endswith(f"Next: devices with more memory; {OTHERS}")


def test_more_stages_than_units() -> None:
    with pytest.raises(TooManyStages) as caught:
        search(
            PlanRequest(exact=True, batch_size=2, stages=5),
            scaled([0.1] * 3, (2,), 2),
            parse_cluster("8xcpu"),
        )
    assert str(caught.value) == (
        "TooManyStages [E202]: 5 stages were asked for, the model has 3 units to put into them; one unit is "
        "the smallest stage; cluster '8xcpu' has 8 devices. Next: --stages 3"
    )


def test_more_stages_than_pieces() -> None:
    with pytest.raises(
        TooManyStages, match=r"450 stages is not searched: .* in \d+ pieces; it has 820 units"
    ):
        search(PlanRequest(exact=True, batch_size=2), scaled([0.1] * 820, (2,), 2), parse_cluster("450xcpu"))


def test_more_stages_than_devices() -> None:
    with pytest.raises(
        BadOption, match=r"3 stages want as many devices; .* has 2 devices\. Next: --cluster 3xcpu"
    ):
        search(PlanRequest(exact=True, batch_size=2, stages=3), scaled([0.1] * 3, (2,), 2), TWO)


def test_more_microbatches_than_samples() -> None:
    with pytest.raises(TooFewSamples) as caught:
        search(PlanRequest(exact=True, batch_size=3, microbatches=4), scaled([0.1] * 3, (2,), 2), TWO)
    assert str(caught.value) == (
        "TooFewSamples [E104]: a batch of 3 cannot be cut into 4 microbatches; "
        "1 would be empty. Next: --microbatches 3, or a larger --batch"
    )


def test_microbatches_that_were_not_captured() -> None:
    with pytest.raises(
        BadOption, match=r"not captured for 4 microbatches; captured: 1, 2\. Next: .* 2 samples"
    ):
        search(PlanRequest(exact=True, batch_size=8, microbatches=4), scaled([0.1] * 3, (1, 2), 8), TWO)
