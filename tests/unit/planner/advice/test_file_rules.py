"""What would make a plan faster, by its own figures."""

from __future__ import annotations

import pytest

from outsize.ir.answers.advice import MemoryLeft
from outsize.ir.findings import DoesNotFit, NotChosen
from outsize.ir.plan import Axes, Expected, Plan, Stage, StageFigures
from outsize.planner.advice.file_rules import levers

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


def not_chosen(**changes: object) -> NotChosen:
    """Twice the microbatches of a plan with two, under its schedule."""
    made = NotChosen(
        schedule="1f1b",
        microbatches=4,
        stages_per_device=1,
        axes={"pp": 2},
        weights="resident",
        sequence_parallel=False,
        differs=(),
        step_s=2.0,
        chosen_step_s=1.0,
        as_fast=False,
        more_bytes=0,
    )
    return made.model_copy(update=changes)


NO_FIT = DoesNotFit(
    schedules=("gpipe", "1f1b"),
    microbatches=4,
    stages_per_device=1,
    axes={"pp": 2},
    weights="resident",
    shortage=None,
)


def gains(chosen: Plan) -> dict[str, float]:
    return {lever.code: lever.gain for lever in levers(chosen) if not isinstance(lever, MemoryLeft)}


def test_uneven_stages() -> None:
    assert gains(plan(figures(1.0), figures(3.0))) == pytest.approx({"balance": 1 / 3})
    assert gains(plan(figures(2.0), figures(2.0))) == {}


def test_twice_the_microbatches() -> None:
    found = gains(plan(figures(1.0), figures(1.0), microbatches=2))
    assert found == pytest.approx({"microbatches": 1 - (5 / 4) / (3 / 2)})
    assert gains(plan(figures(1.0), figures(1.0), microbatches=2, schedule="naive")) == {}


def test_what_the_search_has_tried_is_no_lever() -> None:
    one = figures(1.0)
    assert gains(plan(one, one, microbatches=2, why=(not_chosen(),))) == {}
    assert gains(plan(one, one, microbatches=2, why=(not_chosen(schedule="gpipe"),))) != {}
    assert gains(plan(one, one, microbatches=2, why=(not_chosen(axes={"pp": 2, "tp": 2}),))) != {}
    assert gains(plan(one, one, microbatches=2, why=(NO_FIT,))) == {}


def test_an_interleaved_alternative_has_been_tried_as_well() -> None:
    """Its text says "(4 stages a device)" between the schedule and the microbatches."""
    one, eight = figures(1.0), tuple(Stage(units=(f"h.{i}",), device=f"cpu:{i % 2}") for i in range(8))
    made = plan(one, one, microbatches=2, schedule="interleaved", stages=eight)
    assert made.expected is not None
    expected = made.expected.model_copy(update={"stages": (one,) * 8})
    made = made.model_copy(update={"expected": expected})
    tried = not_chosen(schedule="interleaved", stages_per_device=4)
    assert "microbatches" in gains(made)
    assert "microbatches" not in gains(made.model_copy(update={"why": (tried,)}))


def test_recompute() -> None:
    found = gains(plan(figures(1.0), figures(1.0), recompute="full"))
    assert found == pytest.approx({"recompute": 1 / 3})


def test_room_is_counted_by_device() -> None:
    chosen = plan(figures(1.0), figures(1.0, 3 * MIB))
    assert levers(chosen)[-1] == MemoryLeft(device="cpu:1", room_bytes=MIB)
    shared = chosen.model_copy(
        update={"stages": tuple(s.model_copy(update={"device": "cpu:0"}) for s in chosen.stages)}
    )
    assert levers(shared)[-1] == MemoryLeft(device="cpu:0", room_bytes=0)


def test_no_figures_no_levers() -> None:
    assert levers(plan(figures(1.0)).model_copy(update={"expected": None})) == ()
