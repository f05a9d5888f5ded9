from __future__ import annotations

import pytest
from findings_of import findings
from planner_graphs import chain, graph_of, parameter, profile_of, unit, value

from outsize.errors import ModelMismatch, TooFewSamples, UnknownDevice
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import make_cluster, parse_cluster
from outsize.ir.findings import MemoryShortage, SlowestStage
from outsize.ir.plan import Stage
from outsize.ir.timeline import Timeline
from outsize.planner.search.evaluate_plan import price, timeline
from outsize.planner.search.search import search
from outsize.report.wording import sentence

MIB = 1024**2
TWO = parse_cluster("2xcpu")
MODEL = chain([0.1] * 6)
PLAN = search(PlanRequest(exact=True, batch_size=4, microbatches=4), {4: MODEL}, TWO)
MOVED = PLAN.model_copy(
    update={"stages": (Stage(units=("h.0",), device="cpu:0"), Stage(units=("h.1-5",), device="cpu:1"))}
)


def test_an_untouched_plan_keeps_its_figures() -> None:
    assert PLAN.expected is not None
    assert price(PLAN, *MODEL, TWO).expected == PLAN.expected.model_copy(update={"gap": None})


def test_an_edited_plan_keeps_its_cuts_and_gets_new_figures() -> None:
    priced = price(MOVED, *MODEL, TWO)
    assert priced.stages == MOVED.stages
    assert priced.expected is not None
    assert PLAN.expected is not None
    assert [f.units for f in priced.expected.stages] == [1, 5]
    assert priced.expected.step_s > PLAN.expected.step_s
    (slowest,) = findings(priced, SlowestStage)
    assert priced.why[0] == slowest
    assert (slowest.stage, slowest.units) == (1, ("h.1-5",))


def test_an_edited_plan_that_does_not_fit_says_so_and_stays() -> None:
    graph, profile = chain([0.1] * 6, saved_bytes=MIB)
    priced = price(MOVED, graph, profile, make_cluster("2xcpu", "cpu", 1, 2, 4 * MIB + 4096))
    assert priced.stages == MOVED.stages
    (shortage,) = findings(priced, MemoryShortage)
    assert priced.why[0] == shortage
    assert sentence(shortage) == "stage 1 needs 5.0 MiB, cpu:1 has room for 4.0"


def test_stages_on_swapped_devices_use_the_links_between_them() -> None:
    nodes = parse_cluster("2x2xcpu")
    apart = MOVED.model_copy(update={"stages": (MOVED.stages[0], Stage(units=("h.1-5",), device="cpu:3"))})
    near, far = timeline(MOVED, *MODEL, nodes), timeline(apart, *MODEL, nodes)
    assert sends_s(near) == pytest.approx([60e-6] * 8, rel=1e-3)
    assert sends_s(far) == pytest.approx([40e-6] * 8, rel=1e-3)


def sends_s(found: Timeline) -> list[float]:
    return [s.duration_s for s in found.spans if s.lane == "send"]


def test_the_timeline_is_the_one_the_figures_are_from() -> None:
    predicted = timeline(PLAN, *MODEL, TWO)
    assert PLAN.expected is not None
    assert predicted.source == "predicted"
    assert predicted.duration_s == PLAN.expected.step_s
    busy = [predicted.utilisation(r) for r in range(2)]
    assert busy == pytest.approx([f.busy for f in PLAN.expected.stages])
    assert [f.device_bytes for f in PLAN.expected.stages] == [d.memory_bytes for d in TWO.devices]


def test_a_tied_parameter_travels_once_a_step_and_its_gradient_with_each_microbatch() -> None:
    units = [unit(0, ("wte",)), unit(1), unit(2, ("head",))]
    tied = parameter("wte", "head", size_bytes=10**6)
    graph = graph_of(units, [value(0, 0, (1,), 4), value(1, 1, (2,), 4)], [tied])
    model = graph, profile_of(graph, [0.1] * 3)
    plan = search(PlanRequest(exact=True, batch_size=4, microbatches=4), {4: model}, parse_cluster("3xcpu"))
    spans = [s.action for s in timeline(plan, *model, parse_cluster("3xcpu")).spans if s.lane == "send"]
    assert [a for a in spans if a.startswith("0SEND_F") and a.endswith("@2")] == ["0SEND_F0@2"]
    assert sum(a.startswith("2SEND_B") and a.endswith("@0") for a in spans) == 4


def test_refusals() -> None:
    with pytest.raises(
        UnknownDevice, match=r"'cpu:1', which cluster '1xcpu' has not; its devices: cpu:0\. Next"
    ):
        price(PLAN, *MODEL, parse_cluster("1xcpu"))
    with pytest.raises(TooFewSamples):
        price(PLAN.model_copy(update={"batch_size": 3}), *MODEL, TWO)
    foreign = MODEL[0].model_copy(update={"fingerprint": "f1"})
    with pytest.raises(ModelMismatch, match="fingerprint f0 against f1"):
        price(PLAN, foreign, MODEL[1], TWO)
