"""What would make a plan faster, by its own figures."""

from __future__ import annotations

import pytest

from outsize.ir.plan import Axes, Expected, Plan, Stage, StageFigures
from outsize.planner.levers import levers

MIB = 1024**2


def figures(seconds: float, peak_bytes: int = MIB, device_bytes: int = 4 * MIB) -> StageFigures:
    return StageFigures(
        units=1,
        parameters=1,
        forward_s=seconds / 3,
        backward_s=2 * seconds / 3,
        weights_bytes=peak_bytes,
        gradients_bytes=0,
        optimizer_bytes=0,
        activations_bytes=0,
        boundary_bytes=0,
        busy=1.0,
        device_bytes=device_bytes,
    )


def plan(*stages: StageFigures, **changes: object) -> Plan:
    made = Plan(
        model="toy",
        fingerprint="f0",
        cluster="2xcpu",
        axes=Axes(pp=len(stages)),
        batch_size=8,
        microbatches=8,
        schedule="1f1b",
        stages=tuple(Stage(units=(f"h.{i}",), device=f"cpu:{i}") for i in range(len(stages))),
        expected=Expected(step_s=1.0, bubble=0.2, samples_per_s=8.0, stages=stages, source="roofline"),
    )
    return made.model_copy(update=changes)


def gains(chosen: Plan) -> dict[str, float]:
    return {lever.code: lever.numbers["gain"] for lever in levers(chosen) if "gain" in lever.numbers}


def test_uneven_stages() -> None:
    assert gains(plan(figures(1.0), figures(3.0))) == pytest.approx({"balance": 1 / 3})
    assert gains(plan(figures(2.0), figures(2.0))) == {}


def test_twice_the_microbatches() -> None:
    found = gains(plan(figures(1.0), figures(1.0), microbatches=2))
    assert found == pytest.approx({"microbatches": 1 - (5 / 4) / (3 / 2)})
    assert gains(plan(figures(1.0), figures(1.0), microbatches=2, schedule="naive")) == {}


def test_what_the_search_has_tried_is_no_lever() -> None:
    tried = ("not 1f1b with 4 microbatches: 2.00 s a step against 1.00 s, 100 % slower",)
    assert gains(plan(figures(1.0), figures(1.0), microbatches=2, why=tried)) == {}


def test_recompute() -> None:
    found = gains(plan(figures(1.0), figures(1.0), recompute="full"))
    assert found == pytest.approx({"recompute": 1 / 3})


def test_room_is_counted_by_device() -> None:
    chosen = plan(figures(1.0), figures(1.0, 3 * MIB))
    assert levers(chosen)[-1].sentence == "1.0 MiB are left on cpu:1, the fullest device"
    shared = chosen.model_copy(
        update={"stages": tuple(s.model_copy(update={"device": "cpu:0"}) for s in chosen.stages)}
    )
    assert levers(shared)[-1].numbers["room_bytes"] == 0


def test_no_figures_no_levers() -> None:
    assert levers(plan(figures(1.0)).model_copy(update={"expected": None})) == ()
