"""`fit` and `plan` agree: what fits has a plan, what does not has none, and the bytes are the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from shared_captures import each_model_captured_once
from torch import Tensor, nn
from turns import in_turns

import outsize
from outsize.api import price
from outsize.api.records import AXES
from outsize.errors import NoFeasiblePlan, TooManyStages
from outsize.ir.answers.fit import DeviceFit, Fit, PlanSearched
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.plan import Axes, Plan, Stage
from outsize.planner.memory.headroom import least
from outsize.planner.search import search

BATCH = 8
SHARES = (1.1, 0.75, 0.4, 0.1)
CLUSTERS = ("1xcpu", "2xcpu", "6xcpu", "1xh100-80gb", "2xh100-80gb")


@pytest.fixture(autouse=True, scope="module")
def _shared_captures() -> Iterator[None]:
    with each_model_captured_once():
        yield


class Tagger(nn.Module):
    """Nearly all weights are in one table, which no cut divides."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return self.head(x + self.down(torch.relu(self.up(x)))).mean(1)


class Filter(nn.Module):
    """Nearly all weights are in one convolution, which tp leaves whole; BatchNorm wants two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64)
        self.wide, self.head = nn.Conv2d(64, 64, 8), nn.Linear(64, 8)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.wide(torch.relu(self.norm(self.first(image)))).flatten(1))


def tower() -> nn.Module:
    """Much more activations than weights."""
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Conv2d(3, 3, 3, padding=1), nn.Sigmoid())))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "tagger": (Tagger, (16,)),
    "filter": (Filter, (3, 8, 8)),
    "tower": (tower, (3, 64, 64)),
}


@cache
def subject(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    kind, shape = MODELS[name]
    with torch.device("meta"):
        model = kind()
    ids = torch.zeros(BATCH, *shape, dtype=torch.long)
    return model, (ids if name == "tagger" else ids.float(),)


@cache
def whole_bytes(name: str, kind: str) -> int:
    """What one device holds of all of it at its peak."""
    (device,) = outsize.fit(*subject(name), cluster=f"1x{kind}", microbatches=1).devices
    return device.p50_bytes - device.context_bytes - device.kept_bytes


def cluster(spec: str, peak_bytes: float) -> Cluster:
    """Devices that hold so much."""
    found = parse_cluster(spec)
    tight = (d.model_copy(update={"memory_bytes": least(int(peak_bytes), d)}) for d in found.devices)
    return found.model_copy(update={"devices": tuple(tight)})


def planned(name: str, where: Cluster, **wishes: Any) -> Plan | None:
    try:
        return outsize.plan(*subject(name), cluster=where, **wishes)
    except (NoFeasiblePlan, TooManyStages):
        return None


def repriced(name: str, answer: Fit, where: Cluster) -> list[int]:
    """P95 of each device by the plan's account, for the cuts that `fit` shows."""
    graph = outsize.capture(*subject(name))
    made = Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=where.name,
        axes=Axes(pp=len(answer.devices)),
        batch_size=BATCH,
        microbatches=answer.microbatches,
        schedule=answer.schedule,
        stages=tuple(Stage(units=device.units, device=device.device) for device in answer.devices),
    )
    found, _, _ = price(made, *subject(name))
    assert found.expected is not None
    return [least(s.peak_bytes, d) for s, d in zip(found.expected.stages, where.devices, strict=False)]


def check_devices(plan: Plan, devices: tuple[DeviceFit, ...]) -> None:
    """Of each device all causes together, and P95, as the plan has them."""
    assert plan.expected is not None
    for device in devices:
        causes = device.weights_bytes + device.gradients_bytes + device.optimizer_bytes
        causes += device.activations_bytes + device.boundary_bytes
        assert device.p50_bytes == pytest.approx(
            causes + device.context_bytes + device.kept_bytes, abs=len(plan.stages)
        )
        assert device.p95_bytes in {figures.p95_bytes for figures in plan.expected.stages}
        assert device.p95_bytes <= device.memory_bytes


@pytest.mark.parametrize(
    ("name", "spec"), [*in_turns(MODELS, CLUSTERS, each=2), ("tagger", "1x2xh100-80gb+1x2xv100-32gb")]
)
@pytest.mark.sample("tagger-2xcpu", "filter-1xh100-80gb", "tagger-1x2xh100-80gb+1x2xv100-32gb")
def test_what_fits_has_a_plan_and_what_has_a_plan_fits(name: str, spec: str) -> None:
    seen, kind = set[bool](), "cpu" if "cpu" in spec else "h100-80gb"
    for share in SHARES:
        where = cluster(spec, share * whole_bytes(name, kind))
        answer, plan = outsize.fit(*subject(name), cluster=where), planned(name, where)
        assert answer.fits == (plan is not None), (share, answer.answer, answer.changes)
        change = answer.changes[0] if answer.changes else None
        if plan is not None and change is not None and change.devices:
            check_devices(plan, change.devices)
            assert max(device.share for device in change.devices) == change.share <= 1
        seen.add(answer.fits)
    assert seen == {True, False}


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_of_a_pipeline_are_those_of_a_plan_with_its_cuts(name: str) -> None:
    where = parse_cluster("2xcpu")
    answer = outsize.fit(*subject(name), cluster=where)
    assert answer.answer == "YES"
    assert [device.p95_bytes for device in answer.devices] == repriced(name, answer, where)


@pytest.mark.parametrize(
    ("name", "kind", "share", "way"),
    [
        ("tagger", "cpu", 0.7, "tp"),
        ("filter", "cpu", 0.8, "dp_shard"),
        ("filter", "h100-80gb", 0.7, "weights"),
    ],
)
def test_what_it_says_to_type_fits_and_is_planned(name: str, kind: str, share: float, way: str) -> None:
    where = cluster(f"2x{kind}", share * whole_bytes(name, kind))
    answer = outsize.fit(*subject(name), cluster=where)
    assert answer.answer == "YES IF"
    assert max(device.share for device in answer.devices) > 1, "the pipeline's own numbers are there, too"
    change = answer.changes[0]
    (effect,) = change.effects
    assert isinstance(effect, PlanSearched)
    assert effect.fits_by == ("offload" if way == "weights" else "mesh")
    options = dict(change.options)
    assert way in options
    mesh = {axis: options.pop(axis) for axis in AXES if axis in options}
    wishes: dict[str, Any] = {**options, "axes": mesh or None}
    plan, again = planned(name, where, **wishes), outsize.fit(*subject(name), cluster=where, **wishes)
    assert plan is not None
    assert (again.answer, again.changes, again.axes, again.weights) == ("YES", (), plan.axes, plan.weights)
    check_devices(plan, again.devices)
    assert again.devices == change.devices
    alone = outsize.fit(*subject(name), cluster=where, axes="pp")
    assert not alone.fits


def test_axes_of_ones_own_that_do_not_fit_have_no_devices_and_say_what_they_lack() -> None:
    where = cluster("2xcpu", 0.3 * whole_bytes("tagger", "cpu"))
    answer = outsize.fit(*subject("tagger"), cluster=where, axes={"tp": 2})
    assert (answer.answer, answer.fits, answer.devices, answer.axes) == ("NO", False, (), Axes(tp=2))
    assert answer.refused is not None
    assert answer.refused.what.startswith("stage 0 needs")


def test_the_smallest_microbatches_are_tried_before_other_axes() -> None:
    """128 samples on two devices: usually 2 to 16 microbatches are looked at."""
    model, (one,) = subject("tower")
    batch = (one.repeat(16, 1, 1, 1),)
    devices = outsize.fit(model, batch, cluster="2xcpu", microbatches=128).devices
    where = cluster("2xcpu", 1.01 * max(device.p50_bytes - device.context_bytes for device in devices))
    answer, plan = outsize.fit(model, batch, cluster=where), outsize.plan(model, batch, cluster=where)
    assert answer.answer == "YES"
    assert (plan.axes, plan.microbatches) == (Axes(pp=2), 128)


def test_a_fit_does_not_look_for_what_a_pipeline_lacks_that_it_has_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own answer says that; a plan and axes of one's own have the sentence alone."""
    where, asked = cluster("2xcpu", 0.3 * whole_bytes("tagger", "cpu")), list[Any]()
    explained = search.no_feasible_plan

    def counted(*wishes: Any) -> NoFeasiblePlan:
        asked.append(wishes)
        return explained(*wishes)

    monkeypatch.setattr(search, "no_feasible_plan", counted)
    assert not outsize.fit(*subject("tagger"), cluster=where).fits
    assert not asked
    assert outsize.fit(*subject("tagger"), cluster=where, axes={"tp": 2}).refused is not None
    assert planned("tagger", where) is None
    assert len(asked) >= 2
